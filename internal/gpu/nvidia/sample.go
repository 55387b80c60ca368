package nvidia

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A SampleQuery is one of the driver queries of each Sample.
type SampleQuery struct {
	// Function is the NVML function, with its argument if the function alone is ambiguous.
	Function string
	// Measures are the results; empty for a query used by other queries.
	Measures []inventory.Measure
	// Calls is the number of calls for a GPU or a GPU instance.
	Calls int
	// Instances is true for a query of each GPU instance of a GPU in MIG mode, not of the whole
	// GPU. InstancesOnly is true for a query of no other GPU.
	Instances, InstancesOnly bool
	// WithoutMIG is true for a query without the driver's support in MIG mode.
	WithoutMIG bool
	// Blocks is the duration of an optional blocking query, else 0.
	Blocks time.Duration

	ask queryFunc
}

// isDue reports whether the query is due for a whole GPU.
func (q SampleQuery) isDue(g *gpu, known *inventory.Measures, blocking bool) bool {
	mig := g.lastSeen.MIG == inventory.MIGEnabled
	if mig && (q.Instances || q.WithoutMIG) || !blocking && q.Blocks > 0 {
		return false
	}
	_, ok := known.Get(q.Measures[0])
	return !ok
}

// SampleQueries returns the queries of a Sample, in their order.
func SampleQueries() []SampleQuery {
	monitoring := SampleQuery{Function: "nvmlGpmSampleGet, nvmlGpmMetricsGet", Calls: 2, Instances: true}
	for _, m := range gpmMeasures {
		monitoring.Measures = append(monitoring.Measures, m.measure)
	}
	handles := SampleQuery{Function: "nvmlDeviceGetMigDeviceHandleByIndex, nvmlDeviceGetUUID", Calls: 2,
		Instances: true, InstancesOnly: true}
	all := slices.Concat([]SampleQuery{monitoring}, sampleQueries, []SampleQuery{handles})
	for i := range all {
		all[i].Calls = max(all[i].Calls, 1)
	}
	return append(all, SampleQuery{Function: "none: as links were found last",
		Measures: []inventory.Measure{inventory.NVLinksDown}})
}

