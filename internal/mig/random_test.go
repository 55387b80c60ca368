package mig_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

var (
	sequences = flag.Uint64("sequences", 8, "number of random sequences of layouts")
	firstSeed = flag.Uint64("seed", 1, "seed of the first random sequence of wishes")
)

// randomLayouts are layouts that mix GPUs, profiles and compute instances.
const randomLayouts = `version: v1
mig-configs:
  mixed:
  - {devices: [0], mig-enabled: true, mig-devices: {"3g.40gb": 1, "1c.3g.40gb": 3}}
  - {devices: [1], mig-enabled: true, mig-devices: {"2g.10gb": 2, "1g.5gb": 3}}
  halves:
  - {devices: [0], mig-enabled: true, mig-devices: {"3g.40gb": 2}}
  - {devices: [2], mig-enabled: true, mig-devices: {"2g.12gb": 2}}
  media:
  - {devices: [0], mig-enabled: true, mig-devices: {"1g.10gb+me": 1, "1g.20gb": 3}}
  - {devices: [1, 2], mig-enabled: false}
  too-much:
  - {devices: [0], mig-enabled: true, mig-devices: {"4g.40gb": 2}}
  - {devices: [1], mig-enabled: true, mig-devices: {"1g.5gb": 7}}
  mode:
  - {devices: all, mig-enabled: true, mig-devices: {}}
`

// A place is the memory slices of a pod.
type place struct{ gpu, start, end int }

// Layouts, pods, failing and slow calls, resets, restarts of the node and kills follow each other
// at random. No instance of a pod is destroyed, and no two pods get the same slice. After the
// faults, the node has the layout, or the status says why not.
func TestRandomLayouts(t *testing.T) {
	t.Parallel()
	file := parsed(t, randomLayouts)
	if testing.Short() {
		*sequences = min(*sequences, 2)
	}
	for seed := *firstSeed; seed < *firstSeed+*sequences; seed++ {
		synctest.Test(t, func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("run this again with -run TestRandomLayouts -seed %d -sequences 1", seed)
				}
			}()
			randomSequence(t, seed, file)
		})
	}
}

// A sequence is a rig with its pods in a random sequence.
type sequence struct {
	*rig
	*rand.Rand
	places map[string]place // by the UUID that a pod holds
	boots  int
	dying  bool // the owner is being killed: no call of its reaches the driver
}

func randomSequence(t *testing.T, seed uint64, file *layout.File) {
	s := &sequence{rig: newRig(t, nodeOfThree), Rand: rand.New(rand.NewPCG(seed, 1200)), places: map[string]place{}}
	s.start()
	for range 4 + s.IntN(10) {
		if testing.Verbose() {
			st := s.controller.Status().Value()
			s.t.Logf("%v %s %s %v; pods %v; %+v", time.Now().Format("04:05.000"), st.State, st.Reason, s.devices(), s.places,
				s.desired.Value())
		}
		switch s.IntN(13) {
		case 0, 1, 2, 3:
			s.request(file)
		case 4, 5:
			s.allocate()
		case 6:
			s.free()
		case 7, 8, 9, 10:
			s.fault()
		case 11:
			s.kill()
		case 12:
			s.lose()
		}
		time.Sleep([]time.Duration{0, time.Millisecond, 20 * time.Millisecond, time.Second, 20 * time.Second}[s.IntN(5)])
	}
	s.check()
	// The faults end, and so do the pods.
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	s.free()
	if s.dying {
		s.revive()
	}
	for len(s.places) > 0 {
		s.free()
	}
	for range 15 * 60 / 10 { // longer than any pause
		if time.Sleep(10 * time.Second); s.settled() {
			break
		}
	}
	s.check()
	s.judge()
}

