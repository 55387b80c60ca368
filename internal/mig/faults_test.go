package mig_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

var balanced = []string{"1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"}

// The Controller is killed before and after each step of a change. The next Controller completes
// the change, or undoes it if the layout is no longer wanted. Neither advertises a device of the
// GPU before that.
func TestKillAtEachStep(t *testing.T) {
	t.Parallel()
	const steps = 1 + 8 // of all-balanced
	for kill := range 2 * steps {
		for _, undone := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nodeOfThree)
				calls := 0
				dead := make(chan struct{})
				at := func(uuid string, _ inventory.MIGStep) error {
					if uuid != r.Snapshots().Value().GPUs[0].UUID {
						return nil
					}
					calls++
					if calls == kill+1 {
						close(dead)
					}
					if calls > kill {
						return context.Canceled
					}
					return nil
				}
				r.mu.Lock()
				r.before, r.after = at, at
				r.mu.Unlock()
				r.start()
				r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0"}})
				<-dead
				r.stop()
				r.mu.Lock()
				r.before, r.after = nil, nil
				r.mu.Unlock()
				want := balanced
				if undone {
					r.desired.Publish(mig.DesiredLayout{})
					want = []string{"GPU"}
				}
				r.built = func(*mig.Controller) {
					if len(r.devices()[0]) != 0 {
						t.Errorf("killed at call %d: offered before the owner has looked: %v", kill, r.devices()[0])
					}
				}
				r.start()
				r.until("ends", func(s mig.Status) bool {
					return len(s.GPUs) == 3 && (s.GPUs[0].Phase == mig.PhaseDone || s.GPUs[0].Phase == mig.PhaseKept)
				})
				if diff := cmp.Diff(want, r.devices()[0]); diff != "" {
					t.Errorf("killed at call %d, undone %v: offered (-want +got):\n%s", kill, undone, diff)
				}
				if strings.Contains(r.journal(), "change") {
					t.Errorf("killed at call %d: the journal: %s", kill, r.journal())
				}
			})
		}
	}
}

// reboots stops the Controller and restarts the node.
func (r *rig) reboots() {
	r.t.Helper()
	r.stop()
	r.inject(simulator.Fault{Kind: simulator.KindReboot})
	r.boot = "two"
	for well := false; !well; { // a process that starts with the node finds it so
		found, err := r.Look(r.t.Context())
		well = err == nil && !slices.ContainsFunc(found.GPUs,
			func(g inventory.GPU) bool { return g.Health.State != inventory.Healthy })
		time.Sleep(100 * time.Millisecond)
	}
}

// A node that loses its layout in a restart gets it again before any device of the GPUs is
// advertised, also before the layout is known again.
func TestRestartOfTheNode(t *testing.T) {
	t.Parallel()
	for name, desired := range map[string]mig.DesiredLayout{"with the desired layout": {Layout: "all-balanced"},
		"before the desired layout is known": {}} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				r.start()
				r.makes("all-balanced")
				r.reboots()
				began := time.Now()
				r.desired.Publish(desired)
				r.built = func(*mig.Controller) {
					for _, g := range r.Snapshots().Value().GPUs[:3] {
						if len(r.devices()[g.Index]) != 0 {
							t.Errorf("GPU %d offers %v before its layout stands", g.Index, r.devices()[g.Index])
						}
					}
				}
				r.start()
				wrong := map[int][]string{}
				deadline := time.After(time.Minute)
				for whole := false; !whole; { // what kubelet sees meanwhile
					_, held := r.controller.Holds().Latest()
					_, looked := r.Snapshots().Latest()
					devices := r.devices()
					for index, of := range devices {
						if index < 3 && slices.Contains(of, "GPU") {
							wrong[index] = of
						}
					}
					if whole = len(devices[0]) == 4 && len(devices[1]) == 4 && len(devices[2]) == 3; whole {
						break
					}
					select {
					case <-held:
					case <-looked:
					case <-deadline:
						t.Fatalf("never whole: %v", devices)
					}
				}
				if len(wrong) > 0 {
					t.Errorf("whole GPUs were offered: %v", wrong)
				}
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("whole after %v", took)
				}
				if text := r.journal(); !strings.Contains(text, `"two"`) || strings.Contains(text, `"one"`) {
					t.Errorf("the journal is of another start of the node: %s", text)
				}
			})
		})
	}
}

