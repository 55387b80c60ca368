package nvidia_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// measured returns the names of the measures that have values.
func measured(m inventory.Measures) []string {
	var names []string
	for which := range inventory.AllMeasures() {
		if _, ok := m.Get(which); ok {
			names = append(names, which.String())
		}
	}
	return names
}

// noPause is the pause of a caller who has nothing else to do.
func noPause(context.Context) {}

func (r *rig) measure(gpu int, blocking bool) inventory.Sample {
	r.t.Helper()
	sample, err := r.Sample(r.ctx, r.uuid(gpu), blocking, noPause)
	if err != nil {
		r.t.Fatal(err)
	}
	return sample
}

// TestSampleQueries: each measure is answered by one query.
func TestSampleQueries(t *testing.T) {
	t.Parallel()
	answers := map[inventory.Measure]int{}
	for _, q := range nvidia.SampleQueries() {
		for _, m := range q.Measures {
			answers[m]++
		}
	}
	for m := range inventory.AllMeasures() {
		want := 1
		if m == inventory.PCIeTransmit || m == inventory.PCIeReceive { // performance monitoring, else what blocks
			want = 2
		}
		if answers[m] != want {
			t.Errorf("%d queries answer %v", answers[m], m)
		}
	}
}

// TestSampleHasWhatTheGPUSupports: a value that a GPU does not have is absent.
func TestSampleHasWhatTheGPUSupports(t *testing.T) {
	t.Parallel()
	all := []string{
		"SMClock", "MemoryClock", "Temperature", "MemoryTemperature", "PowerUsage", "EnergyConsumption",
		"PCIeReplayCount",
		"GPUUtilization", "MemoryUtilization", "EncoderUtilization", "DecoderUtilization", "MemoryFree", "MemoryUsed",
		"MemoryReserved", "MemoryTotal", "VGPULicense", "CorrectableRows", "UncorrectableRows", "RowRemapFailed",
		"ECCCorrected", "ECCUncorrected", "NVLinkTransmitted", "NVLinkReceived", "ClockEventReasons",
		"RowRemapPending", "NVLinkReplays", "NVLinkRecoveries", "NVLinksDown",
		"PCIeGeneration", "PCIeWidth", "PCIeMaxGeneration", "PCIeMaxWidth",
		"PowerLimit", "EnforcedPowerLimit", "MaxSMClock", "MaxMemoryClock",
	}
	pcie := []string{"PCIeTransmit", "PCIeReceive"}
	rows := []string{"CorrectableRows", "UncorrectableRows", "RowRemapFailed", "RowRemapPending"}
	nvlink := []string{"NVLinkTransmitted", "NVLinkReceived", "NVLinkReplays", "NVLinkRecoveries", "NVLinksDown"}
	for name, tt := range map[string]struct {
		profile  string
		blocking bool
		faults   []simulator.Fault
		without  [][]string
		with     []string
	}{
		"everything":  {profile: "dgx-h100"},
		"what blocks": {profile: "dgx-h100", blocking: true, with: pcie},
		"a T4":        {profile: "t4", without: [][]string{rows, nvlink, {"MemoryTemperature"}}},
		"a DGX-1 of driver R470": {
			profile: "dgx-1", without: [][]string{rows, {"MemoryReserved"}},
		},
		"an L40S": {profile: "l40s-x8", without: [][]string{nvlink, {"MemoryTemperature"}}},
		"a call that fails": {
			profile: "dgx-h100",
			faults: []simulator.Fault{{Kind: simulator.KindFail, GPU: "0", Call: "DeviceGetPowerUsage",
				Return: "UNKNOWN"}},
			without: [][]string{{"PowerUsage"}},
		},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, tt.profile, tt.faults...)
			at := slices.Index(all, "ClockEventReasons")
			want := slices.Concat(all[:at], tt.with, all[at:])
			for _, without := range tt.without {
				want = slices.DeleteFunc(want, func(m string) bool { return slices.Contains(without, m) })
			}
			sample := r.measure(0, tt.blocking)
			if diff := cmp.Diff(want, measured(sample.Values)); diff != "" {
				t.Errorf("measured (-want +got):\n%s", diff)
			}
			if sample.UUID != r.uuid(0) || sample.Taken.IsZero() || sample.Instances != nil {
				t.Errorf("sample %+v", sample)
			}
		})
	}
}

