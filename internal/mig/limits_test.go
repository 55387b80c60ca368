package mig_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// paces returns the pauses between times, in seconds.
func paces(at []time.Time) []int {
	var all []int
	for i := range len(at) - 1 {
		all = append(all, int(at[i+1].Sub(at[i]).Round(time.Second).Seconds()))
	}
	return all
}

// Retries wait for 5 s up to 5 minutes, doubling each time; up to 30 s if an unknown user has the
// GPU; and not at all for a new layout. A change of the GPU by a failed step does not shorten the
// wait, but a change by a hanging step does.
func TestRetries(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err   error
		paces []int
	}{
		"a call that fails":       {inventory.ErrNotSupported, []int{5, 10, 20, 40, 80, 160, 300, 300}},
		"a GPU that is used":      {inventory.ErrInUse, []int{0, 10, 20, 30, 30, 30, 30, 30}},
		"a mode not yet in force": {inventory.ErrResetRequired, []int{0, 10, 20, 40, 80, 160, 300, 300}},
		"a driver that is slow":   {inventory.ErrNoAnswer, []int{0, 1, 1, 1, 1, 1, 1, 1}},
		"a call past its limit":   {context.DeadlineExceeded, []int{0, 1, 1, 1, 1, 1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				var tries []time.Time
				r.before = func(_ string, step inventory.MIGStep) error {
					if step.Action != inventory.MIGCreateCompute {
						return nil
					}
					tries = append(tries, time.Now())
					return fmt.Errorf("the call: %w", test.err)
				}
				r.start()
				r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}})
				r.until("has begun", func(s mig.Status) bool { return len(s.GPUs) == 3 && strings.Contains(s.GPUs[0].Reason, "the call") })
				for _, pause := range test.paces {
					r.passes(time.Duration(pause)*time.Second + 100*time.Millisecond)
				}
				if len(tries) < 9 {
					t.Fatalf("tried at %v only", tries)
				}
				if diff := cmp.Diff(test.paces, paces(tries[:9])); diff != "" {
					t.Errorf("pauses in seconds (-want +got):\n%s", diff)
				}
				g := r.controller.Status().Value().GPUs[0]
				if said := !g.Retry.IsZero(); said != (test.paces[7] >= 5) || said && time.Until(g.Retry) > 5*time.Minute {
					t.Errorf("%s: tried again at %v", g.Reason, g.Retry)
				}
				tries = nil
				began := time.Now()
				r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}, OrderNumber: 1})
				r.passes(8 * time.Second)
				if len(tries) < 2 || tries[0].Sub(began) > 2*time.Second || paces(tries)[0] > 5 {
					t.Errorf("after a new layout at %v it was tried at %v", began, tries)
				}
			})
		})
	}
}

// The layout is arranged around one instance that a pod holds or another program created, at any
// place.
func TestFixedInstances(t *testing.T) {
	t.Parallel()
	sevenths := []string{"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"}
	const file = `{version: v1, mig-configs: {new: [{devices: [0], mig-enabled: true, mig-devices: {"1g.10gb": 1, "3g.40gb": 1}}]}}`
	for slice := range 7 {
		for name, others := range map[string]bool{"of a pod": false, "of another program": true} {
			t.Run(fmt.Sprint(name, " at slice ", slice), func(t *testing.T) {
				onNode(t, func(t *testing.T, r *rig) {
					if others {
						r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: sevenths})
						r.passes(time.Second)
					} else {
						r.start()
						r.makes("all-1g.10gb")
					}
					gpu := r.Snapshots().Value().GPUs[0]
					now, err := r.Monitor.Partitions(t.Context(), gpu.UUID)
					if err != nil {
						t.Fatal(err)
					}
					stays := ""
					for _, i := range now.Instances {
						at := slices.IndexFunc(gpu.MIGDevices, func(d inventory.MIGDevice) bool { return d.GI == i.ID })
						if i.Start == slice {
							stays = gpu.MIGDevices[at].UUID
							continue
						}
						if !others {
							continue
						}
						for _, action := range []inventory.MIGAction{inventory.MIGDestroyCompute, inventory.MIGDestroyInstance} {
							if _, err := r.Monitor.Repartition(t.Context(), gpu.UUID,
								inventory.MIGStep{Action: action, GI: i.ID, CI: gpu.MIGDevices[at].CI}); err != nil {
								t.Fatal(err)
							}
						}
					}
					if others {
						r.start()
						r.makes("all-1g.10gb") // the others are this program's
					} else {
						r.hold(stays, "ns/stays")
					}
					r.desired.Publish(mig.DesiredLayout{Layout: "new", File: parsed(t, file)})
					r.until("is made", func(s mig.Status) bool {
						return s.Layout == "new" && len(s.GPUs) == 3 && s.GPUs[0].Phase == mig.PhaseDone
					})
					if diff := cmp.Diff([]string{"1g.10gb", "3g.40gb"}, r.devices()[0]); diff != "" ||
						r.uuids(0, "1g.10gb")[0] != stays {
						t.Errorf("%s went (-want +got):\n%s", stays, diff)
					}
				})
			})
		}
	}
}

