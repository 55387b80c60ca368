package simulator

import (
	"math"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A rating has the limits of the GPUs of an architecture.
type rating struct {
	watts       float64 // power limit
	sm, memory  float64 // highest clocks in MHz
	thermometer bool    // the memory has a temperature sensor
}

var ratings = map[uint32]rating{
	nvml.DEVICE_ARCH_PASCAL:    {watts: 250, sm: 1480, memory: 715},
	nvml.DEVICE_ARCH_VOLTA:     {watts: 300, sm: 1530, memory: 877, thermometer: true},
	nvml.DEVICE_ARCH_TURING:    {watts: 70, sm: 1590, memory: 5001},
	nvml.DEVICE_ARCH_AMPERE:    {watts: 400, sm: 1410, memory: 1593, thermometer: true},
	nvml.DEVICE_ARCH_ADA:       {watts: 350, sm: 2520, memory: 9001},
	nvml.DEVICE_ARCH_HOPPER:    {watts: 700, sm: 1980, memory: 2619, thermometer: true},
	nvml.DEVICE_ARCH_BLACKWELL: {watts: 1000, sm: 1965, memory: 3996, thermometer: true},
}

// Each GPU repeats the same job: work for a part of the period, and idle for the rest. The GPUs
// have different phases.
const (
	jobPeriod = 8 * time.Minute
	jobWork   = 0.7  // part of the period
	jobOffset = 97   // seconds between two GPUs
	jobMemory = 0.62 // part of the GPU's memory
)

// load returns the load of a GPU, from 0 to 1, at a time since the node was created.
func load(number int, at time.Duration) float64 {
	seconds := at.Seconds() + float64(number*jobOffset)
	if _, part := math.Modf(seconds / jobPeriod.Seconds()); seconds < 0 || part > jobWork {
		return 0
	}
	return 0.82 + 0.15*math.Sin(2*math.Pi*seconds/47)
}

// A moment is the load of a GPU at one time.
type moment struct {
	rating
	load, warmth float64 // warmth is the mean load of the last minute
}

// momentLocked returns the current load of a GPU. A GPU with injected processes is never idle, and
// a hot GPU is slower.
func (n *Node) momentLocked(g *gpu) moment {
	at := time.Since(n.began)
	m := moment{rating: ratings[g.spec.model.architecture], load: load(g.slot, at)}
	const steps = 6
	for i := range steps {
		m.warmth += load(g.slot, at-time.Duration(i)*10*time.Second) / steps
	}
	if g.processes > 0 {
		m.load, m.warmth = max(m.load, 0.5), max(m.warmth, 0.5)
	}
	if g.isThrottled {
		m.load /= 2
	}
	return m
}

func (m moment) power() float64 { return m.watts * (0.12 + 0.85*m.load) }

func (m moment) celsius(g *gpu) float64 {
	if g.isThrottled {
		return 93
	}
	return 31 + float64(g.slot%4) + 42*m.warmth
}

// memoryLocked returns the memory of a GPU. Each process uses 1 GiB.
func (n *Node) memoryLocked(g *gpu) nvml.Memory_v2 {
	m := n.usedLocked(g.slot, g.spec.model.MemoryMiB-reservedMiB)
	m.Used = min(m.Used+uint64(g.processes)<<30, m.Used+m.Free)
	m.Total += reservedMiB << 20
	m.Reserved = reservedMiB << 20
	m.Free = m.Total - m.Used - m.Reserved
	return m
}

// instanceMemoryLocked returns the memory of a GPU instance.
func (n *Node) instanceMemoryLocked(g *gpu, i *gpuInstance) nvml.Memory_v2 {
	return n.usedLocked(g.slot+i.id, i.profile.MemoryMiB)
}

// usedLocked returns a memory with the part used by a running job.
func (n *Node) usedLocked(number int, mib uint64) nvml.Memory_v2 {
	m := nvml.Memory_v2{Total: mib << 20, Free: mib << 20}
	if load(number, time.Since(n.began)) > 0 {
		m.Used = uint64(float64(m.Total) * jobMemory)
		m.Free -= m.Used
	}
	return m
}

// energyLocked returns the energy in mJ used by a GPU since its driver was loaded. It increases
// with each call.
func (n *Node) energyLocked(g *gpu) uint64 {
	now := time.Since(n.began)
	g.energy += max(1000, uint64(n.momentLocked(g).power()*1000*(now-g.energyTime).Seconds()))
	g.energyTime = now
	return g.energy
}

// askMoment makes a call about the current load of a GPU.
func askMoment[T any](d device, call string, answer func(*gpu, moment) (T, nvml.Return)) (T, nvml.Return) {
	return ask(d, call, func(g *gpu) (T, nvml.Return) { return answer(g, d.session.node.momentLocked(g)) })
}

// GetTemperature returns degrees Celsius.
func (d device) GetTemperature(nvml.TemperatureSensors) (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetTemperature", func(g *gpu, m moment) (uint32, nvml.Return) {
		return uint32(m.celsius(g)), nvml.SUCCESS
	})
}

// GetPowerUsage returns milliwatts.
func (d device) GetPowerUsage() (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetPowerUsage", func(_ *gpu, m moment) (uint32, nvml.Return) {
		return uint32(m.power() * 1000), nvml.SUCCESS
	})
}