// A MIG mode that is set but not in force is reported. No device is advertised, and the change
// continues after the reset.
func TestPendingMIGMode(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "1", Call: "DeviceSetMigMode", Value: "RESET_REQUIRED"})
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.done(0, 2)
		s := r.reaches(mig.StateRebooting)
		if !strings.Contains(s.Reason, "after a reset of the GPU or a restart of the node") ||
			s.GPUs[1].Phase != mig.PhaseReset {
			t.Errorf("%s: %s", s.GPUs[1].Phase, s.Reason)
		}
		if d := r.devices(); len(d[0]) != 4 || len(d[1]) != 0 || len(d[2]) != 3 {
			t.Errorf("offered: %v", d)
		}
		r.mu.Lock()
		r.before = func(string, inventory.MIGStep) error {
			if g := r.controller.Status().Value().GPUs[1]; g.Phase != mig.PhaseReset {
				t.Errorf("%s while it is tried again", g.Phase)
			}
			return nil
		}
		r.mu.Unlock()
		r.passes(20 * time.Minute)
		r.mu.Lock()
		r.before = nil
		r.mu.Unlock()
		r.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "1", Call: "DeviceSetMigMode"})
		r.inject(simulator.Fault{Kind: simulator.KindReset, GPU: "1"})
		r.reaches(mig.StateSuccess)
		if len(r.devices()[1]) != 4 {
			t.Errorf("offered: %v", r.devices())
		}
	})
}

// Another process sets the MIG mode of an A100, because this process must close its session. If a
// further process has the GPU open, it is named, the GPU is advertised unchanged, and no mode stays
// pending.
func TestMIGModeByReset(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.inject(simulator.Fault{Kind: simulator.KindClients, GPU: "1", Clients: []string{"host"}})
		r.start(func(o *mig.Options) {
			o.Clients = func(minor int) ([]inventory.DriverClient, error) { return nvidia.Clients(r.node.Root(), minor) }
		})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"1"}})
		s := r.reaches(mig.StateFailed)
		if !strings.Contains(s.Reason, "by process 300100 (nv-hostengine); stop them; often nvidia-persistenced") {
			t.Error(s.Reason)
		}
		if p, err := r.Monitor.Partitions(t.Context(), s.GPUs[1].UUID); err != nil || p.Pending != inventory.MIGDisabled {
			t.Errorf("pending: %v, %v", p.Pending, err)
		}
		if !slices.Equal(r.devices()[1], []string{"GPU"}) {
			t.Errorf("offered: %v", r.devices()[1])
		}
		r.inject(simulator.Fault{Kind: simulator.KindClients, GPU: "1"})
		r.reaches(mig.StateSuccess)
		if sets := r.modes.sets.Load(); sets == 0 {
			t.Error("the mode was set in this process's session")
		}
		before := r.modes.sets.Load()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0", "1"}})
		r.reaches(mig.StateSuccess)
		if sets := r.modes.sets.Load(); sets != before {
			t.Errorf("the mode of an H100 was set %d times by another process", sets-before)
		}
	})
}

// Processes without a pod hold GPUs.
func TestWaitForProcesses(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0", Count: 1})
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		s := r.until("waits", func(s mig.Status) bool { return strings.HasPrefix(s.Reason, "GPU 0: in use by process ") })
		if len(s.GPUs[0].Holders) != 1 || s.GPUs[0].Holders[0].PID == 0 {
			t.Errorf("holders: %+v", s.GPUs[0].Holders)
		}
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0"})
		r.reaches(mig.StateSuccess)
		// A process that the driver shows to nobody.
		r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "ComputeInstanceDestroy", Return: "IN_USE"})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-disabled"})
		r.until("waits", func(s mig.Status) bool {
			return strings.Contains(s.Reason, "nvmlComputeInstanceDestroy: in use: the driver shows no process")
		})
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
		r.reaches(mig.StateSuccess)
	})
}

// A step hangs for a long time. The other GPUs get the layout, and this GPU gets no other step
// before the call returns.
func TestHangingCall(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-enabled") // a GPU that is reset for its mode would wait: the session cannot be closed
		r.inject(simulator.Fault{Kind: simulator.KindSlow, GPU: "0", Call: "DeviceCreateGpuInstanceWithPlacement",
			Delay: "45s", Count: 1})
		began := time.Now()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.done(1, 2)
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the other GPUs are done after %v", took)
		}
		r.until("waits for the driver", func(s mig.Status) bool { return strings.Contains(s.Reason, "does not answer") })
		r.reaches(mig.StateSuccess)
		if took := time.Since(began); took < 45*time.Second || took > time.Minute {
			t.Errorf("success after %v", took)
		}
		r.passes(time.Minute) // the GPU is Unhealthy for a while, because a call hung
		if diff := cmp.Diff(balanced, r.devices()[0]); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
	})
}

