package nvidia_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestSetComputeMode(t *testing.T) {
	t.Parallel()
	r := newRig(t, "l40s-x8")
	r.scan()
	for _, step := range []struct {
		gpu             int
		mode, wasBefore inventory.ComputeMode
	}{
		{1, inventory.ComputeExclusiveProcess, inventory.ComputeDefault},
		{1, inventory.ComputeExclusiveProcess, inventory.ComputeExclusiveProcess},
		{2, inventory.ComputeProhibited, inventory.ComputeDefault},
		{1, inventory.ComputeDefault, inventory.ComputeExclusiveProcess},
		{2, inventory.ComputeProhibited, inventory.ComputeProhibited},
	} {
		before, err := r.SetComputeMode(r.ctx, r.uuid(step.gpu), step.mode)
		if err != nil || before != step.wasBefore {
			t.Errorf("GPU %d to %s: was %s (error %v), want %s", step.gpu, step.mode, before, err, step.wasBefore)
		}
	}
}

func TestSetComputeModeFails(t *testing.T) {
	t.Parallel()
	fail := func(call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: call, Return: ret}
	}
	for name, test := range map[string]struct {
		fault simulator.Fault
		kind  error
		want  string
	}{
		"not supported": {
			fault: fail("DeviceGetComputeMode", "NOT_SUPPORTED"), kind: inventory.ErrNotSupported,
			want: "nvmlDeviceGetComputeMode",
		},
		"no permission": {fault: fail("DeviceSetComputeMode", "NO_PERMISSION"), want: "as root and privileged"},
		"lost":          {fault: simulator.Fault{Kind: simulator.KindLost, GPU: "1"}, want: "nvmlDeviceGetComputeMode"},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, "l40s-x8")
			r.scan()
			r.inject(test.fault)
			_, err := r.SetComputeMode(r.ctx, r.uuid(1), inventory.ComputeExclusiveProcess)
			if err == nil || !strings.Contains(err.Error(), test.want) || test.kind != nil &&
				!errors.Is(err, test.kind) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			if before, err := r.SetComputeMode(r.ctx, r.uuid(0), inventory.ComputeExclusiveProcess); err != nil ||
				before != 0 {
				t.Errorf("the GPU beside: was %s, error %v", before, err)
			}
		})
	}
}

func TestSetComputeModeOfAnUnknownGPU(t *testing.T) {
	t.Parallel()
	r := newRig(t, "l40s-x8")
	r.scan()
	if _, err := r.SetComputeMode(r.ctx, "GPU-x", inventory.ComputeProhibited); err == nil {
		t.Error("no error for a GPU that is not there")
	}
}

func TestSetComputeModeThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "l40s-x8")
		r.scan()
		r.inject(simulator.Fault{Kind: simulator.KindHang, Call: "DeviceSetComputeMode"})
		r.noAnswer("SetComputeMode", gpuPatience, func() error {
			_, err := r.SetComputeMode(r.ctx, r.uuid(0), inventory.ComputeExclusiveProcess)
			return err
		})
		r.inject(simulator.Fault{Kind: simulator.KindRestore})
		synctest.Wait()
		if before, err := r.SetComputeMode(r.ctx, r.uuid(0), inventory.ComputeDefault); err != nil ||
			before != inventory.ComputeExclusiveProcess {
			t.Errorf("afterwards: was %s, error %v", before, err)
		}
	})
}

// TestComputeModeIsReadBack: a driver that says yes and does nothing is found out.
func TestComputeModeIsReadBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	r.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "0", Call: "DeviceSetComputeMode", Value: "0"})
	_, err := r.SetComputeMode(t.Context(), r.uuid(0), inventory.ComputeExclusiveProcess)
	if err == nil || !strings.Contains(err.Error(), "and the GPU has DEFAULT") {
		t.Errorf("got error %v", err)
	}
}