// TestSampleValues: faults are seen in the values, which have the units that inventory says.
func TestSampleValues(t *testing.T) {
	t.Parallel()
	links := []int{2, 17}
	r := newRig(t, "dgx-h100",
		simulator.Fault{Kind: simulator.KindECC, GPU: "0", Count: 5}, simulator.Fault{Kind: simulator.KindPCIeReplays,
			GPU: "0", Count: 7},
		simulator.Fault{Kind: simulator.KindRemapPending, GPU: "0"}, simulator.Fault{Kind: simulator.KindRemapFailure,
			GPU: "0"},
		simulator.Fault{Kind: simulator.KindThrottle, GPU: "0"},
		simulator.Fault{Kind: simulator.KindProcesses, GPU: "0",
			Count: 3},
		simulator.Fault{Kind: simulator.KindNVLink, GPU: "0", Link: &links[0]},
		simulator.Fault{Kind: simulator.KindNVLink,
			GPU: "0", Link: &links[1]})
	first := r.measure(0, true).Values
	within := func(m inventory.Measure, low, high float64) {
		t.Helper()
		if got, ok := first.Get(m); !ok || got < low || got > high {
			t.Errorf("%v is %v, want %v to %v", m, got, low, high)
		}
	}
	within(inventory.ECCUncorrected, 5, 5)
	within(inventory.ECCCorrected, 0, 0)
	within(inventory.PCIeReplayCount, 7, 7)
	within(inventory.UncorrectableRows, 1, 1)
	within(inventory.RowRemapFailed, 1, 1)
	within(inventory.RowRemapPending, 1, 1)
	within(inventory.NVLinksDown, 2, 2)
	within(inventory.PCIeGeneration, 4, 4)
	within(inventory.PCIeWidth, 16, 16)
	within(inventory.PCIeMaxGeneration, 4, 4)
	within(inventory.PCIeMaxWidth, 16, 16)
	within(inventory.NVLinkReplays, 6, 6)
	within(inventory.NVLinkRecoveries, 2, 2)
	within(inventory.Temperature, 93, 93)
	within(inventory.MemoryTemperature, 94, 110)
	within(inventory.SMClock, 200, 1000)
	within(inventory.PowerUsage, 50, 700)
	within(inventory.PowerLimit, 700, 700)
	within(inventory.EnforcedPowerLimit, 700, 700)
	within(inventory.MaxSMClock, 1980, 1980)
	within(inventory.MaxMemoryClock, 2619, 2619)
	within(inventory.MemoryTotal, 81559, 81559)
	within(inventory.MemoryUsed, 3*1024, 81559)
	within(inventory.GPUUtilization, 1, 100)
	within(inventory.ClockEventReasons, 0x48, 0x48)
	within(inventory.PCIeTransmit, 1e6, 64e9)
	within(inventory.NVLinkTransmitted, 1024, 1e15)
	used, _ := first.Get(inventory.MemoryUsed)
	free, _ := first.Get(inventory.MemoryFree)
	reserved, _ := first.Get(inventory.MemoryReserved)
	if sum := used + free + reserved; sum < 81559-2 || sum > 81559 { // each is rounded down
		t.Errorf("used, free and reserved memory are %v MiB together", sum)
	}
	energy, _ := first.Get(inventory.EnergyConsumption)
	second := r.measure(0, false).Values
	if more, _ := second.Get(inventory.EnergyConsumption); more <= energy {
		t.Errorf("the energy was %v and is %v", energy, more)
	}
}

// TestLanesThatAreDown were active before, or lead to an NVSwitch on another GPU of the model.
// Lanes that no bridge connects are not down.
func TestLanesThatAreDown(t *testing.T) {
	t.Parallel()
	down := func(r *rig, gpu int) float64 {
		values := r.measure(gpu, false).Values
		lanes, known := values.Get(inventory.NVLinksDown)
		compare(r.t, "lanes are known", true, known)
		return lanes
	}
	const apart = "{description: Two H100 NVL without a bridge between them, driver: 560.35.03, cuda: \"12.6\", " +
		"model: h100-nvl-94gb, " +
		"gpus: [{bdf: \"0000:27:00.0\", pcie: 0/0/0}, {bdf: \"0000:38:00.0\", pcie: 0/1/0}]}"
	compare(t, "lanes that are down without a bridge", 0., down(newRig(t, apart), 1))
	cut := simulator.Fault{Kind: simulator.KindNVLink, GPU: "1"}
	for _, profile := range []string{"h100-nvl-x4", "dgx-h100"} {
		r := newRig(t, profile)
		compare(t, "lanes that are down, of "+profile, 0., down(r, 1))
		r.inject(cut)
		r.retry()
		r.scan()
		compare(t, "lanes that were cut are down, of "+profile, true, down(r, 1) > 0)
		early := newRig(t, profile, cut)
		compare(t, "lanes that never were active are down, of "+profile, profile == "dgx-h100", down(early, 1) > 0)
	}
}

