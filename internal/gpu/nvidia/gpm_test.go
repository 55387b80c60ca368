package nvidia_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestPerformanceMonitoringValues: percent and MiB become parts and bytes, and what cannot be is
// left out.
func TestPerformanceMonitoringValues(t *testing.T) {
	t.Parallel()
	answer := func(r *nvml.GpmMetricsGetType, metric nvml.GpmMetricId, value float64, ret nvml.Return) {
		for i := range r.Metrics[:r.NumMetrics] {
			if m := &r.Metrics[i]; m.MetricId == uint32(metric) {
				m.Value, m.NvmlReturn = value, uint32(ret)
			}
		}
	}
	for name, tt := range map[string]struct {
		value float64
		ret   nvml.Return
		want  string
	}{
		"rounded":          {12.34567891, nvml.SUCCESS, "0.123457 true"},
		"all":              {100, nvml.SUCCESS, "1 true"},
		"nothing":          {0, nvml.SUCCESS, "0 true"},
		"more than all":    {100.1, nvml.SUCCESS, "0 false"},
		"less than none":   {-1, nvml.SUCCESS, "0 false"},
		"no number":        {math.NaN(), nvml.SUCCESS, "0 false"},
		"of no such GPU":   {50, nvml.ERROR_NOT_SUPPORTED, "0 false"},
		"more than a link": {-math.MaxFloat64, nvml.SUCCESS, "0 false"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRigWith(t, "dgx-h100", hook(hookedLibrary{metrics: func(r *nvml.GpmMetricsGetType) {
					answer(r, nvml.GPM_METRIC_ANY_TENSOR_UTIL, tt.value, tt.ret)
					answer(r, nvml.GPM_METRIC_PCIE_TX_PER_SEC, 3, nvml.SUCCESS)
					answer(r, nvml.GPM_METRIC_PCIE_RX_PER_SEC, mostPCIe, nvml.SUCCESS)
				}}))
				r.ripen()
				r.measure(0, false)
				r.ripen()
				values := r.measure(0, false).Values
				get := func(m inventory.Measure) string {
					value, ok := values.Get(m)
					return fmt.Sprint(value, " ", ok)
				}
				compare(t, "tensor cores", tt.want, get(inventory.TensorActive))
				compare(t, "sent", "3.145728e+06 true", get(inventory.PCIeTransmit))
				compare(t, "received, more than any link carries", "0 false", get(inventory.PCIeReceive))
			})
		})
	}
}

// TestPerformanceMonitoringOfInstances has no values that are about the whole GPU, and none of
// counts that are too far apart.
func TestPerformanceMonitoringOfInstances(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"3g.40gb"}})
		r.ctx = t.Context()
		active := []string{
			"GraphicsActive", "TensorActive", "DRAMActive", "SMActive", "SMOccupancy", "FP64Active",
			"FP32Active", "FP16Active",
		}
		for _, step := range []struct {
			age  time.Duration
			want []string
		}{{shortestCount, nil}, {shortestCount, active}, {longestCount + time.Minute, nil}, {longestCount - time.Minute,
			active}} {
			time.Sleep(step.age) // the bubble's clock
			var got []string
			for _, name := range measured(r.measure(0, false).Instances[0].Values) {
				if name[:6] != "Memory" {
					got = append(got, name)
				}
			}
			compare(t, fmt.Sprint("values after ", step.age), step.want, got)
		}
	})
}

// TestPerformanceMonitoringWithoutMemory: a GPU for which the driver allocates one sample of two
// has no values, and keeps none.
func TestPerformanceMonitoringWithoutMemory(t *testing.T) {
	t.Parallel()
	for failing := range 3 {
		calls := 0
		r := newRigWith(t, "dgx-h100", hook(hookedLibrary{alloc: func() nvml.Return {
			calls++
			if calls == failing {
				return nvml.ERROR_MEMORY
			}
			return nvml.SUCCESS
		}}))
		values := r.measure(0, false).Values
		if _, ok := values.Get(inventory.Temperature); !ok {
			t.Error("without performance monitoring, the temperature is not measured")
		}
		want := 0
		if failing == 0 {
			want = 2
		}
		compare(t, fmt.Sprint("samples that are allocated when call ", failing, " fails"), want,
			r.node.Stats().GPMSamples)
	}
}

// TestCloseFreesWhatALateCallHasCounted: a sample that ends while Close waits for it leaves nothing
// behind.
func TestCloseFreesWhatALateCallHasCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.measure(0, false)
		r.inject(hang("0", "GpmSampleGet"))
		if _, err := r.Sample(r.ctx, r.uuid(0), false, noPause); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Errorf("error %v", err)
		}
		timer := time.AfterFunc(time.Second, func() { r.inject(restore) })
		defer timer.Stop()
		if err := r.Close(r.ctx); err != nil {
			t.Fatal(err)
		}
		r.clean()
	})
}

// An unmonitoredDevice has no performance monitoring, and says so.
type unmonitoredDevice struct{ nvml.Device }

func (d unmonitoredDevice) GpmQueryDeviceSupport() (nvml.GpmSupport, nvml.Return) {
	return nvml.GpmSupport{}, nvml.SUCCESS
}

