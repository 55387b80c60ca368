package nvidia_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// step makes a step on a GPU and waits for its end.
func (r *rig) step(gpu int, step inventory.MIGStep) (int, error) {
	r.t.Helper()
	end, err := r.Repartition(r.ctx, r.uuid(gpu), step)
	if err != nil {
		return 0, err
	}
	return end(r.ctx)
}

// made is step for one that succeeds.
func (r *rig) made(gpu int, step inventory.MIGStep) int {
	r.t.Helper()
	id, err := r.step(gpu, step)
	if err != nil {
		r.t.Fatal(err)
	}
	return id
}

func TestRepartition(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	compare(t, "the ID of nothing", 0, r.made(0, inventory.MIGStep{Action: inventory.MIGEnable}))
	gi := r.made(0, inventory.MIGStep{Action: inventory.MIGCreateInstance, Profile: 9, Start: 4, Size: 4})
	ci := r.made(0, inventory.MIGStep{Action: inventory.MIGCreateCompute, GI: gi, Start: 2, Size: 1})
	want := []inventory.GPUInstance{{
		ID: gi, Profile: "3g.40gb", Start: 4, Size: 4,
		Computes: []inventory.ComputeInstance{{ID: ci, Start: 2, Slices: 1}},
	}}
	compare(t, "instances", want, r.partitions(0).Instances)
	g := r.scan().GPUs[0]
	if g.MIG != inventory.MIGEnabled || len(g.MIGDevices) != 1 || g.MIGDevices[0].Profile != "1c.3g.40gb" ||
		g.MIGDevices[0].CICap == 0 {
		t.Errorf("the GPU: %+v", g)
	}
	if _, err := r.step(0, inventory.MIGStep{Action: inventory.MIGDestroyInstance, GI: gi}); !errors.Is(err,
		inventory.ErrInUse) {
		t.Errorf("an instance with a compute instance is destroyed: %v", err)
	}
	for _, step := range []inventory.MIGStep{
		{Action: inventory.MIGDestroyCompute, GI: gi, CI: ci}, {Action: inventory.MIGDestroyInstance,
			GI: gi}, {Action: inventory.MIGDisable},
	} {
		compare(t, "the ID of nothing", 0, r.made(0, step))
	}
	if p := r.partitions(0); p.Mode != inventory.MIGDisabled || len(p.Instances) > 0 {
		t.Errorf("in the end: %+v", p)
	}
}

// TestComputeInstanceElsewhere: where the driver does not take a place for a compute instance, it
// chooses one.
func TestComputeInstanceElsewhere(t *testing.T) {
	t.Parallel()
	for _, answer := range []string{"INVALID_ARGUMENT", "NOT_SUPPORTED"} {
		r := newRig(t, divided)
		r.made(0, inventory.MIGStep{Action: inventory.MIGDestroyCompute, GI: 1})
		r.inject(simulator.Fault{
			Kind: simulator.KindFail, GPU: "0", Call: "GpuInstanceCreateComputeInstanceWithPlacement", Return: answer,
		})
		r.made(0, inventory.MIGStep{Action: inventory.MIGCreateCompute, GI: 1, Start: 2, Size: 1})
		compare(t, answer, []inventory.ComputeInstance{{Slices: 1}}, r.partitions(0).Instances[0].Computes)
	}
}

// TestSamplesKeepNoInstance: the driver does not destroy an instance that samples of performance
// monitoring refer to.
func TestSamplesKeepNoInstance(t *testing.T) {
	t.Parallel()
	r := newRig(t, divided)
	r.scan()
	r.measure(0, false)
	compare(t, "samples", 4, r.node.Stats().GPMSamples)
	r.made(0, inventory.MIGStep{Action: inventory.MIGDestroyCompute, GI: 1})
	r.made(0, inventory.MIGStep{Action: inventory.MIGDestroyInstance, GI: 1})
	compare(t, "samples", 0, r.node.Stats().GPMSamples)
	r.scan()
	r.measure(0, false)
	compare(t, "samples", 2, r.node.Stats().GPMSamples)
	compare(t, "calls on handles that do not live", 0, r.node.Stats().StaleCalls)
}