// request requests a random layout.
func (s *sequence) request(file *layout.File) {
	builtin := []string{"all-balanced", "all-disabled", "all-enabled", "all-1g.10gb", "all-2g.12gb", "all-7g.80gb",
		"all-1g.10gb.me", "no-such"}
	w := mig.DesiredLayout{Replace: s.IntN(4) == 0, OrderNumber: s.desired.Value().OrderNumber + 1}
	switch n := s.IntN(10); {
	case n == 0: // nothing
	case n < 6:
		w.Layout = builtin[s.IntN(len(builtin))]
	default:
		w.Layout, w.File = file.Names()[s.IntN(len(file.Names()))], file
	}
	if s.IntN(5) == 0 {
		w.GPUs = []string{fmt.Sprint(s.IntN(3))}
	}
	s.desired.Publish(w)
}

// allocate gives some of the advertised devices to pods, like the kubelet.
func (s *sequence) allocate() {
	offered := s.offered()
	for _, uuid := range slices.Sorted(maps.Keys(offered)) {
		s.mu.Lock()
		_, taken := s.pods[uuid]
		s.mu.Unlock()
		if taken || s.IntN(2) == 0 {
			continue
		}
		p, ok := s.placeOf(uuid)
		if !ok {
			continue // gone since the last look: the container does not start
		}
		for other, o := range s.places {
			if o.gpu == p.gpu && o.start < p.end && p.start < o.end {
				if offered[uuid].GI != inventory.Unattributed && offered[other].GI == offered[uuid].GI {
					continue // compute instances of one GPU instance
				}
				s.t.Errorf("two pods have slices %d to %d of GPU %d: %s and %s", p.start, p.end, p.gpu, uuid, other)
			}
		}
		if s.give(uuid, "ns/"+uuid) {
			s.places[uuid] = p
		}
	}
}

// placeOf returns the place of a device according to the driver.
func (s *sequence) placeOf(uuid string) (place, bool) {
	for _, g := range s.Snapshots().Value().GPUs {
		if g.UUID == uuid {
			p, err := s.Monitor.Partitions(context.Background(), g.UUID)
			return place{g.Index, 0, 100}, err == nil && p.Mode != inventory.MIGEnabled
		}
		for _, d := range g.MIGDevices {
			if d.UUID != uuid {
				continue
			}
			p, err := s.Monitor.Partitions(context.Background(), g.UUID)
			if err != nil {
				return place{}, false
			}
			for _, i := range p.Instances {
				if i.ID == d.GI && slices.ContainsFunc(i.Computes, func(c inventory.ComputeInstance) bool { return c.ID == d.CI }) {
					return place{g.Index, i.Start, i.Start + i.Size}, true
				}
			}
		}
	}
	return place{}, false
}

// free ends some pods.
func (s *sequence) free() {
	for _, uuid := range slices.Sorted(maps.Keys(s.places)) {
		if s.IntN(2) == 0 {
			delete(s.places, uuid)
			s.hold(uuid, "")
		}
	}
}

// fault makes calls fail, hang or take long, or ends this.
func (s *sequence) fault() {
	calls := []string{
		"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstanceWithPlacement",
		"GpuInstanceDestroy",
		"ComputeInstanceDestroy", "DeviceGetGpuInstances",
	}
	f := simulator.Fault{GPU: fmt.Sprint(s.IntN(3)), Call: calls[s.IntN(len(calls))]}
	switch s.IntN(6) {
	case 0, 1:
		f.Kind, f.Return = simulator.KindFail, []string{"UNKNOWN", "IN_USE", "NO_PERMISSION", "TIMEOUT"}[s.IntN(4)]
	case 2:
		f.Kind, f.Delay, f.Count = simulator.KindSlow, []string{"3s", "45s"}[s.IntN(2)], 1
	case 3:
		f.Kind, f.Count = simulator.KindHang, 1
	case 4:
		f = simulator.Fault{Kind: simulator.KindProcesses, GPU: f.GPU, Count: uint64(s.IntN(2))}
		for _, p := range s.places {
			if fmt.Sprint(p.gpu) == f.GPU {
				return // a MIG device that is held
			}
		}
	default:
		f = simulator.Fault{Kind: simulator.KindRestore, GPU: f.GPU}
	}
	_ = s.node.Inject(f) // a fault that the GPU cannot have now
}

