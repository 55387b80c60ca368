package nvidia_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

var (
	unplug = simulator.Fault{Kind: simulator.KindRemove, GPU: "5"}
	plugIn = simulator.Fault{Kind: simulator.KindAdd, GPU: "5"}
)

// TestBindings plugs a GPU in: the session says so within two waits, whether or not it has other
// events to wait for.
func TestBindings(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string][]simulator.Fault{
		"beside other events": nil,
		"without any other":   {{Kind: simulator.KindFail, Call: "DeviceRegisterEvents", Return: "NOT_SUPPORTED"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, "dgx-h100", append(faults, unplug)...)
				if sets := r.node.Stats().SystemEventSets; sets != 1 {
					t.Fatalf("%d sets of system events, want 1", sets)
				}
				// In the second wait: no rest is between the two.
				timer := time.AfterFunc(700*time.Millisecond, func() { r.inject(plugIn) })
				defer timer.Stop()
				start := time.Now()
				compare(t, "event", event(inventory.EventBinding, ""), r.next())
				if took := time.Since(start); took > 2*waitStep {
					t.Errorf("the event came after %v", took)
				}
				if _, err := r.Scan(r.ctx); !errors.Is(err, inventory.ErrNewSession) {
					t.Errorf("Scan: got error %v, want ErrNewSession", err)
				}
				waits := make(chan error)
				go func() { _, err := r.Next(r.ctx); waits <- err }()
				synctest.Wait()
				start = time.Now()
				if err := r.Close(r.ctx); err != nil || time.Since(start) > 0 {
					t.Errorf("after the event, Close took %v: %v", time.Since(start), err)
				}
				if err := <-waits; err == nil {
					t.Error("Next found an event in a closed session")
				}
			})
		})
	}
}

// TestNoBindings has drivers that do not say when a GPU is plugged in: it is left to the looks.
func TestNoBindings(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string][]simulator.Fault{
		"too old":                {{Kind: simulator.KindDriver, Driver: "570.1"}},
		"no set":                 {{Kind: simulator.KindFail, Call: "SystemEventSetCreate", Return: "NO_PERMISSION"}},
		"set without the events": {{Kind: simulator.KindFail, Call: "SystemRegisterEvents", Return: "NOT_SUPPORTED"}},
		"wait fails":             {{Kind: simulator.KindFail, Call: "SystemEventSetWait", Return: "NOT_SUPPORTED"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, "dgx-h100", append(faults, unplug)...)
				timer := time.AfterFunc(100*time.Millisecond, func() { r.inject(plugIn) })
				defer timer.Stop()
				if e, err := r.Next(r.within(10 * time.Second)); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Next: got event %+v and error %v, want the context's", e, err)
				}
				if sets := r.node.Stats().SystemEventSets; sets != 0 {
					t.Errorf("%d sets of system events are left", sets)
				}
				if _, err := r.Scan(r.ctx); !errors.Is(err, inventory.ErrNewSession) {
					t.Errorf("Scan: got error %v, want ErrNewSession", err)
				}
			})
		})
	}
}

// TestBindingsOfLibrary has the events come through go-nvml, whose caller must pin what it hands to
// C.
func TestBindingsOfLibrary(t *testing.T) {
	t.Parallel()
	out, code := runStub(t, "bindings", "-DBINDINGS")
	if code != 0 || !strings.Contains(out, "--- PASS: TestStubProcess") {
		t.Fatalf("the process exited with %d:\n%s", code, out)
	}
}

func bindingsOfLibrary(t *testing.T, d *nvidia.Driver, _ string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for range 2 { // sessions
		s, err := d.Open(ctx)
		if err != nil {
			t.Fatal(err)
		}
		bindings := 0
		for range 4 {
			e, err := s.Next(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if e.Kind == inventory.EventBinding {
				bindings++
			}
			if bindings == 2 {
				break
			}
		}
		compare(t, "bindings", 2, bindings)
		if err := s.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
}
