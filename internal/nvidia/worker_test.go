package nvidia

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// TestRecord: between two calls there is none, and what is left of a caller's patience counts from the last change.
func TestRecord(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := New(Options{}).record(3)
		began := time.Now()
		r.begin("nvmlDeviceGetUUID")
		time.Sleep(time.Second) // the bubble's clock
		compare(t, "the call", inventory.Call{Function: "nvmlDeviceGetUUID", GPU: 3, Since: began}, r.call())
		compare(t, "patience that is left", gpuPatience-time.Second, r.left(gpuPatience))
		compare(t, "the driver lives", false, r.pulse.beats())
		r.end(nvml.SUCCESS)
		compare(t, "no call", inventory.Call{GPU: 3, Since: began.Add(time.Second)}, r.call())
		compare(t, "all patience", gpuPatience, r.left(gpuPatience))
		compare(t, "the driver lives after a call", true, r.pulse.beats())
		time.Sleep(nodePatience)
		compare(t, "the driver lives without calls", false, r.pulse.beats())
	})
}

// TestJobWithoutCalls: what takes long between two calls, such as the file system, is waited for as long as a call.
func TestJobWithoutCalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, w := New(Options{}).record(3), newWorker(1)
		r.begin("nvmlDeviceGetUUID")
		r.end(nvml.SUCCESS)
		time.Sleep(time.Hour) // the bubble's clock
		began := time.Now()
		over := make(chan struct{})
		err := w.do(t.Context(), r, gpuPatience, func() { <-over }, nil)
		var stall *inventory.Stall
		if !errors.As(err, &stall) || stall.Call.Since != began || time.Since(began) != gpuPatience {
			t.Errorf("after %v: %+v", time.Since(began), err)
		}
		close(over)
		synctest.Wait()
		ran := false
		if err := w.do(t.Context(), r, gpuPatience, func() { ran = true }, nil); err != nil || !ran {
			t.Errorf("once it is done: %v", err)
		}
	})
}

// TestWhatNobodyAsksFor: a mistake of this program ends it.
func TestWhatNobodyAsksFor(t *testing.T) {
	t.Parallel()
	r := newRig(t, divided)
	gpu := r.scanner.slots[0].gpu.device
	for what, ask := range map[string]func(){
		"a remnant": func() { _ = clean(gpu, 99) },
		"a step":    func() { _, _ = repartition(gpu, inventory.MIGStep{Action: "x", GI: 1}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s that nobody has made: no panic", what)
				}
			}()
			ask()
		}()
	}
}