var sampleQueries = []SampleQuery{
	{
		Function: "nvmlDeviceGetTemperature", Measures: []inventory.Measure{inventory.Temperature},
		ask: single(inventory.Temperature, device.GetTemperature),
	},
	watts("nvmlDeviceGetPowerUsage", inventory.PowerUsage, device.GetPowerUsage),
	watts("nvmlDeviceGetPowerManagementLimit", inventory.PowerLimit, device.GetPowerManagementLimit),
	watts("nvmlDeviceGetEnforcedPowerLimit", inventory.EnforcedPowerLimit, device.GetEnforcedPowerLimit),
	{
		Function: "nvmlDeviceGetClockInfo (SM)", Measures: []inventory.Measure{inventory.SMClock},
		ask: single(inventory.SMClock, func(d device) (uint32, nvml.Return) { return d.GetClockInfo(nvml.CLOCK_SM) }),
	},
	{
		Function: "nvmlDeviceGetClockInfo (memory)", Measures: []inventory.Measure{inventory.MemoryClock},
		ask: single(inventory.MemoryClock,
			func(d device) (uint32, nvml.Return) { return d.GetClockInfo(nvml.CLOCK_MEM) }),
	},
	{
		Function: "nvmlDeviceGetMaxClockInfo (SM)", Measures: []inventory.Measure{inventory.MaxSMClock},
		ask: single(inventory.MaxSMClock,
			func(d device) (uint32, nvml.Return) { return d.GetMaxClockInfo(nvml.CLOCK_SM) }),
	},
	{
		Function: "nvmlDeviceGetMaxClockInfo (memory)", Measures: []inventory.Measure{inventory.MaxMemoryClock},
		ask: single(inventory.MaxMemoryClock,
			func(d device) (uint32, nvml.Return) { return d.GetMaxClockInfo(nvml.CLOCK_MEM) }),
	},
	{
		Function: "nvmlDeviceGetFieldValues (memory temperature)",
		Measures: []inventory.Measure{inventory.MemoryTemperature},
		ask: func(d device, m *inventory.Measures) nvml.Return {
			v, ret := d.GetFieldValue(nvml.FI_DEV_MEMORY_TEMP)
			celsius, _ := number(v)
			if celsius == 0 {
				return ret // a GPU without the sensor may report 0
			}
			return set(m, ret, inventory.MemoryTemperature, celsius)
		},
	},
	{
		Function: "nvmlDeviceGetTotalEnergyConsumption", Measures: []inventory.Measure{inventory.EnergyConsumption},
		ask: single(inventory.EnergyConsumption, device.GetTotalEnergyConsumption),
	},
	{
		Function: "nvmlDeviceGetPcieReplayCounter", Measures: []inventory.Measure{inventory.PCIeReplayCount},
		ask: single(inventory.PCIeReplayCount, device.GetPcieReplayCounter),
	},
	{
		Function: "nvmlDeviceGetCurrPcieLinkGeneration", Measures: []inventory.Measure{inventory.PCIeGeneration},
		ask: single(inventory.PCIeGeneration, device.GetCurrPcieLinkGeneration),
	},
	{
		Function: "nvmlDeviceGetCurrPcieLinkWidth", Measures: []inventory.Measure{inventory.PCIeWidth},
		ask: single(inventory.PCIeWidth, device.GetCurrPcieLinkWidth),
	},
	{
		Function: "nvmlDeviceGetMaxPcieLinkGeneration", Measures: []inventory.Measure{inventory.PCIeMaxGeneration},
		ask: single(inventory.PCIeMaxGeneration, device.GetMaxPcieLinkGeneration),
	},
	{
		Function: "nvmlDeviceGetMaxPcieLinkWidth", Measures: []inventory.Measure{inventory.PCIeMaxWidth},
		ask: single(inventory.PCIeMaxWidth, device.GetMaxPcieLinkWidth),
	},
	{
		Function: "nvmlDeviceGetUtilizationRates", Measures: []inventory.Measure{inventory.GPUUtilization,
			inventory.MemoryUtilization},
		WithoutMIG: true,
		ask: func(d device, m *inventory.Measures) nvml.Return {
			u, ret := d.GetUtilizationRates()
			_ = set(m, ret, inventory.GPUUtilization, float64(u.Gpu))
			return set(m, ret, inventory.MemoryUtilization, float64(u.Memory))
		},
	},
	{
		Function: "nvmlDeviceGetEncoderUtilization", Measures: []inventory.Measure{inventory.EncoderUtilization},
		WithoutMIG: true,
		ask:        single(inventory.EncoderUtilization, device.GetEncoderUtilization),
	},
	{
		Function: "nvmlDeviceGetDecoderUtilization", Measures: []inventory.Measure{inventory.DecoderUtilization},
		WithoutMIG: true,
		ask:        single(inventory.DecoderUtilization, device.GetDecoderUtilization),
	},
	{
		Function: "nvmlDeviceGetMemoryInfo_v2",
		Measures: []inventory.Measure{
			inventory.MemoryFree, inventory.MemoryUsed, inventory.MemoryReserved, inventory.MemoryTotal,
		},
		Instances: true, ask: sampleMemory,
	},
	{
		Function: "nvmlDeviceGetGridLicensableFeatures", Measures: []inventory.Measure{inventory.VGPULicense},
		ask: func(d device, m *inventory.Measures) nvml.Return {
			licensed, ret := d.GetGridLicensed()
			return set(m, ret, inventory.VGPULicense, oneIf(licensed))
		},
	},
	{
		Function: "nvmlDeviceGetRemappedRows",
		Measures: []inventory.Measure{
			inventory.CorrectableRows, inventory.UncorrectableRows, inventory.RowRemapFailed, inventory.RowRemapPending,
		},
		ask: func(d device, m *inventory.Measures) nvml.Return {
			rows, ret := d.GetRemappedRows()
			_ = set(m, ret, inventory.CorrectableRows, float64(rows.correctable))
			_ = set(m, ret, inventory.UncorrectableRows, float64(rows.uncorrectable))
			_ = set(m, ret, inventory.RowRemapPending, oneIf(rows.pending))
			return set(m, ret, inventory.RowRemapFailed, oneIf(rows.failed))
		},
	},
	ecc("corrected", inventory.ECCCorrected, nvml.MEMORY_ERROR_TYPE_CORRECTED),
	ecc("uncorrected", inventory.ECCUncorrected, nvml.MEMORY_ERROR_TYPE_UNCORRECTED),
	nvlinkBytes("sent over NVLink", inventory.NVLinkTransmitted, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
	nvlinkBytes("received over NVLink", inventory.NVLinkReceived, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
	nvlinkErrors("NVLink replays", inventory.NVLinkReplays, nvml.FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
	nvlinkErrors("NVLink recoveries", inventory.NVLinkRecoveries, nvml.FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
	{
		Function: "nvmlDeviceGetCurrentClocksEventReasons", Measures: []inventory.Measure{inventory.ClockEventReasons},
		ask: single(inventory.ClockEventReasons, device.GetCurrentClocksEventReasons),
	},
	pcieThroughput("sent", inventory.PCIeTransmit, nvml.PCIE_UTIL_TX_BYTES),
	pcieThroughput("received", inventory.PCIeReceive, nvml.PCIE_UTIL_RX_BYTES),
}

// Sample measures a GPU of an earlier Scan of this session, for metrics. With blocking, it includes
// slow measurements. It calls pause after each call that returns when 100 ms have passed, and makes
// no call during pause. It fails if the GPU cannot be called or is lost. A GPU with a hanging call,
// and a paused GPU, are not measured.
func (s *Session) Sample(ctx context.Context, uuid string, blocking bool,
	pause func(context.Context)) (inventory.Sample, error) {
	sample, err := s.sample(ctx, uuid, blocking, pause)
	if err != nil {
		return inventory.Sample{}, fmt.Errorf("measure GPU %s: %w", uuid, err)
	}
	return sample, nil
}

func (s *Session) sample(ctx context.Context, uuid string, blocking bool,
	pause func(context.Context)) (inventory.Sample, error) {
	m := &measurement{blocking: blocking, sample: inventory.Sample{UUID: uuid}}
	for !m.done() {
		pause(ctx)
		if err := s.measure(ctx, m); err != nil {
			return inventory.Sample{}, err
		}
	}
	m.sample.Taken = time.Now()
	return m.sample, nil
}

// turnBudget limits the calls of a sample before others get a turn: a look must not wait until a
// slow driver has answered all queries.
const turnBudget = 100 * time.Millisecond

// measure takes a turn of the worker calls and makes queries within the budget, at least one.
func (s *Session) measure(ctx context.Context, m *measurement) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.driver.calls.release()
	sl, err := s.scanner.find(m.sample.UUID)
	switch {
	case err != nil:
		return err
	case sl.stall != nil:
		return sl.stall
	case sl.isPaused:
		return errors.New(sl.gpu.results.reason)
	}
	if err := s.driver.calls.awaitRoom(ctx, sl.record, gpuPatience); err != nil {
		return err
	}
	// The job gets separate copies: others continue with the slot of an abandoned job. The job gets
	// the counts only when it is sure to begin, because only a job returns them.
	m.gpu, m.gpm = *sl.gpu, sl.gpm
	if lanes, known := s.scanner.lanesDown(sl.gpu); known { // as of the last reading of links
		m.sample.Values.Set(inventory.NVLinksDown, float64(lanes))
	}
	if m.gpm == nil {
		m.gpm = &gpm{counts: map[int]*gpmCounts{}, measuredGIs: map[int]bool{}}
	}
	sl.gpm = nil
	done := func() { sl.gpm = m.gpm }
	if err := s.driver.calls.run(ctx, sl.record, gpuPatience, m.run, done); err != nil {
		return err
	}
	done()
	if m.results.isUseless() {
		return errors.New(m.results.reason)
	}
	return nil
}

// A measurement is a sample in progress. The steps are: the performance monitoring of the whole
// GPU, the queries, the GPU instances.
type measurement struct {
	blocking bool
	gpu      gpu
	gpm      *gpm
	sample   inventory.Sample
	results  callResults
	step     int // the next step
}

func (m *measurement) done() bool { return m.step > len(sampleQueries)+len(m.gpu.lastSeen.MIGDevices) }

// run takes steps, in a job.
func (m *measurement) run() {
	began := time.Now()
	for !m.done() && !m.results.isUseless() && time.Since(began) < turnBudget {
		m.next()
	}
	if m.done() {
		m.gpm.sweep(m.gpu.device.api)
	}
}

func (m *measurement) next() {
	step, g, into := m.step, &m.gpu, &m.sample
	m.step++
	switch {
	case step == 0 && g.lastSeen.MIG != inventory.MIGEnabled:
		m.recordMonitoring("nvmlGpmSampleGet", m.gpm.measure(g.device, wholeGPU, g.lastSeen.UUID, &into.Values))
	case step == 0:
	case step <= len(sampleQueries):
		if q := sampleQueries[step-1]; q.isDue(g, &into.Values, m.blocking) {
			m.results.extra(q.Function, q.ask(g.device, &into.Values))
		}
	default:
		d := g.lastSeen.MIGDevices[step-len(sampleQueries)-1]
		at, there := slices.BinarySearchFunc(into.Instances, d.GI,
			func(i inventory.InstanceSample, gi int) int { return i.GI - gi })
		if there {
			return // done by another MIG device of the same GPU instance
		}
		if i, ok := m.instance(d); ok {
			into.Instances = slices.Insert(into.Instances, at, i)
		}
	}
}

// recordMonitoring records the result of performance monitoring.
func (m *measurement) recordMonitoring(call string, ret nvml.Return) {
	if m.results.extra(call, ret); ret == nvml.ERROR_NO_PERMISSION {
		m.sample.Refused = withCapability(failure(call, ret)).Error()
	}
}

// instance measures the GPU instance of a MIG device, with the current handle of the MIG device,
// because handles are reused.
func (m *measurement) instance(of inventory.MIGDevice) (inventory.InstanceSample, bool) {
	a := &m.results
	d, ret := m.gpu.device.GetMigDeviceHandleByIndex(of.Index)
	if !a.extra("nvmlDeviceGetMigDeviceHandleByIndex", ret) {
		return inventory.InstanceSample{}, false
	}
	uuid, ret := d.GetUUID()
	if a.extra("nvmlDeviceGetUUID", ret); uuid != of.UUID {
		return inventory.InstanceSample{}, false // another MIG device got the index since the last scan
	}
	i := inventory.InstanceSample{GI: of.GI, Profile: of.Profile}
	if _, rest, ok := strings.Cut(of.Profile, "c."); ok {
		i.Profile = rest
	}
	m.recordMonitoring("nvmlGpmMigSampleGet", m.gpm.measure(m.gpu.device, of.GI, of.UUID, &i.Values))
	for _, q := range sampleQueries {
		if q.Instances && !a.isUseless() {
			a.extra(q.Function, q.ask(d, &i.Values))
		}
	}
	return i, true
}

// set sets a value if the call succeeded, and returns the result of the call.
func set(m *inventory.Measures, ret nvml.Return, which inventory.Measure, value float64) nvml.Return {
	if ret == nvml.SUCCESS {
		m.Set(which, value)
	}
	return ret
}

// queryFunc is the function of a query.
type queryFunc = func(device, *inventory.Measures) nvml.Return

// single returns the function of a query for a single measure.
func single[T uint32 | uint64 | int](which inventory.Measure, get func(device) (T, nvml.Return)) queryFunc {
	return func(d device, m *inventory.Measures) nvml.Return {
		value, ret := get(d)
		return set(m, ret, which, float64(value))
	}
}

// watts returns a query for a value in milliwatts.
func watts(function string, which inventory.Measure, get func(device) (uint32, nvml.Return)) SampleQuery {
	return SampleQuery{Function: function, Measures: []inventory.Measure{which},
		ask: func(d device, m *inventory.Measures) nvml.Return {
			milliwatts, ret := get(d)
			return set(m, ret, which, float64(milliwatts)/1000)
		}}
}

func oneIf(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// sampleMemory reads the memory. Before R510 the driver includes reserved memory in used memory.
func sampleMemory(d device, m *inventory.Measures) nvml.Return {
	const mib = 1 << 20
	memory, ret := d.GetMemoryInfoV2()
	if ret == nvml.ERROR_FUNCTION_NOT_FOUND || ret == nvml.ERROR_NOT_SUPPORTED {
		var v1 nvml.Memory
		v1, ret = d.GetMemoryInfo()
		memory = nvml.Memory_v2{Total: v1.Total, Free: v1.Free, Used: v1.Used}
	} else {
		_ = set(m, ret, inventory.MemoryReserved, math.Trunc(float64(memory.Reserved)/mib))
	}
	_ = set(m, ret, inventory.MemoryFree, math.Trunc(float64(memory.Free)/mib))
	_ = set(m, ret, inventory.MemoryUsed, math.Trunc(float64(memory.Used)/mib))
	return set(m, ret, inventory.MemoryTotal, math.Trunc(float64(memory.Total)/mib))
}

func ecc(which string, measure inventory.Measure, kind nvml.MemoryErrorType) SampleQuery {
	return SampleQuery{
		Function: "nvmlDeviceGetTotalEccErrors (" + which + ")", Measures: []inventory.Measure{measure},
		ask: single(measure, func(d device) (uint64, nvml.Return) {
			return d.GetTotalEccErrors(kind, nvml.VOLATILE_ECC)
		}),
	}
}

// nvlinkBytes returns a query for a counter of all NVLinks together, in KiB.
func nvlinkBytes(which string, measure inventory.Measure, field int) SampleQuery {
	return SampleQuery{
		Function: "nvmlDeviceGetFieldValues (" + which + ")", Measures: []inventory.Measure{measure},
		ask: func(d device, m *inventory.Measures) nvml.Return {
			v, ret := d.GetScopedFieldValue(field, math.MaxUint32)
			kib, ok := number(v)
			if !ok {
				return ret
			}
			return set(m, ret, measure, kib*1024)
		},
	}
}

// nvlinkErrors returns a query for an error count of all NVLinks of the GPU.
func nvlinkErrors(which string, measure inventory.Measure, field int) SampleQuery {
	return SampleQuery{
		Function: "nvmlDeviceGetFieldValues (" + which + ")", Measures: []inventory.Measure{measure},
		ask: func(d device, m *inventory.Measures) nvml.Return {
			v, ret := d.GetFieldValue(field)
			count, ok := number(v)
			if !ok {
				return ret
			}
			return set(m, ret, measure, count)
		},
	}
}

// mostPCIe is above the capacity of any link, in bytes a second.
const mostPCIe = 512e9

// pcieThroughput returns a query for a mean of 20 ms, measured during the call, in KB a second.
// Impossible values, returned by some GPUs, are dropped.
func pcieThroughput(which string, measure inventory.Measure, counter nvml.PcieUtilCounter) SampleQuery {
	return SampleQuery{
		Function: "nvmlDeviceGetPcieThroughput (" + which + ")", Measures: []inventory.Measure{measure},
		Blocks: 20 * time.Millisecond,
		ask: func(d device, m *inventory.Measures) nvml.Return {
			kb, ret := d.GetPcieThroughput(counter)
			if float64(kb)*1000 > mostPCIe {
				return ret
			}
			return set(m, ret, measure, float64(kb)*1000)
		},
	}
}

// number returns the value of a numeric field, if it is not negative.
func number(v nvml.FieldValue) (float64, bool) {
	switch nvml.ValueType(v.ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT:
		return float64(binary.NativeEndian.Uint32(v.Value[:4])), true
	case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG:
		return float64(binary.NativeEndian.Uint64(v.Value[:])), true
	}
	return 0, false
}