// kill stops the Controller before or after one of its next calls, or starts it again.
func (s *sequence) kill() {
	if s.dying {
		s.revive()
		return
	}
	left, late := s.IntN(12), s.IntN(2) == 0
	s.dying = true
	at := func(before bool) func(string, inventory.MIGStep) error {
		return func(string, inventory.MIGStep) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if left--; left < 0 && (left < -1 || before != late) {
				s.dead = errors.New("killed")
				return s.dead
			}
			return nil
		}
	}
	s.mu.Lock()
	s.before, s.after = at(true), at(false)
	s.mu.Unlock()
}

// revive starts the Controller again.
func (s *sequence) revive() {
	s.stop()
	s.mu.Lock()
	s.before, s.after, s.dead, s.dying = nil, nil, nil, false
	s.mu.Unlock()
	s.start()
}

// lose restarts the node or resets a GPU: all its pods end.
func (s *sequence) lose() {
	if s.IntN(3) > 0 {
		return
	}
	s.stop()
	for uuid := range s.places {
		s.hold(uuid, "")
	}
	clear(s.places)
	s.boots++
	s.boot = fmt.Sprint("boot ", s.boots)
	s.inject(simulator.Fault{Kind: simulator.KindReboot})
	s.revive()
}

// check fails if the driver has lost a device of a pod.
func (s *sequence) check() {
	for uuid, p := range s.places {
		if now, there := s.placeOf(uuid); there && now != p {
			s.t.Errorf("the device %s of a pod was at %v and is at %v", uuid, p, now)
		}
	}
}

// settled reports whether no further change is expected.
func (s *sequence) settled() bool {
	status := s.controller.Status().Value()
	for _, g := range status.GPUs {
		if g.Phase != mig.PhaseDone && g.Phase != mig.PhaseKept && (g.Phase != mig.PhaseFailed || !g.Retry.IsZero()) {
			return false
		}
	}
	return true
}

// judge fails if the node does not have the layout and its status does not say why.
func (s *sequence) judge() {
	desired, status := s.desired.Value(), s.controller.Status().Value()
	var phases []string
	for _, g := range status.GPUs {
		phases = append(phases, fmt.Sprintf("%d %s: %s", g.Index, g.Phase, g.Reason))
	}
	switch {
	case desired.Layout == "" && status.State == mig.StateNone:
	case status.Layout != desired.Layout || status.OrderNumber != desired.OrderNumber:
		s.t.Errorf("the status is about %q, and the desired layout is %q", status.Layout, desired.Layout)
	case status.State == mig.StateSuccess:
		for _, g := range s.Snapshots().Value().GPUs {
			if g.MIG == inventory.MIGUnsupported || len(desired.GPUs) > 0 && desired.GPUs[0] != fmt.Sprint(g.Index) {
				continue
			}
			p, err := s.Monitor.Partitions(s.t.Context(), g.UUID)
			if err != nil {
				s.t.Fatal(err)
			}
			now := layout.GPU{Index: g.Index, UUID: g.UUID, Partitions: p}
			if l, err := layout.Find(desired.Layout, desired.File, []layout.GPU{now}); err == nil {
				if c := layout.Plan(l, []layout.GPU{now}).GPUs[0]; len(c.Steps) > 0 {
					s.t.Errorf("success with %s, and GPU %d lacks %d steps", desired.Layout, g.Index, len(c.Steps))
				}
			}
		}
	case status.State == mig.StateFailed && status.Reason != "":
		for _, g := range status.GPUs {
			if g.Phase == mig.PhaseFailed && !g.Retry.IsZero() {
				s.t.Errorf("%s has nothing in its way any more, and is %s: %q", desired.Layout, status.State, phases)
			}
		}
	default:
		s.t.Errorf("%s ends as %q: %q", desired.Layout, status.State, phases)
	}
	for uuid, h := range s.controller.Holds().Value() {
		if h.Reason != "" {
			s.t.Errorf("%s ends as %q with a hold on %s: %q\n%s", desired.Layout, status.State, uuid, phases, s.journal())
		}
	}
}
