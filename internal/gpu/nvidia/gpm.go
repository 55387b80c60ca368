package nvidia

import (
	"maps"
	"math"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A gpm measures a GPU with NVML's GPU performance monitoring (Hopper or newer). The driver counts,
// and two counts give a value. Only one job of the GPU may use a gpm at a time.
type gpm struct {
	counts      map[int]*gpmCounts // by the ID of the GPU instance, or wholeGPU
	measuredGIs map[int]bool       // measured in the current sample
}

const wholeGPU = -1

// gpmCounts are the driver's counts of a GPU or a GPU instance.
type gpmCounts struct {
	uuid        string         // of the GPU, or of a MIG device in the instance: instance IDs are reused
	last, spare nvml.GpmSample // spare is the next to be written
	lastTime    time.Time      // time of last; zero without last
}

// Two counts give a value if they are this far apart.
const (
	shortestCount = 900 * time.Millisecond
	longestCount  = 10 * time.Minute
)

// gpmMeasures are the measures with NVML's metrics, the factor to apply, and the highest possible
// value.
var gpmMeasures = []struct {
	metric       nvml.GpmMetricId
	measure      inventory.Measure
	factor, most float64
	instances    bool // also measured on GPU instances
}{
	{nvml.GPM_METRIC_GRAPHICS_UTIL, inventory.GraphicsActive, 0.01, 1, true},
	{nvml.GPM_METRIC_ANY_TENSOR_UTIL, inventory.TensorActive, 0.01, 1, true},
	{nvml.GPM_METRIC_DRAM_BW_UTIL, inventory.DRAMActive, 0.01, 1, true},
	{nvml.GPM_METRIC_SM_UTIL, inventory.SMActive, 0.01, 1, true},
	{nvml.GPM_METRIC_SM_OCCUPANCY, inventory.SMOccupancy, 0.01, 1, true},
	{nvml.GPM_METRIC_FP64_UTIL, inventory.FP64Active, 0.01, 1, true},
	{nvml.GPM_METRIC_FP32_UTIL, inventory.FP32Active, 0.01, 1, true},
	{nvml.GPM_METRIC_FP16_UTIL, inventory.FP16Active, 0.01, 1, true},
	{nvml.GPM_METRIC_PCIE_TX_PER_SEC, inventory.PCIeTransmit, 1 << 20, mostPCIe, false},
	{nvml.GPM_METRIC_PCIE_RX_PER_SEC, inventory.PCIeReceive, 1 << 20, mostPCIe, false},
}

// measure measures a GPU or a GPU instance since the last time. uuid is the UUID of the GPU, or of
// a MIG device in the instance.
func (p *gpm) measure(d device, gi int, uuid string, into *inventory.Measures) nvml.Return {
	if ret := d.supportsGPM(); ret != nvml.SUCCESS {
		return ret
	}
	c, ret := p.countsOf(d.api, gi, uuid)
	if ret != nvml.SUCCESS {
		return ret
	}
	if ret := d.count(gi, c.spare); ret != nvml.SUCCESS {
		return ret
	}
	now := time.Now()
	elapsed := now.Sub(c.lastTime)
	c.last, c.spare, c.lastTime = c.spare, c.last, now
	if elapsed < shortestCount || elapsed > longestCount {
		return nvml.SUCCESS
	}
	request := nvml.GpmMetricsGetType{Sample1: c.spare, Sample2: c.last}
	for _, m := range gpmMeasures {
		if gi == wholeGPU || m.instances {
			request.Metrics[request.NumMetrics].MetricId = uint32(m.metric)
			request.NumMetrics++
		}
	}
	if ret := act(d.api, "nvmlGpmMetricsGet",
		func() nvml.Return { return d.api.lib.GpmMetricsGet(&request) }); ret != nvml.SUCCESS {
		return ret
	}
	for i := range request.NumMetrics { // instance metrics come first
		got, m := request.Metrics[i], gpmMeasures[i]
		value := math.Round(got.Value*m.factor*1e6) / 1e6 // DCGM also has six decimals
		if nvml.Return(got.NvmlReturn) == nvml.SUCCESS && value >= 0 && value <= m.most && !math.IsNaN(value) {
			into.Set(m.measure, value)
		}
	}
	return nvml.SUCCESS
}

// countsOf returns the counts of a GPU or GPU instance.
func (p *gpm) countsOf(a *api, gi int, uuid string) (*gpmCounts, nvml.Return) {
	p.measuredGIs[gi] = true
	if c, ok := p.counts[gi]; ok {
		if c.uuid != uuid {
			c.uuid, c.lastTime = uuid, time.Time{}
		}
		return c, nvml.SUCCESS
	}
	last, ret := invoke(a, "nvmlGpmSampleAlloc", a.lib.GpmSampleAlloc)
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	spare, ret := invoke(a, "nvmlGpmSampleAlloc", a.lib.GpmSampleAlloc)
	if ret != nvml.SUCCESS {
		free(a, last)
		return nil, ret
	}
	c := &gpmCounts{uuid: uuid, last: last, spare: spare}
	p.counts[gi] = c
	return c, nvml.SUCCESS
}

// free frees the memory of counts.
func free(a *api, s nvml.GpmSample) { _ = act(a, "nvmlGpmSampleFree", s.Free) } // an error has no remedy

// sweep frees the counts of GPU instances missing from this sample, and begins the next sample.
func (p *gpm) sweep(a *api) {
	maps.DeleteFunc(p.counts, func(gi int, c *gpmCounts) bool {
		if p.measuredGIs[gi] {
			return false
		}
		free(a, c.last)
		free(a, c.spare)
		return true
	})
	clear(p.measuredGIs)
}

// freeCounts frees the counts of all GPUs. No sample may be running.
func (s *scanner) freeCounts() {
	for _, sl := range s.slots {
		if sl.gpm != nil {
			clear(sl.gpm.measuredGIs) // a sample may be incomplete
			sl.gpm.sweep(s.api)
		}
	}
}

// supportsGPM returns ERROR_NOT_SUPPORTED for a device without GPU performance monitoring.
func (d device) supportsGPM() nvml.Return {
	for _, function := range []string{
		"nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet",
	} {
		if !d.api.has[function] {
			return nvml.ERROR_FUNCTION_NOT_FOUND
		}
	}
	d.api.mu.Lock()
	supported := d.api.supports[question{d.handle, "nvmlGpmQueryDeviceSupport", 0}]
	d.api.mu.Unlock()
	if supported {
		return nvml.SUCCESS
	}
	_, ret := query(d, "nvmlGpmQueryDeviceSupport", func() (struct{}, nvml.Return) {
		support, ret := d.handle.GpmQueryDeviceSupport()
		if ret == nvml.SUCCESS && support.IsSupportedDevice == 0 {
			ret = nvml.ERROR_NOT_SUPPORTED
		}
		return struct{}{}, ret
	})
	return ret
}

// count writes the driver's current counts into a sample.
func (d device) count(gi int, into nvml.GpmSample) nvml.Return {
	if gi == wholeGPU {
		_, ret := query(d, "nvmlGpmSampleGet", func() (struct{}, nvml.Return) { return struct{}{}, into.Get(d.handle) })
		return ret
	}
	_, ret := queryFor(d, "nvmlGpmMigSampleGet", gi, func(gi int) (struct{}, nvml.Return) {
		return struct{}{}, into.MigGet(d.handle, gi)
	})
	return ret
}