// TestSampleOfMIG: the parent has what holds for the whole GPU, each GPU instance its memory, and
// nothing is there twice.
func TestSampleOfMIG(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100", simulator.Fault{
		Kind: simulator.KindMIG, GPU: "2", Profiles: []string{"1c.3g.40gb", "1c.3g.40gb", "1g.10gb", "1g.10gb+me"},
	})
	sample := r.measure(2, true)
	want := []string{
		"SMClock", "MemoryClock", "Temperature", "MemoryTemperature", "PowerUsage", "EnergyConsumption",
		"PCIeReplayCount",
		"VGPULicense", "ECCCorrected", "ECCUncorrected", "NVLinkTransmitted",
		"NVLinkReceived", "PCIeTransmit", "PCIeReceive", "ClockEventReasons", "NVLinkReplays", "NVLinkRecoveries",
		"PCIeGeneration", "PCIeWidth", "PCIeMaxGeneration", "PCIeMaxWidth",
		"PowerLimit", "EnforcedPowerLimit", "MaxSMClock", "MaxMemoryClock",
	}
	if diff := cmp.Diff(want, measured(sample.Values)); diff != "" {
		t.Errorf("measured of the parent (-want +got):\n%s", diff)
	}
	var got []string
	for _, i := range sample.Instances {
		total, _ := i.Values.Get(inventory.MemoryTotal)
		got = append(got, fmt.Sprint(i.GI, " ", i.Profile, " ", total, " ", len(measured(i.Values))))
	}
	if diff := cmp.Diff([]string{"1 3g.40gb 40448 4", "7 1g.10gb 9984 4", "8 1g.10gb+me 9984 4"}, got); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
	// Another MIG device has the index of one that the last scan saw.
	r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "2", Profiles: []string{"7g.80gb"}})
	if sample = r.measure(2, false); len(sample.Instances) != 0 {
		t.Errorf("instances of a layout that is not there: %+v", sample.Instances)
	}
	r.scan()
	if sample = r.measure(2, false); len(sample.Instances) != 1 || sample.Instances[0].Profile != "7g.80gb" {
		t.Errorf("instances of the new layout: %+v", sample.Instances)
	}
}

// TestSampleOfAMIGDeviceThatIsMadeAnew: what a MIG device did not support, the one that has its
// handle afterwards may support.
func TestSampleOfAMIGDeviceThatIsMadeAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindMIG, GPU: "2",
		Profiles: []string{"3g.40gb", "3g.40gb"}})
	memory := func() (known int) {
		for _, i := range r.measure(2, false).Instances {
			if _, ok := i.Values.Get(inventory.MemoryReserved); ok {
				known++
			}
		}
		return known
	}
	r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "2", Call: "DeviceGetMemoryInfo_v2",
		Return: "NOT_SUPPORTED"})
	compare(t, "instances with the query", 0, memory())
	r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "2"})
	r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "2", Profiles: []string{"3g.40gb", "3g.40gb"}})
	r.scan()
	compare(t, "instances with the query while they are the same", 0, memory())
	r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "2", Profiles: []string{"4g.40gb", "3g.40gb"}})
	r.scan()
	compare(t, "instances with the query after they were created again", 2, memory())
}

// TestSampleOfAGPUThatDoesNotAnswer: an error says so; of a call that hangs the others see nothing,
// and it is not made again.
func TestSampleOfAGPUThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		if _, err := r.Sample(r.ctx, "GPU-other", false, noPause); err == nil {
			t.Error("no error for a GPU that is not there")
		}
		r.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "1"})
		if _, err := r.Sample(r.ctx, r.uuid(1), false, noPause); err == nil {
			t.Error("no error for a GPU that is lost")
		}
		r.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "3", Call: "DeviceGetPowerUsage"})
		var stall *inventory.Stall
		if _, err := r.Sample(r.ctx, r.uuid(3), false, noPause); !errors.As(err, &stall) ||
			stall.Call.Function != "nvmlDeviceGetPowerUsage" || stall.Call.GPU != 3 {
			t.Errorf("error %v", err)
		}
		r.measure(4, false)
		r.scan()
		if _, err := r.Sample(r.ctx, r.uuid(3), false, noPause); !errors.As(err, &stall) {
			t.Errorf("error %v", err)
		}
		compare(t, "calls that hang", 1, len(r.driver.Calls()))
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		synctest.Wait() // the call has returned
		r.retry()
		r.scan()
		if _, err := r.Read(r.ctx, r.uuid(3)); err != nil {
			t.Fatal(err)
		}
		r.measure(3, false)
	})
}