// The change does not wait for a process on another instance, but for a process whose instance is
// unknown.
func TestProcessOnAnotherInstance(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0", Count: 1})
		busy := r.Snapshots().Value().GPUs[0].MIGDevices[0]
		r.desired.Publish(mig.DesiredLayout{Layout: "all-" + busy.Profile, GPUs: []string{"0"}})
		r.reaches(mig.StateSuccess)
		if !slices.Contains(r.uuids(0, busy.Profile), busy.UUID) {
			t.Error("the instance with the process went")
		}
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0"})
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0", Count: 1}) // a driver that does not say where
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}})
		r.until("waits", func(s mig.Status) bool { return strings.Contains(s.Reason, "in use by process") })
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0"})
		if s := r.reaches(mig.StateSuccess); len(s.GPUs[0].Holders) > 0 {
			t.Errorf("holders of a GPU that is done: %v", s.GPUs[0].Holders)
		}
	})
}

// GPUs without the profiles of the layout stay unchanged. This is a failure only if no GPU has the
// profiles.
func TestLayoutOfOtherModels(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-2g.12gb"})
		s := r.reaches(mig.StateSuccess)
		if s.GPUs[0].Phase != mig.PhaseKept || s.GPUs[1].Phase != mig.PhaseKept || s.GPUs[2].Phase != mig.PhaseDone ||
			s.GPUs[0].Reason == "" {
			t.Errorf("GPUs: %+v", s.GPUs)
		}
		if diff := cmp.Diff(map[int][]string{0: {"GPU"}, 1: {"GPU"}, 2: {"2g.12gb", "2g.12gb"}, 3: {"GPU"}},
			r.devices()); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-9g.12gb"})
		if s = r.reaches(mig.StateFailed); !allFailed(s) || !strings.HasPrefix(s.Reason, `GPU 0`) {
			t.Errorf("%s; GPUs: %+v", s.Reason, s.GPUs)
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "new", File: parsed(t,
			`{version: v1, mig-configs: {new: [{devices: [0, 2], mig-enabled: true, mig-devices: {"2g.12gb": 2}}]}}`)})
		if s = r.reaches(mig.StateFailed); s.GPUs[0].Phase != mig.PhaseFailed || s.GPUs[1].Phase != mig.PhaseKept ||
			s.GPUs[2].Phase != mig.PhaseDone ||
			s.GPUs[1].Reason != "the layout has no item for this GPU" {
			t.Errorf("GPUs of a file that names them: %+v", s.GPUs)
		}
		none := parsed(t, `{version: v1, mig-configs: {none: [{devices: all, device-filter: "0x1EB810DE", mig-enabled: true, mig-devices: {"1g.5gb": 7}}], `+
			`some: [{devices: all, mig-enabled: false}]}}`)
		r.desired.Publish(mig.DesiredLayout{Layout: "none", File: none})
		if s = r.reaches(mig.StateFailed); !strings.Contains(s.Reason,
			"the layout none has no item for any GPU of this node (PCI device 0x") ||
			!strings.Contains(s.Reason, "layouts that have one: some") {
			t.Errorf("a layout for other GPUs: %s", s.Reason)
		}
	})
}

// A GPU is done when the Snapshot shows all of its MIG devices. Devices that are missing after five
// seconds do not hold back the others, but the layout fails.
func TestSnapshotBehindDivision(t *testing.T) {
	t.Parallel()
	for name, hides := range map[string]func(inventory.MIGDevice) bool{
		"one GPU instance":     func(d inventory.MIGDevice) bool { return d.Profile == "3g.40gb" },
		"one compute instance": func(d inventory.MIGDevice) bool { return d.Profile == "1c.3g.40gb" && d.CI == 2 },
	} {
		for _, comes := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", which comes: ", comes), func(t *testing.T) {
				onNode(t, func(t *testing.T, r *rig) {
					mine := newMirror(r)
					r.start(func(o *mig.Options) { o.Snapshots = mine.Feed })
					r.desired.Publish(mig.DesiredLayout{Layout: "mixed", GPUs: []string{"0"}, File: parsed(t, randomLayouts)})
					r.until("waits for the look", func(s mig.Status) bool {
						return strings.Contains(s.Reason, "the last scan of the node does not show the present division of the GPU")
					})
					if len(r.devices()[0]) > 0 {
						t.Errorf("offered: %v", r.devices()[0])
					}
					mine.show(hides)
					r.passes(4 * time.Second)
					if s := r.controller.Status().Value(); s.State != mig.StatePending {
						t.Errorf("%q without a device", s.State)
					}
					if !comes {
						s := r.reaches(mig.StateFailed)
						if !strings.Contains(s.Reason, "do not find the MIG devices of GPU instances ") ||
							len(mine.Value().GPUs[0].MIGDevices) == 0 {
							t.Error(s.Reason)
						}
						if hold := r.controller.Holds().Value()[s.GPUs[0].UUID]; hold.Reason != "" {
							t.Errorf("the devices that are shown are held: %+v", hold)
						}
						r.passes(time.Minute)
						if s := r.controller.Status().Value(); s.State != mig.StateFailed {
							t.Errorf("%q without a device", s.State)
						}
					}
					began := time.Now()
					mine.show(nil)
					r.reaches(mig.StateSuccess)
					if took := time.Since(began); comes && took > 0 || took > 5*time.Second {
						t.Errorf("success after another %v", took)
					}
				})
			})
		}
	}
}

