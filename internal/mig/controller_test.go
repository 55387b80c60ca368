package mig_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// A layout is applied to the GPUs of an idle node, and removed again.
func TestIdleNode(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		began := time.Now()
		r.makes("all-balanced")
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("success after %v", took)
		}
		want := map[int][]string{
			0: {"1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"}, 1: {"1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"}, 2: {"1g.6gb",
				"1g.6gb", "2g.12gb"},
			3: {"GPU"},
		}
		if diff := cmp.Diff(want, r.devices()); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
		if text := r.journal(); !strings.Contains(text, `"3g.40gb"`) || strings.Contains(text, "change") {
			t.Errorf("the journal: %s", text)
		}
		// This program created the instances, and may destroy them even with an unknown boot ID.
		r.boot = ""
		r.start()
		began = time.Now()
		r.makes("all-disabled")
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("taken back after %v", took)
		}
		if diff := cmp.Diff(map[int][]string{0: {"GPU"}, 1: {"GPU"}, 2: {"GPU"}, 3: {"GPU"}}, r.devices()); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
		if text := r.journal(); strings.Contains(text, "GPU-") {
			t.Errorf("the journal: %s", text)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "2"})
		r.until("forgets the GPU", func(s mig.Status) bool { return len(s.GPUs) == 2 })
	})
}

// Pods use some devices. The other devices that the change removes become Unhealthy, devices that
// stay remain allocatable, and the GPU is not changed until the pods end.
func TestWaitForPods(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		stays, goes := r.uuids(0, "3g.40gb")[0], r.uuids(0, "1g.10gb")[0]
		r.hold(stays, "ns/stays")
		r.hold(goes, "ns/goes")
		r.hold(r.uuids(0, "1g.10gb")[1], "ns/goes")
		r.desired.Publish(mig.DesiredLayout{Layout: "all-3g.40gb"})
		s := r.until("waits for the pod", func(s mig.Status) bool {
			return strings.HasPrefix(s.Reason, "GPU 0: in use")
		})
		if s.State != mig.StatePending || !strings.Contains(s.Reason, "in use by pod ns/goes") ||
			strings.Contains(s.Reason, "stays") {
			t.Errorf("%s: %s", s.State, s.Reason)
		}
		r.passes(time.Minute)
		if diff := cmp.Diff([]string{"3g.40gb"}, r.devices()[0]); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
		if len(r.uuids(0, "2g.20gb")) != 1 {
			t.Error("an instance was destroyed before all that go were free")
		}
		r.hold(goes, "")
		r.hold(r.uuids(0, "1g.10gb")[1], "")
		r.reaches(mig.StateSuccess)
		if diff := cmp.Diff([]string{"3g.40gb", "3g.40gb"}, r.devices()[0]); diff != "" ||
			r.uuids(0, "3g.40gb")[0] != stays && r.uuids(0, "3g.40gb")[1] != stays {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
	})
}

// A step fails on one GPU: this GPU is rolled back and retried, the others get the layout.
func TestRollbackOfAFailedStep(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-1g.10gb")
		r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "DeviceCreateGpuInstanceWithPlacement",
			Return: "UNKNOWN"})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.done(1, 2)
		s := r.reaches(mig.StateFailed)
		if !strings.Contains(s.Reason, "nvmlDeviceCreateGpuInstanceWithPlacement: ERROR_UNKNOWN; undo failed") {
			t.Errorf("the reason: %s", s.Reason)
		}
		if diff := cmp.Diff([]string{"1g.10gb", "1g.10gb"}, r.devices()[0]); diff != "" { // which are in both layouts
			t.Errorf("offered by a GPU that is neither as before nor as wanted (-want +got):\n%s", diff)
		}
		if len(r.devices()[1]) != 4 || len(r.devices()[2]) != 3 {
			t.Errorf("other GPUs: %v", r.devices())
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
		r.reaches(mig.StateSuccess)
		// An error that concerns only the new instances leaves nothing behind.
		fails := true
		r.mu.Lock()
		r.before = func(_ string, step inventory.MIGStep) error {
			if step.Action == inventory.MIGCreateCompute && step.Size == 7 && fails {
				return inventory.ErrNotSupported
			}
			return nil
		}
		r.mu.Unlock()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb"})
		s = r.reaches(mig.StateFailed)
		if diff := cmp.Diff([]string{"1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"}, r.devices()[0]); diff != "" {
			t.Errorf("offered after %s (-want +got):\n%s", s.Reason, diff)
		}
		if s.GPUs[0].Retry.IsZero() || strings.Contains(r.journal(), "change") {
			t.Errorf("tried again at %v; the journal: %s", s.GPUs[0].Retry, r.journal())
		}
		fails = false
		r.reaches(mig.StateSuccess)
	})
}