func TestRepartitionIsRefused(t *testing.T) {
	t.Parallel()
	fail := func(call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: call, Return: ret}
	}
	answer := simulator.Fault{Kind: simulator.KindAnswer, GPU: "0", Call: "DeviceSetMigMode", Value: "RESET_REQUIRED"}
	mode := inventory.MIGStep{Action: inventory.MIGEnable}
	create := inventory.MIGStep{Action: inventory.MIGCreateInstance, Profile: 19, Start: 6, Size: 1}
	destroy := inventory.MIGStep{Action: inventory.MIGDestroyCompute, GI: 1}
	compute := inventory.MIGStep{Action: inventory.MIGCreateCompute, GI: 1, Size: 3}
	for name, tt := range map[string]struct {
		node  string
		fault *simulator.Fault
		step  inventory.MIGStep
		want  error
	}{
		"a mode while processes run": {"dgx-h100", &simulator.Fault{Kind: simulator.KindProcesses, GPU: "0", Count: 1},
			mode, inventory.ErrInUse},
		"a mode for which it is reset": {"dgx-a100", nil, mode, inventory.ErrSessionInUse},
		"a mode that needs a restart":  {"dgx-h100", &answer, mode, inventory.ErrResetRequired},
		"a mode that no GPU has":       {"t4", nil, mode, inventory.ErrNotSupported},
		"a mode without privileges": {"dgx-h100", new(fail("DeviceSetMigMode", "NO_PERMISSION")), mode,
			inventory.ErrNoPermission},
		"a lost GPU": {"dgx-h100", new(fail("DeviceSetMigMode", "GPU_IS_LOST")), mode,
			nvml.ERROR_GPU_IS_LOST},
		"an instance where there is one": {divided, nil, create, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"an instance without privileges": {divided, new(fail("DeviceCreateGpuInstanceWithPlacement", "NO_PERMISSION")),
			create, inventory.ErrNoPermission},
		"an instance that is not there": {divided, nil, inventory.MIGStep{Action: inventory.MIGDestroyInstance, GI: 6},
			nvml.ERROR_NOT_FOUND},
		"a compute instance in use": {divided, &simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0", Count: 1},
			destroy, inventory.ErrInUse},
		"a compute instance of no size": {divided, nil, inventory.MIGStep{Action: inventory.MIGCreateCompute, GI: 1,
			Size: 5}, inventory.ErrNotSupported},
		"a compute instance without room": {divided, nil, compute, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"a compute instance nobody has": {divided, nil, inventory.MIGStep{Action: inventory.MIGDestroyCompute, GI: 1,
			CI: 4}, nvml.ERROR_NOT_FOUND},
		"a compute instance, without info": {divided, new(fail("GpuInstanceGetComputeInstanceProfileInfo", "UNKNOWN")),
			compute, nvml.ERROR_UNKNOWN},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, tt.node)
			if tt.fault != nil {
				r.inject(*tt.fault)
			}
			id, err := r.step(0, tt.step)
			compare(t, "the ID of nothing", 0, id)
			if !errors.Is(err, tt.want) || !strings.HasPrefix(err.Error(), string(tt.step.Action)+" on GPU ") {
				t.Errorf("got error %v, want %v", err, tt.want)
			}
		})
	}
}

const divided = `{description: "One H100 that is divided in two", driver: 580.95.05, cuda: "13.0",
model: h100-sxm5-80gb, gpus: [{bdf: "0000:17:00.0", pcie: 0/0/0, mig: [3g.40gb, 3g.40gb]}]}`

// TestRepartitionTakesLong has a mode take 20 s, and then not return: others are asked meanwhile,
// and who waits is told in the end.
func TestRepartitionTakesLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		r.inject(simulator.Fault{Kind: simulator.KindSlow, GPU: "3", Call: "DeviceSetMigMode", Delay: "20s"})
		began := time.Now()
		end, err := r.Repartition(r.ctx, r.uuid(3), inventory.MIGStep{Action: inventory.MIGEnable})
		if err != nil {
			t.Fatal(err)
		}
		compare(t, "the time until others are asked", gpuPatience, time.Since(began))
		r.scan()
		if err := r.read(5); err != nil {
			t.Error(err)
		}
		compare(t, "the time that others take", gpuPatience, time.Since(began))
		if _, err := end(r.within(time.Second)); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Errorf("before the end: %v", err)
		}
		if _, err := r.Repartition(r.ctx, r.uuid(3), inventory.MIGStep{Action: inventory.MIGDisable}); !errors.Is(err,
			inventory.ErrNoAnswer) {
			t.Errorf("another step meanwhile: %v", err)
		}
		for range 2 { // it may be asked again
			if _, err := end(r.ctx); err != nil {
				t.Error(err)
			}
		}
		compare(t, "the time in all", 20*time.Second, time.Since(began))
		r.retry()
		if g := r.scan().GPUs[3]; g.MIG != inventory.MIGEnabled {
			t.Errorf("the mode is %v", g.MIG)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore}, hang("3", "DeviceSetMigMode"))
		if end, err = r.Repartition(r.ctx, r.uuid(3), inventory.MIGStep{Action: inventory.MIGDisable}); err != nil {
			t.Fatal(err)
		}
		if _, err := end(r.within(time.Minute)); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Errorf("a call that hangs: %v", err)
		}
		r.inject(restore)
		if _, err := end(r.ctx); err != nil {
			t.Errorf("once the call has returned: %v", err)
		}
	})
}