// GetClockInfo returns MHz.
func (d device) GetClockInfo(which nvml.ClockType) (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetClockInfo", func(g *gpu, m moment) (uint32, nvml.Return) {
		switch {
		case which == nvml.CLOCK_MEM:
			return uint32(m.memory), nvml.SUCCESS
		case g.isThrottled:
			return uint32(m.sm * 0.4), nvml.SUCCESS
		case m.load == 0:
			return uint32(m.sm * 0.18), nvml.SUCCESS
		}
		return uint32(m.sm * (1 - 0.06*m.load)), nvml.SUCCESS
	})
}

// GetMaxClockInfo returns MHz.
func (d device) GetMaxClockInfo(which nvml.ClockType) (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetMaxClockInfo", func(_ *gpu, m moment) (uint32, nvml.Return) {
		if which == nvml.CLOCK_MEM {
			return uint32(m.memory), nvml.SUCCESS
		}
		return uint32(m.sm), nvml.SUCCESS
	})
}

// askWhole is askMoment for values missing in the driver in MIG mode.
func askWhole[T any](d device, call string, answer func(moment) T) (T, nvml.Return) {
	return askMoment(d, call, func(g *gpu, m moment) (T, nvml.Return) {
		if g.mig {
			var none T
			return none, nvml.ERROR_NOT_SUPPORTED
		}
		return answer(m), nvml.SUCCESS
	})
}

// GetUtilizationRates returns the percentages of time with kernels running and with the memory in
// use.
func (d device) GetUtilizationRates() (nvml.Utilization, nvml.Return) {
	return askWhole(d, "DeviceGetUtilizationRates", func(m moment) nvml.Utilization {
		return nvml.Utilization{Gpu: uint32(m.load * 100), Memory: uint32(m.load * 55)}
	})
}

// GetEncoderUtilization returns a percentage and its sampling period in microseconds: no job
// encodes.
func (d device) GetEncoderUtilization() (uint32, uint32, nvml.Return) {
	percent, ret := askWhole(d, "DeviceGetEncoderUtilization", func(moment) uint32 { return 0 })
	return percent, 167000, ret
}

// GetDecoderUtilization returns a percentage and its sampling period in microseconds.
func (d device) GetDecoderUtilization() (uint32, uint32, nvml.Return) {
	percent, ret := askWhole(d, "DeviceGetDecoderUtilization", func(m moment) uint32 { return uint32(m.load * 12) })
	return percent, 167000, ret
}

// GetVirtualizationMode returns whether the GPU is a virtual one.
func (d device) GetVirtualizationMode() (nvml.GpuVirtualizationMode, nvml.Return) {
	return ask(d, "DeviceGetVirtualizationMode", func(g *gpu) (nvml.GpuVirtualizationMode, nvml.Return) {
		if g.spec.VGPU != nil {
			return nvml.GPU_VIRTUALIZATION_MODE_VGPU, nvml.SUCCESS
		}
		return nvml.GPU_VIRTUALIZATION_MODE_NONE, nvml.SUCCESS
	})
}

// GetGridLicensableFeatures returns one feature, unlicensed unless its state was injected.
func (d device) GetGridLicensableFeatures() (nvml.GridLicensableFeatures, nvml.Return) {
	return ask(d, "DeviceGetGridLicensableFeatures", func(g *gpu) (nvml.GridLicensableFeatures, nvml.Return) {
		all := nvml.GridLicensableFeatures{IsGridLicenseSupported: 1, LicensableFeaturesCount: 1}
		all.GridLicensableFeatures[0].FeatureState = uint32(
			d.session.node.numberLocked("DeviceGetGridLicensableFeatures", g, 0))
		return all, nvml.SUCCESS
	})
}

// GetPcieThroughput returns KB a second. Unlike the driver, it does not block.
func (d device) GetPcieThroughput(which nvml.PcieUtilCounter) (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetPcieThroughput", func(_ *gpu, m moment) (uint32, nvml.Return) {
		if which == nvml.PCIE_UTIL_TX_BYTES {
			return uint32(m.load * 2e6), nvml.SUCCESS
		}
		return uint32(m.load * 9e6), nvml.SUCCESS
	})
}

// nvlinkField returns a reader of a counter of all NVLinks of a GPU, in KiB, proportional to the
// energy used.
func nvlinkField(kibPerJoule uint64) func(*Node, *gpu, uint32) (uint64, nvml.Return) {
	return func(n *Node, g *gpu, scope uint32) (uint64, nvml.Return) {
		if g.spec.model.NVLink.Links == 0 || scope != math.MaxUint32 {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return n.energyLocked(g) / 1000 * kibPerJoule, nvml.SUCCESS
	}
}

// memoryTemperature reads the field of the memory's sensor.
func memoryTemperature(n *Node, g *gpu, _ uint32) (uint64, nvml.Return) {
	m := n.momentLocked(g)
	if !m.thermometer {
		return 0, nvml.ERROR_NOT_SUPPORTED
	}
	return uint64(m.celsius(g)) + 9, nvml.SUCCESS
}