// TestSampleCalls: a sample takes as many calls as its queries say.
func TestSampleCalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindMIG, GPU: "1",
			Profiles: []string{"1g.10gb", "1c.3g.40gb", "1c.3g.40gb"}})
		want := map[int]int{}
		for _, q := range nvidia.SampleQueries() {
			switch {
			case q.Blocks > 0:
			case q.Instances:
				want[1] += 2 * q.Calls // two GPU instances
			case !q.WithoutMIG && q.Function != "nvmlDeviceGetRemappedRows":
				want[1] += q.Calls
			}
			if q.Blocks == 0 && !q.InstancesOnly {
				want[0] += q.Calls
			}
		}
		for gpu, calls := range want {
			r.measure(gpu, false) // the first time also asks what is supported
			r.ripen()
			before := r.node.Calls()
			r.measure(gpu, false)
			compare(t, fmt.Sprint("calls for GPU ", gpu), calls, int(r.node.Calls()-before))
		}
	})
}

// ripen waits until performance monitoring can make values of what it counted. It is used on a
// bubble's clock.
func (r *rig) ripen() { time.Sleep(shortestCount) }

// TestSamplePerformanceMonitoring: from the second sample on there are the values of a GPU or of
// each GPU instance since the first.
func TestSamplePerformanceMonitoring(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		profiled := []inventory.Measure{inventory.GraphicsActive, inventory.TensorActive, inventory.DRAMActive}
		has := func(m inventory.Measures) (n int) {
			for _, which := range profiled {
				if value, ok := m.Get(which); ok && value >= 0 && value <= 1 {
					n++
				}
			}
			return n
		}
		r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindMIG, GPU: "1",
			Profiles: []string{"1g.10gb", "3g.40gb"}})
		r.ripen() // the simulator's counts begin
		compare(t, "values of the first sample", 0, has(r.measure(0, false).Values))
		compare(t, "values of one just after it", 0, has(r.measure(0, false).Values))
		r.ripen()
		second := r.measure(0, false).Values
		compare(t, "values of the next one", 3, has(second))
		if bytes, ok := second.Get(inventory.PCIeReceive); !ok || bytes > 64e9 {
			t.Errorf("PCIe throughput: %v, %v", bytes, ok)
		}
		instances := func(want ...int) {
			t.Helper()
			var got []int
			for _, i := range r.measure(1, false).Instances {
				got = append(got, has(i.Values))
			}
			compare(t, "values of the GPU instances", want, got)
		}
		instances(0, 0)
		r.ripen()
		instances(3, 3)
		// Another instance gets the number of one that is gone.
		r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "1", Profiles: []string{"1g.10gb", "1g.10gb"}})
		r.scan()
		instances(0, 0)
		r.ripen()
		instances(3, 3)
		compare(t, "samples of performance monitoring", 2*(1+2), r.node.Stats().GPMSamples)

		old := newRig(t, "dgx-a100")
		old.measure(0, false)
		old.ripen()
		compare(t, "values of an A100", 0, has(old.measure(0, false).Values))
	})
}

// TestSamplePerformanceMonitoringThatHangs: what the call that hangs writes to is not used
// meanwhile, and freed at the end.
func TestSamplePerformanceMonitoringThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.measure(0, false)
		r.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "0", Call: "GpmSampleGet"})
		for range 2 {
			if _, err := r.Sample(r.ctx, r.uuid(0), false, noPause); !errors.Is(err, inventory.ErrNoAnswer) {
				t.Errorf("error %v", err)
			}
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore})
		synctest.Wait()
		r.scan()
		r.measure(0, false)
		compare(t, "samples of performance monitoring", 2, r.node.Stats().GPMSamples)
	})
}

// TestSamplePerformanceMonitoringWithoutRoom: a sample that cannot begin because of another call
// about the GPU that hangs loses nothing that the driver has allocated.
func TestSamplePerformanceMonitoringWithoutRoom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.measure(0, false)
		r.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "0", Call: "DeviceGetComputeRunningProcesses"})
		if _, err := r.Processes(r.ctx, r.uuid(0)); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Fatalf("error %v", err)
		}
		if _, err := r.Sample(r.ctx, r.uuid(0), false, noPause); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Errorf("error %v, although there is no room for a call", err)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore})
		synctest.Wait()
		r.scan()
		r.measure(0, false)
		compare(t, "samples of performance monitoring", 2, r.node.Stats().GPMSamples)
	})
}

// TestSamplePerformanceMonitoringThatReturnsLate: a sample that waits for a late call goes on with
// what that call has counted.
func TestSamplePerformanceMonitoringThatReturnsLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.measure(0, false)
		r.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "0", Call: "GpmSampleGet"})
		ctx, cancel := context.WithTimeout(r.ctx, time.Second) // the call has the time that is left of its patience
		defer cancel()
		if _, err := r.Sample(ctx, r.uuid(0), false, noPause); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Fatalf("error %v", err)
		}
		ended := make(chan error, 1)
		go func() {
			_, err := r.Sample(r.ctx, r.uuid(0), false, noPause)
			ended <- err
		}()
		synctest.Wait() // it waits for the call
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		compare(t, "samples of performance monitoring", 2, r.node.Stats().GPMSamples)
	})
}