// TestPerformanceMonitoringThatIsNotSupported: nothing is allocated for it.
func TestPerformanceMonitoringThatIsNotSupported(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, "dgx-h100", hook(hookedLibrary{device: func(_ int,
		d nvml.Device) nvml.Device {
		return unmonitoredDevice{d}
	}}))
	r.measure(0, false)
	compare(t, "samples", 0, r.node.Stats().GPMSamples)
}

// TestPerformanceMonitoringThatIsRefused: the sample says why it has no values, of a GPU and of one
// in MIG mode, and has all others.
func TestPerformanceMonitoringThatIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed")
	compare(t, "refused by nobody", "", r.measure(0, false).Refused)
	for gpu, call := range map[int]string{0: "GpmSampleGet", 3: "GpmMigSampleGet"} {
		r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindMIG, GPU: "3", Profiles: []string{"3g.40gb"}},
			simulator.Fault{Kind: simulator.KindFail, Call: call, Return: "NO_PERMISSION"})
		sample := r.measure(gpu, false)
		if !strings.Contains(sample.Refused, "add the capability SYS_ADMIN to this container (nvml"+call+": ") {
			t.Errorf("%s: %q", call, sample.Refused)
		}
		if _, known := sample.Values.Get(inventory.Temperature); !known {
			t.Errorf("%s: no temperature", call)
		}
	}
}

// A meteredDevice answers some questions of samples.
type meteredDevice struct {
	nvml.Device
	pcie uint32
	heat int32
}

func (d meteredDevice) GetPcieThroughput(nvml.PcieUtilCounter) (uint32, nvml.Return) {
	return d.pcie, nvml.SUCCESS
}

func (d meteredDevice) GetFieldValues(values []nvml.FieldValue) nvml.Return {
	for i := range values {
		values[i].ValueType, values[i].NvmlReturn = uint32(nvml.VALUE_TYPE_SIGNED_INT), uint32(nvml.SUCCESS)
		values[i].Value[0] = 50
		if d.heat > 0 {
			values[i].ValueType = uint32(nvml.VALUE_TYPE_UNSIGNED_INT)
			values[i].Value[0] = byte(d.heat)
		}
	}
	return nvml.SUCCESS
}

func (d meteredDevice) GetGridLicensableFeatures() (nvml.GridLicensableFeatures, nvml.Return) {
	all := nvml.GridLicensableFeatures{LicensableFeaturesCount: 2}
	all.GridLicensableFeatures[d.heat%3].FeatureState = 1 // the third does not count
	return all, nvml.SUCCESS
}

// TestSampleOfOddAnswers: what no link carries, and a number of another type, is left out.
func TestSampleOfOddAnswers(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		device meteredDevice
		want   string
	}{
		"more than any link carries": {meteredDevice{pcie: 512_000_001}, "0 false, 0 false, 1"},
		"the most of a link":         {meteredDevice{pcie: 512_000_000, heat: 1}, "5.12e+11 true, 1 true, 1"},
		"a license of nobody":        {meteredDevice{pcie: 1, heat: 2}, "1000 true, 2 true, 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, "dgx-a100", hook(hookedLibrary{device: func(_ int, d nvml.Device) nvml.Device {
				tt.device.Device = d
				return tt.device
			}}))
			values := r.measure(0, true).Values
			sent, known := values.Get(inventory.PCIeTransmit)
			celsius, hot := values.Get(inventory.MemoryTemperature)
			licensed, _ := values.Get(inventory.VGPULicense)
			compare(t, "PCIe, memory temperature, license", tt.want,
				fmt.Sprint(sent, " ", known, ", ", celsius, " ", hot, ", ", licensed))
			if bytes, nvlink := values.Get(inventory.NVLinkReceived); nvlink != (tt.device.heat > 0) ||
				bytes != float64(tt.device.heat)*1024 {
				t.Errorf("received over NVLink: %v, %v", bytes, nvlink)
			}
		})
	}
}

// TestSampleOfWhatIsKnown: what performance monitoring measures, no query that blocks is asked for.
func TestSampleOfWhatIsKnown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRigWith(t, "dgx-h100", hook(hookedLibrary{metrics: func(r *nvml.GpmMetricsGetType) {
			for i := range r.Metrics[:r.NumMetrics] {
				r.Metrics[i].Value = 1
			}
		}}))
		r.ripen()
		r.measure(0, true)
		r.ripen()
		values := r.measure(0, true).Values
		for _, m := range []inventory.Measure{inventory.PCIeTransmit, inventory.PCIeReceive} {
			if got, _ := values.Get(m); got != 1<<20 {
				t.Errorf("%v is %v", m, got)
			}
		}
	})
}

// TestSampleOfALostGPU asks a GPU that a scan has found to be lost for nothing.
func TestSampleOfALostGPU(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetMemoryInfo_v2",
		Return: "NOT_SUPPORTED"})
	values := r.measure(1, false).Values
	if used, ok := values.Get(inventory.MemoryTotal); !ok || used != 81559 {
		t.Errorf("by the older function, the memory is %v, %v", used, ok)
	}
	r.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "1"})
	r.scan()
	before := r.node.Calls()
	if _, err := r.Sample(r.ctx, r.uuid(1), true, noPause); err == nil ||
		!strings.Contains(err.Error(), "GPU_IS_LOST") {
		t.Errorf("error %v", err)
	}
	compare(t, "calls", before, r.node.Calls())
}
