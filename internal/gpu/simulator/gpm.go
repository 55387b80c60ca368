package simulator

import (
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A gpmSample is a snapshot of the driver's counts for a GPU or GPU instance.
type gpmSample struct {
	node *Node

	// Guarded by node.mu.
	isFreed bool
	number  int // of the job
	at      time.Duration
}

var _ nvml.GpmSample = (*gpmSample)(nil)

// GpmQueryDeviceSupport returns whether the GPU has performance monitoring: since Hopper.
func (d device) GpmQueryDeviceSupport() (nvml.GpmSupport, nvml.Return) {
	return ask(d, "GpmQueryDeviceSupport", func(g *gpu) (nvml.GpmSupport, nvml.Return) {
		has := g.spec.model.architecture >= nvml.DEVICE_ARCH_HOPPER
		return nvml.GpmSupport{Version: nvml.GPM_SUPPORT_VERSION, IsSupportedDevice: uint32(bit(has))}, nvml.SUCCESS
	})
}

// GpmSampleAlloc returns an empty sample.
func (l *library) GpmSampleAlloc() (nvml.GpmSample, nvml.Return) {
	return query(l, "GpmSampleAlloc", func(s *session) (nvml.GpmSample, nvml.Return) {
		s.node.gpmSamples++
		return &gpmSample{node: s.node}, nvml.SUCCESS
	})
}

// Free frees the sample.
func (s *gpmSample) Free() nvml.Return {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	if s.isFreed {
		s.node.stale++
		return nvml.ERROR_INVALID_ARGUMENT
	}
	s.isFreed = true
	s.node.gpmSamples--
	delete(s.node.pins, s)
	return nvml.SUCCESS
}

// Get fills in the sample for a GPU that is not in MIG mode.
func (s *gpmSample) Get(of nvml.Device) nvml.Return {
	return s.fill(of, "GpmSampleGet", func(g *gpu) (int, nvml.Return) {
		if g.mig {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return g.slot, nvml.SUCCESS
	})
}

// MigGet fills in the sample for a GPU instance.
func (s *gpmSample) MigGet(of nvml.Device, gi int) nvml.Return {
	return s.fill(of, "GpmMigSampleGet", func(g *gpu) (int, nvml.Return) {
		at := slices.IndexFunc(g.layout.instances, func(i *gpuInstance) bool { return i.id == gi })
		if at < 0 {
			return 0, nvml.ERROR_NOT_FOUND
		}
		s.node.pins[s] = g.layout.instances[at]
		return g.slot + gi, nvml.SUCCESS
	})
}

func (s *gpmSample) fill(of nvml.Device, call string, number func(*gpu) (int, nvml.Return)) nvml.Return {
	d, ok := of.(device)
	if !ok {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	_, ret := ask(d, call, func(g *gpu) (struct{}, nvml.Return) {
		n, ret := number(g)
		switch {
		case s.isFreed:
			s.node.stale++
			return struct{}{}, nvml.ERROR_INVALID_ARGUMENT
		case g.spec.model.architecture < nvml.DEVICE_ARCH_HOPPER:
			return struct{}{}, nvml.ERROR_NOT_SUPPORTED
		case ret == nvml.SUCCESS:
			s.number, s.at = n, time.Since(s.node.began)
		}
		return struct{}{}, ret
	})
	return ret
}

// GpmMetricsGet returns the mean values between two samples.
func (l *library) GpmMetricsGet(r *nvml.GpmMetricsGetType) nvml.Return {
	_, ret := query(l, "GpmMetricsGet", func(*session) (struct{}, nvml.Return) {
		first, ok := r.Sample1.(*gpmSample)
		second, also := r.Sample2.(*gpmSample)
		if !ok || !also || first.isFreed || second.isFreed || first.at == 0 || second.at <= first.at ||
			first.number != second.number {
			return struct{}{}, nvml.ERROR_INVALID_ARGUMENT
		}
		const steps = 5
		mean := 0.0
		for at := first.at; at < second.at; at += (second.at-first.at)/steps + 1 {
			mean += load(first.number, at) / steps
		}
		factors := map[nvml.GpmMetricId]float64{
			nvml.GPM_METRIC_GRAPHICS_UTIL: 98, nvml.GPM_METRIC_ANY_TENSOR_UTIL: 44, nvml.GPM_METRIC_DRAM_BW_UTIL: 52,
			nvml.GPM_METRIC_SM_UTIL: 91, nvml.GPM_METRIC_SM_OCCUPANCY: 37, nvml.GPM_METRIC_FP64_UTIL: 0,
			nvml.GPM_METRIC_FP32_UTIL:       12,
			nvml.GPM_METRIC_FP16_UTIL:       9,
			nvml.GPM_METRIC_PCIE_TX_PER_SEC: 1900, nvml.GPM_METRIC_PCIE_RX_PER_SEC: 8600,
		}
		for i := range r.Metrics[:r.NumMetrics] {
			m := &r.Metrics[i]
			factor, known := factors[nvml.GpmMetricId(m.MetricId)]
			m.Value, m.NvmlReturn = mean*factor, uint32(nvml.SUCCESS)
			if !known {
				m.NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
			}
		}
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}

// GpmQueryDeviceSupport calls the device's method.
func (l *library) GpmQueryDeviceSupport(d nvml.Device) (nvml.GpmSupport, nvml.Return) {
	return d.GpmQueryDeviceSupport()
}