// A change of the MIG mode may take two minutes. GPUs that need a reset wait for it, because the
// session cannot be closed before.
func TestSlowMIGMode(t *testing.T) {
	for _, mode := range []string{"all-enabled", "all-disabled"} {
		t.Run(mode, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				r.start()
				if mode == "all-disabled" {
					r.makes("all-enabled")
				}
				r.inject(simulator.Fault{Kind: simulator.KindSlow, GPU: "0", Call: "DeviceSetMigMode", Delay: "90s", Count: 1})
				r.desired.Publish(mig.DesiredLayout{Layout: mode})
				r.passes(time.Minute)
				for i, g := range r.controller.Status().Value().GPUs { // one that had its turn first is done
					if changing := g.Phase == mig.PhaseChanging; changing != (i == 0) ||
						i > 0 && g.Phase != mig.PhaseWaiting && g.Phase != mig.PhaseDone {
						t.Errorf("GPU %d is %s after a minute: %s", i, g.Phase, g.Reason)
					}
				}
				r.reaches(mig.StateSuccess)
			})
		})
	}
}

// The reason says why the next layout is not applied to the GPU yet.
func TestAnotherLayoutDuringAStep(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		began, goOn := make(chan struct{}), make(chan struct{})
		begin, release := sync.OnceFunc(func() { close(began) }), sync.OnceFunc(func() { close(goOn) })
		t.Cleanup(release)
		steps := 0
		r.before = func(string, inventory.MIGStep) error {
			steps++
			begin()
			<-goOn
			return nil
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0"}})
		<-began
		r.desired.Publish(mig.DesiredLayout{Layout: "all-1g.10gb", GPUs: []string{"0"}})
		r.until("says so", func(s mig.Status) bool {
			return s.State == mig.StatePending && strings.Contains(s.Reason,
				"a step of the previous layout is still in progress")
		})
		release()
		r.reaches(mig.StateSuccess)
		if steps != 1+7+7 { // the mode, instances and compute instances
			t.Errorf("%d steps: some were for the layout of before", steps)
		}
	})
}

// Without a kubelet, only processes count as users.
func TestNoKubelet(t *testing.T) {
	onNode(t, func(_ *testing.T, r *rig) {
		r.start(func(o *mig.Options) { o.Holders = nil })
		r.makes("all-balanced")
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0", Count: 1})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-disabled"})
		r.until("waits", func(s mig.Status) bool { return strings.HasPrefix(s.Reason, "GPU 0: in use by process ") })
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0"})
		r.reaches(mig.StateSuccess)
	})
}

// An evictor refuses the first evictions.
type evictor struct {
	r     *rig
	asked []mig.Pod
}

func (e *evictor) Evict(_ context.Context, pod mig.Pod) error {
	e.asked = append(e.asked, pod)
	if len(e.asked) == 1 {
		return errors.New("the disruption budget web allows none")
	}
	for uuid, name := range e.r.pods {
		if name == pod.Namespace+"/"+pod.Name {
			e.r.hold(uuid, "")
		}
	}
	return nil
}

func TestEviction(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		e := &evictor{r: r}
		gpu := r.Snapshots().Value().GPUs[0].UUID
		r.hold(gpu, "team/web-0")
		r.start(func(o *mig.Options) { o.Evictor = e })
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.passes(time.Minute)
		if len(e.asked) > 0 {
			t.Errorf("evicted without being told to: %v", e.asked)
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", Evict: true, EvictTimeout: time.Minute})
		r.until("says why not", func(s mig.Status) bool {
			return strings.Contains(s.Reason, "in use by pod team/web-0: the disruption budget")
		})
		r.reaches(mig.StateSuccess)
		if want := (mig.Pod{Namespace: "team", Name: "web-0"}); len(e.asked) != 2 || e.asked[1] != want {
			t.Errorf("evicted: %v", e.asked)
		}
		// If a pod does not end in time, its GPU is advertised again.
		r.hold(r.uuids(0, "3g.40gb")[0], "with UID 4711")
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0", Count: 1})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-disabled", Evict: true})
		r.passes(10 * time.Minute)
		if s := r.reaches(mig.StatePending); slices.Contains(e.asked, mig.Pod{}) || len(e.asked) < 40 {
			t.Errorf("%s; evicted without a limit: %v", s.Reason, e.asked)
		}
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0"})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-disabled", Evict: true, EvictTimeout: time.Minute})
		s := r.reaches(mig.StateFailed)
		if !strings.Contains(s.Reason, "in use by pod with UID 4711 for more than 1m0s") || len(r.devices()[0]) != 4 {
			t.Errorf("%s; offered: %v", s.Reason, r.devices()[0])
		}
	})
}

