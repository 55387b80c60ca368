package nvidia_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestPermission: whether the driver lets programs use the GPUs, and at full speed (A13). GPU 1 is
// a virtual one.
func TestPermission(t *testing.T) {
	t.Parallel()
	on := simulator.Fault{Kind: simulator.KindAnswer, Call: "SystemGetConfComputeState", Value: "1"}
	ready := func(value string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindAnswer, Call: "SystemGetConfComputeGpusReadyState", Value: value}
	}
	fails := func(call, code string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, Call: call, Return: code}
	}
	licensed := simulator.Fault{Kind: simulator.KindAnswer, GPU: "1", Call: "DeviceGetGridLicensableFeatures",
		Value: "1"}
	for name, test := range map[string]struct {
		faults     []simulator.Fault
		notReady   bool
		unlicensed bool // GPU 1; GPU 0 needs no licence
	}{
		"confidential computing is off": {[]simulator.Fault{ready("0")}, false, true},
		"it is on, and ready":           {[]simulator.Fault{on, ready("1")}, false, true},
		"it is on, and not ready":       {[]simulator.Fault{on, ready("0")}, true, true},
		"the driver does not know of it": {[]simulator.Fault{fails("SystemGetConfComputeState", "NOT_SUPPORTED"),
			ready("0")}, false, true},
		"whether it is ready is not known": {[]simulator.Fault{on, fails("SystemGetConfComputeGpusReadyState",
			"UNKNOWN")}, false, true},
		"a licence": {[]simulator.Fault{licensed}, false, false},
		"nothing is known of licences": {[]simulator.Fault{fails("DeviceGetGridLicensableFeatures", "UNKNOWN")}, false,
			false},
		"whether it is virtual is not told": {[]simulator.Fault{fails("DeviceGetVirtualizationMode", "NOT_SUPPORTED")},
			false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newRig(t, cliqueNode, test.faults...).scan()
			compare(t, "not ready", []bool{test.notReady, test.notReady},
				each(s, func(g inventory.GPU) bool { return g.NotReady }))
			compare(t, "unlicensed", []bool{false, test.unlicensed},
				each(s, func(g inventory.GPU) bool { return g.Unlicensed }))
		})
	}
}

// TestPermissionIsReadAgain: an operator sets the GPUs ready, and the virtual one gets a licence.
func TestPermissionIsReadAgain(t *testing.T) {
	t.Parallel()
	answer := func(call, value string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindAnswer, Call: call, Value: value}
	}
	on := answer("SystemGetConfComputeState", "1")
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, cliqueNode, on, answer("SystemGetConfComputeGpusReadyState", "0"))
		if g := r.scan().GPUs[1]; !g.NotReady || !g.Unlicensed {
			t.Fatalf("before: not ready %v, unlicensed %v", g.NotReady, g.Unlicensed)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore}, on, answer("SystemGetConfComputeGpusReadyState", "1"),
			answer("DeviceGetGridLicensableFeatures", "1"))
		time.Sleep(25 * time.Second) // the bubble's clock: nobody waits for it
		for i := range 2 {
			if _, err := r.Read(r.ctx, r.uuid(i)); err != nil {
				t.Fatal(err)
			}
		}
		for _, g := range r.scan().GPUs {
			if g.NotReady || g.Unlicensed {
				t.Errorf("GPU %d: not ready %v, unlicensed %v", g.Index, g.NotReady, g.Unlicensed)
			}
		}
	})
}