// Instances of other programs stay, unless Replace is set.
func TestForeignInstances(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"1g.10gb", "1g.10gb"}})
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb"})
		s := r.reaches(mig.StateFailed)
		if !strings.Contains(s.Reason, "this program did not create it") || len(r.devices()[0]) != 2 {
			t.Errorf("%s; offered are %v", s.Reason, r.devices()[0])
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"}) // in which they have a place
		r.reaches(mig.StateSuccess)
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", Replace: true})
		r.reaches(mig.StateSuccess)
		if diff := cmp.Diff([]string{"7g.80gb"}, r.devices()[0]); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
	})
}

// An instance without a MIG device prevents the layout, as claims can leave one for a moment. The
// GPU gets the layout when the instance is gone, although no Snapshot shows it.
func TestEmptyForeignInstance(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-enabled", GPUs: []string{"0"}})
		r.reaches(mig.StateSuccess)
		uuid := r.Snapshots().Value().GPUs[0].UUID
		step := func(s inventory.MIGStep) int {
			id, err := r.Monitor.Repartition(t.Context(), uuid, s)
			if err != nil {
				t.Fatal(err)
			}
			return id
		}
		id := step(inventory.MIGStep{Action: inventory.MIGCreateInstance, Profile: 9, Start: 0, Size: 4}) // 3g.40gb
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}})
		if s := r.reaches(mig.StateFailed); !strings.Contains(s.Reason, "this program did not create it") {
			t.Errorf("%s: %s", s.State, s.Reason)
		}
		step(inventory.MIGStep{Action: inventory.MIGDestroyInstance, GI: id})
		r.reaches(mig.StateSuccess)
	})
}

// A MIG mode enabled by another program never counts as enabled by this program. A mode enabled by
// this program does, even without instances.
func TestForeignMIGMode(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"1g.10gb"}})
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-enabled", GPUs: []string{"0"}})
		r.reaches(mig.StateSuccess)
		if text := r.journal(); strings.Contains(text, "GPU-") {
			t.Errorf("the journal: %s", text)
		}
		for again := range uint64(2) {
			r.desired.Publish(mig.DesiredLayout{Layout: "all-enabled", GPUs: []string{r.Snapshots().Value().GPUs[1].UUID},
				OrderNumber: again + 1})
			r.reaches(mig.StateSuccess)
			if text := r.journal(); !strings.Contains(text, `"enabled": true`) || strings.Count(text, "GPU-") != 1 {
				t.Errorf("the journal after %d times: %s", again+1, text)
			}
		}
	})
}

// Another program changes the GPU at the end of the steps: the layout fails.
func TestForeignDivisionAfterAllSteps(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.after = func(_ string, step inventory.MIGStep) error {
			if step.Action == inventory.MIGCreateCompute {
				r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"3g.40gb"}})
			}
			return nil
		}
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}})
		s := r.until("is judged", func(s mig.Status) bool { return s.State != mig.StatePending && s.Layout != "" })
		if s.State != mig.StateFailed || !strings.Contains(s.Reason,
			"after all steps the GPU has MIG enabled, 3g.40gb at slice") {
			t.Errorf("%s: %s", s.State, s.Reason)
		}
	})
}

// A step fails, and another program takes over the new instances before the rollback: they stay,
// and the reason says so.
func TestBlockedRollback(t *testing.T) {
	for name, c := range map[string]struct {
		other  simulator.Fault
		reason string
	}{
		"an instance of another program": {
			simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"1g.10gb"}}, "this program did not create it",
		},
		"a process": {simulator.Fault{Kind: simulator.KindProcesses, GPU: "0", Count: 1}, "in use by process"},
	} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				var after []inventory.MIGAction
				failed := false
				r.before = func(_ string, step inventory.MIGStep) error {
					switch {
					case failed:
						after = append(after, step.Action)
					case step.Action == inventory.MIGCreateCompute:
						failed = true
						r.inject(c.other)
						return inventory.ErrNotSupported
					}
					return nil
				}
				r.start()
				r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}})
				s := r.reaches(mig.StateFailed)
				if !strings.Contains(s.Reason, "undo failed: ") || !strings.Contains(s.Reason, c.reason) ||
					len(r.devices()[0]) > 0 {
					t.Errorf("%s; offered: %v", s.Reason, r.devices()[0])
				}
				if len(after) > 0 {
					t.Errorf("steps after the failure: %v", after)
				}
			})
		})
	}
}