// Before the first answer of the driver, no layout counts as applied, and nothing is resumed.
func TestBeforeFirstSnapshot(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start(func(o *mig.Options) { o.Snapshots = feed.New(inventory.Snapshot{}) })
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.passes(time.Minute)
		if s := r.controller.Status().Value(); s.State == mig.StateSuccess || s.Resume {
			t.Errorf("state %q, resume %v", s.State, s.Resume)
		}
	})
}

// While the kubelet does not respond, no GPU is changed.
func TestUnknownUsers(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.absent = errors.New("kubelet does not run")
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.passes(time.Minute)
		s := r.until("says so", func(s mig.Status) bool { return strings.Contains(s.Reason, "kubelet does not run") })
		if s.State != mig.StatePending || r.journal() != "" {
			t.Errorf("%s; the journal: %s", s.State, r.journal())
		}
		r.mu.Lock()
		r.absent = nil
		r.mu.Unlock()
		r.reaches(mig.StateSuccess)
	})
}

// If the division of a GPU cannot be read, its devices stay advertised, and it is read again.
func TestFailingRead(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		r.mu.Lock()
		r.dead = errors.New("the driver has no time")
		r.mu.Unlock()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", OrderNumber: 1})
		s := r.reaches(mig.StatePending)
		r.until("says so", func(s mig.Status) bool { return s.Reason == "GPU 0, 1, 2: the driver has no time" })
		if diff := cmp.Diff(balanced, r.devices()[0]); diff != "" {
			t.Errorf("%s: offered (-want +got):\n%s", s.Reason, diff)
		}
		r.mu.Lock()
		r.dead = nil
		r.mu.Unlock()
		r.reaches(mig.StateSuccess)
	})
}

// If the driver denies permission, GPUs are advertised unchanged, and retries are rare.
func TestMissingPermission(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.inject(simulator.Fault{Kind: simulator.KindFail, Call: "DeviceSetMigMode", Return: "NO_PERMISSION"})
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		s := r.until("failed", func(s mig.Status) bool {
			return len(s.GPUs) == 3 && s.GPUs[0].Phase == mig.PhaseFailed && s.GPUs[1].Phase == mig.PhaseFailed &&
				s.GPUs[2].Phase == mig.PhaseFailed
		})
		if !strings.Contains(s.Reason, "SYS_ADMIN") || time.Until(s.GPUs[0].Retry) < 4*time.Minute {
			t.Errorf("%s; tried again in %v", s.Reason, time.Until(s.GPUs[0].Retry))
		}
		if diff := cmp.Diff(map[int][]string{0: {"GPU"}, 1: {"GPU"}, 2: {"GPU"}, 3: {"GPU"}}, r.devices()); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
	})
}

// The driver enables the MIG mode, but then denies access to the instances: the mode is disabled
// again, and retries are limited.
func TestUnreadableInstances(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetGpuInstances", Return: "NO_PERMISSION"})
		steps := 0
		r.mu.Lock()
		r.before = func(string, inventory.MIGStep) error { steps++; return nil }
		r.mu.Unlock()
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-enabled", GPUs: []string{"1"}})
		r.passes(10 * time.Minute)
		if steps == 0 || steps > 40 {
			t.Errorf("%d steps in ten minutes", steps)
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-enabled", GPUs: []string{"1"}, OrderNumber: 1})
		s := r.until("fails again", func(s mig.Status) bool {
			return s.OrderNumber == 1 && s.State == mig.StateFailed && !s.GPUs[1].Retry.IsZero()
		})
		if pause := time.Until(s.GPUs[1].Retry); pause > 10*time.Second {
			t.Errorf("tried again in %v after a new layout", pause)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "1"})
		r.reaches(mig.StateSuccess)
	})
}

// Another program reverts the layout.
func TestForeignDivision(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		began := time.Now()
		for range 3 {
			r.inject(simulator.Fault{Kind: simulator.KindReset, GPU: "0"})
			r.until("sees it", func(s mig.Status) bool { return s.State != mig.StateSuccess })
			r.reaches(mig.StateSuccess)
		}
		if took := time.Since(began); took < 10*time.Second || len(r.devices()[0]) != 4 {
			t.Errorf("made three times again within %v; offered: %v", took, r.devices()[0])
		}
	})
}