// An instance is not destroyed while the Snapshot does not show its MIG device, because a pod may
// hold it.
func TestSnapshotWithoutMIGDevice(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		mine := newMirror(r)
		mine.show(func(d inventory.MIGDevice) bool { return d.Profile == "3g.40gb" })
		r.start(func(o *mig.Options) { o.Snapshots = mine.Feed })
		r.desired.Publish(mig.DesiredLayout{Layout: "all-1g.10gb", GPUs: []string{"0"}})
		r.until("waits", func(s mig.Status) bool {
			return strings.Contains(s.Reason, "the last scan of the node does not show the MIG device of GPU instance ")
		})
		r.passes(time.Minute)
		if len(r.uuids(0, "3g.40gb")) != 1 || len(r.uuids(0, "2g.20gb")) != 1 {
			t.Error("an instance was destroyed")
		}
		mine.follow()
		r.reaches(mig.StateSuccess)
	})
}

// An unchanged journal is not written again.
func TestUnchangedJournal(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		before := r.journalFile()
		for again := range uint64(3) {
			r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", OrderNumber: again + 1})
			r.reaches(mig.StateSuccess)
		}
		if !os.SameFile(before, r.journalFile()) {
			t.Error("the journal was written")
		}
	})
}

// A GPU without a division before the restart stays unchanged if the layout is no longer wanted.
func TestRestartOfTheNodeInTheFirstStep(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.before = func(string, inventory.MIGStep) error { return inventory.ErrNoAnswer }
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0"}})
		r.until("has begun", func(s mig.Status) bool { return strings.Contains(s.Reason, inventory.ErrNoAnswer.Error()) })
		r.reboots()
		r.desired.Publish(mig.DesiredLayout{})
		steps := 0
		r.mu.Lock()
		r.before = func(string, inventory.MIGStep) error { steps++; return nil }
		r.mu.Unlock()
		r.start()
		r.until("is kept", func(s mig.Status) bool { return len(s.GPUs) == 3 && s.GPUs[0].Phase == mig.PhaseKept && s.Resume })
		r.passes(time.Minute)
		if steps > 0 || !slices.Equal(r.devices()[0], []string{"GPU"}) {
			t.Errorf("%d steps; offered: %v; the journal: %s", steps, r.devices()[0], r.journal())
		}
	})
}

// countedUsers counts its calls.
type countedHolders struct {
	of    kubelet.Holders
	asked atomic.Int64
}

func (c *countedHolders) Holders(ctx context.Context, devices []string) ([]kubelet.HeldDevice, error) {
	c.asked.Add(1)
	return c.of.Holders(ctx, devices)
}

// The kubelet is asked often at first, because it usually confirms a hold in less than a second,
// and then every second.
func TestKubeletPolling(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.absent = errors.New("kubelet does not run")
		users := &countedHolders{of: r}
		r.start(func(o *mig.Options) { o.Holders = users })
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0"}})
		r.passes(4 * time.Second)
		first := users.asked.Load()
		r.passes(2 * time.Second)
		between := users.asked.Load()
		r.passes(20 * time.Second)
		each := 2 // for what pods hold, and before the change
		if later := int(users.asked.Load() - between); int(first) < 38*each || later < 19*each || later > 21*each {
			t.Errorf("asked %d times in 4 s, %d times in 20 s after that", first, later)
		}
		if g := r.controller.Status().Value().GPUs[0]; !g.Retry.IsZero() {
			t.Errorf("what is waited for is said to be tried again at %v", g.Retry)
		}
	})
}

// A refused GPU is advertised unchanged until the refusal ends. A GPU with the layout keeps it, and
// a started change continues.
func TestRefusedGPU(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		const reason = "it is reserved for claims"
		var elsewhere atomic.Bool
		option := func(o *mig.Options) {
			o.Refuse = func(uuid string) string {
				if elsewhere.Load() && uuid == r.Snapshots().Value().GPUs[0].UUID {
					return reason
				}
				return ""
			}
		}
		elsewhere.Store(true)
		r.start(option)
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.done(1, 2)
		s := r.until("says so", func(s mig.Status) bool { return s.State == mig.StatePending && s.Reason == "GPU 0: "+reason })
		r.passes(time.Minute)
		if !slices.Equal(r.devices()[0], []string{"GPU"}) {
			t.Errorf("%s; offered: %v", s.Reason, r.devices()[0])
		}
		elsewhere.Store(false)
		began := time.Now()
		r.reaches(mig.StateSuccess)
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("success %v after the reason has ended", took)
		}
		elsewhere.Store(true)
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", OrderNumber: 1})
		r.reaches(mig.StateSuccess)
		elsewhere.Store(false)
		r.mu.Lock()
		r.before = func(_ string, step inventory.MIGStep) error {
			if step.Action == inventory.MIGCreateInstance {
				elsewhere.Store(true)
				r.before = nil
				return inventory.ErrNoAnswer
			}
			return nil
		}
		r.mu.Unlock()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-1g.10gb", GPUs: []string{"0"}})
		r.reaches(mig.StateSuccess)
	})
}

// deaf is a driver that returns no processes.
type deaf struct {
	*rig
	err error
}

func (d *deaf) Processes(ctx context.Context, gpus []string) (map[string][]inventory.Process, error) {
	if d.err != nil {
		return nil, d.err
	}
	return d.rig.Processes(ctx, gpus)
}

// A GPU is not advertised before its division and its processes were read.
func TestUnreadGPU(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"division", "processes"} {
		t.Run(what, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				driver := &deaf{rig: r}
				problem := errors.New("the driver has no time")
				if what == "division" {
					r.dead = problem
				} else {
					driver.err = problem
				}
				r.desired.Publish(mig.DesiredLayout{Layout: "all-enabled"})
				r.start(func(o *mig.Options) { o.Driver = driver })
				s := r.until("says so", func(s mig.Status) bool { return s.Reason == "GPU 0, 1, 2: the driver has no time" })
				r.passes(time.Minute)
				if diff := cmp.Diff(map[int][]string{3: {"GPU"}}, r.devices()); diff != "" || s.State != mig.StatePending {
					t.Errorf("%s: offered (-want +got):\n%s", s.State, diff)
				}
				for uuid, h := range r.controller.Holds().Value() {
					if uuid != r.Snapshots().Value().GPUs[3].UUID && h.Reason != "the division of its GPU cannot be read" {
						t.Errorf("the hold on %s: %+v", uuid, h)
					}
				}
				r.mu.Lock()
				r.dead, driver.err = nil, nil
				r.mu.Unlock()
				r.reaches(mig.StateSuccess)
			})
		})
	}
}

// A removed GPU is forgotten at once, even if nothing happens to the others.
func TestRemovedGPU(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		mine := newMirror(r)
		r.start(func(o *mig.Options) { o.Snapshots = mine.Feed })
		r.until("is kept", func(s mig.Status) bool { return len(s.GPUs) == 3 && s.Resume })
		less := mine.Value()
		gone := less.GPUs[0].UUID
		less.GPUs = less.GPUs[1:]
		mine.Publish(less)
		r.passes(time.Second)
		if s := r.controller.Status().Value(); len(s.GPUs) != 2 {
			t.Errorf("there are still %d GPUs", len(s.GPUs))
		}
		if _, there := r.controller.Holds().Value()[gone]; there {
			t.Error("there is still a hold on it")
		}
	})
}

// A failure of the journal or an eviction timeout is not retried earlier because the GPU has
// changed.
func TestFailureAfterChangeOfGPU(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"journal", "pod"} {
		t.Run(what, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				mine := newMirror(r)
				gpu := mine.Value().GPUs[0].UUID
				r.start(func(o *mig.Options) {
					o.Snapshots, o.Evictor = mine.Feed, evict(func(mig.Pod) error { return nil })
					if what == "journal" {
						o.StateDir = "/dev/null/state"
					}
				})
				if what == "pod" {
					r.hold(gpu, "ns/stays")
				}
				r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{gpu}, Evict: true,
					EvictTimeout: time.Minute})
				retry := r.reaches(mig.StateFailed).GPUs[0].Retry
				other := mine.Value()
				other.GPUs = slices.Clone(other.GPUs)
				other.GPUs[0].Index = 9
				mine.Publish(other)
				r.passes(time.Second)
				if s := r.controller.Status().Value(); s.State != mig.StateFailed || !s.GPUs[2].Retry.Equal(retry) ||
					s.GPUs[2].Index != 9 {
					t.Errorf("%s: %s; tried again at %v, want %v", s.State, s.Reason, s.GPUs[2].Retry, retry)
				}
			})
		})
	}
}
