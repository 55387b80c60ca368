package serve

import (
	"cmp"
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// What a Set does with devices and resources that left the plan. list.go decides when a list drops
// a device.

// adoptTimeout bounds the wait for PodResources before the first registration, if the checkpoint
// cannot be read. It is short because pods that are admitted before the registration fail.
const adoptTimeout = time.Second

// adopt adds to the list, as departing, the devices of the resource that kubelet has and the plan
// has not: they were listed by an earlier process, or by another one that is about to end. It is
// called before each registration. The checkpoint has them all. If it cannot be read, PodResources
// is asked instead, before the first registration only.
func (s *Set) adopt(ctx context.Context, entry *served) {
	s.mu.Lock()
	first := !entry.adopted
	entry.adopted = true
	s.mu.Unlock()
	checkpoint, err := s.collaborators.Checkpoint()
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read kubelet's checkpoint", "reason", err.Error())
		if !first {
			return
		}
		checkpoint = s.askPodResources(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if entry.list.adopt(knownOf(checkpoint, entry.list.name)) {
		s.mayDepart()
		s.refresh()
	}
}

// knownOf returns the devices of a resource in a checkpoint, by ID, with the NUMA nodes of those
// that are held.
func knownOf(checkpoint kubelet.Checkpoint, resource string) map[string][]int64 {
	nodes := map[string][]int64{}
	for _, id := range checkpoint.Healthy[resource] {
		nodes[id] = nil
	}
	for _, d := range checkpoint.Held {
		if d.Resource == resource {
			nodes[d.ID] = append(nodes[d.ID], d.NUMANodes...)
		}
	}
	return nodes
}

// askPodResources returns what PodResources answers, in the form of a checkpoint. It may be
// incomplete.
func (s *Set) askPodResources(ctx context.Context) kubelet.Checkpoint {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	patience := s.collaborators.Clock.NewTimer(adoptTimeout)
	defer patience.Stop()
	go func() {
		select {
		case <-patience.C():
			cancel()
		case <-ctx.Done():
		}
	}()
	healthy, err := s.collaborators.Accountant.Allocatable(ctx)
	held, err2 := s.collaborators.Accountant.Held(ctx)
	if err := cmp.Or(err, err2); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot ask kubelet for the devices of the resource", "reason", err.Error())
	}
	return kubelet.Checkpoint{Healthy: healthy, Held: held}
}

const (
	// readInterval is how often the checkpoint and PodResources are read, while devices are departing.
	readInterval = time.Second
	// readSoon is how often they are read after kubelet gave away a departing device. On a node
	// without a free device, the next pod gets a device moments after the last one ended; the device
	// changes its form only if it is seen free in between.
	readSoon = 100 * time.Millisecond
	// resendSoon and resendLater are the shortest and the longest pause before lists are sent again to
	// have kubelet write its checkpoint. The pause doubles.
	resendSoon  = time.Second
	resendLater = 30 * time.Second
)

// dropDeparting drops departing devices that no pod holds, and ends the servers of retired
// resources that have none left.
//
// The checkpoint may name pods that have ended, because kubelet does not write it when a pod ends.
// Kubelet writes it when it receives a list. So the lists are sent again while only the checkpoint
// says that a pod holds a device, and while the checkpoint cannot be read.
//
// While nothing departs, the accounts are read after kubelet or another plugin came or went,
// because there may be devices that pods hold and nobody serves.
func (s *Set) dropDeparting(ctx context.Context) error {
	r := s.newReader()
	for {
		if !r.await(ctx) {
			return nil
		}
		waits, ending := s.waits(r.ticked)
		if waits || ending {
			r.tickIn(s.readPause())
		}
		if !waits && !r.looks {
			continue
		}
		if r.soon == nil && s.isBusy() {
			r.soon = s.collaborators.Clock.After(readSoon)
		}
		e := r.accounts.read(ctx)
		if s.hasForeign() {
			r.accounts.readOthers(ctx, &e)
		}
		now := s.collaborators.Clock.Now()
		outdated := s.drop(e, now)
		if r.pacing.due(now, outdated && waits) {
			s.sendAgain()
		}
		if e.gap != "" {
			r.lookIn(checkLater)
		}
		if !waits && s.hasForeign() {
			s.mayDepart()
		}
	}
}

// A reader knows when dropDeparting reads the accounts.
type reader struct {
	set         *Set
	accounts    accounts
	pacing      resendPacing
	tick        <-chan time.Time // nil while nothing departs, so as not to wake an idle process
	pause       time.Duration    // before tick
	soon        <-chan time.Time // after kubelet gave away a departing device
	look        <-chan time.Time // after kubelet or another plugin came or went
	due         time.Time        // of look
	came, moved <-chan struct{}

	ticked, looks bool // what the last wait ended with: tick, look
}

func (s *Set) newReader() *reader {
	r := &reader{set: s, accounts: accounts{Collaborators: s.collaborators}}
	_, r.came = s.collaborators.Incarnation.Latest()
	_, r.moved = s.collaborators.Sockets.Latest()
	r.lookIn(readInterval)
	return r
}

// lookIn sets when the accounts are read at the latest, also if nothing departs.
func (r *reader) lookIn(d time.Duration) {
	c := r.set.collaborators.Clock
	if at := c.Now().Add(d); r.look == nil || at.Before(r.due) {
		r.look, r.due = c.After(d), at
	}
}

// tickIn sets when the accounts are read next. A longer pause that has begun ends: units were given
// or came back since.
func (r *reader) tickIn(d time.Duration) {
	if r.tick == nil || d < r.pause {
		r.tick, r.pause = r.set.collaborators.Clock.After(d), d
	}
}

// await waits until there is something to do. It reports false if ctx ended.
func (r *reader) await(ctx context.Context) bool {
	r.ticked, r.looks = false, false
	select {
	case <-ctx.Done():
		return false
	case <-r.set.departed:
	case <-r.soon:
		r.soon = nil
	case <-r.tick:
		r.ticked, r.tick = true, nil
	case <-r.came:
		_, r.came = r.set.collaborators.Incarnation.Latest()
		r.lookIn(readInterval)
	case <-r.moved:
		_, r.moved = r.set.collaborators.Sockets.Latest()
		r.lookIn(readInterval)
	case <-r.look:
		r.looks, r.look = true, nil
	}
	return true
}

// sendAgain sends all lists again: kubelet writes its checkpoint then.
func (s *Set) sendAgain() {
	for _, l := range s.lists() {
		l.again.Publish(l.again.Value() + 1)
	}
}

// hasForeign reports whether kubelet has devices under resources that this Set does not serve and
// may have to.
func (s *Set) hasForeign() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.told.foreign) > 0
}

// waits reports whether new evidence is waited for, and whether servers are to end with the next
// tick. With a tick, it ends the servers of retired resources without devices, once the empty list
// was sent: kubelet has it by the next tick.
func (s *Set) waits(ticked bool) (waits, ending bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	waits = len(s.told.foreign) > 0
	for _, entry := range s.resources {
		departs, ended := entry.list.leaving()
		unsent := entry.phase == PhaseServing && entry.list.last.Load() != entry.list.views.Value().response
		// On kubelet up to 1.36, the end of our stream would end the service of another plugin.
		yields := entry.phase == PhaseYielding || entry.phase == PhaseForeign
		if ended && ticked && !unsent && !yields && entry.stop != nil {
			entry.stop()
		}
		waits, ending = waits || departs || entry.list.units.used > 0 || len(entry.list.units.given) > 0, ending || ended
	}
	if !waits {
		counted := s.told.silence.counts()
		if s.told.silence = (lasting{}); counted {
			s.refresh()
		}
	}
	return waits, ending
}

// isBusy reports whether kubelet gave away a departing device a short time ago.
func (s *Set) isBusy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.collaborators.Clock.Since(s.regiven) < freeFor
}

// drop takes in new evidence, and reports whether kubelet's checkpoint may be outdated.
func (s *Set) drop(e evidence, now time.Time) (outdated bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	outdated, changed := s.update(e, now)
	changed = changed || s.waiting.over(now) || s.forms.drain.due(now) ||
		s.forms.drain.next != "" && s.waiting.since.IsZero()
	changed = changed || !s.forms.grows.IsZero() && !now.Before(s.forms.grows)
	for _, entry := range s.resources {
		o, c := entry.list.drop(e, s.told.silence.counts())
		outdated, changed = outdated || o, changed || c
		o, c = s.seeUnits(entry.list, e)
		outdated, changed = outdated || o, changed || c
	}
	if changed {
		s.refresh()
	}
	return outdated
}

// resendPacing limits how often lists are sent again. The zero value is ready.
type resendPacing struct {
	last  time.Time
	pause time.Duration // after last
}

// due reports whether lists are to be sent again now, given that the checkpoint is outdated or not.
func (p *resendPacing) due(now time.Time, outdated bool) bool {
	if !outdated {
		p.pause = 0
		return false
	}
	if now.Sub(p.last) < p.pause {
		return false
	}
	p.last, p.pause = now, min(max(2*p.pause, resendSoon), resendLater)
	return true
}

func (s *Set) lists() []*list {
	s.mu.Lock()
	defer s.mu.Unlock()
	var lists []*list
	for _, entry := range s.resources {
		lists = append(lists, entry.list)
	}
	return lists
}

// forget removes a retired resource from the Set, unless the plan has it again, and reports whether
// it did.
func (s *Set) forget(ctx context.Context, entry *served) bool {
	s.mu.Lock()
	_, ended := entry.list.leaving()
	if ended {
		delete(s.resources, entry.list.name)
	}
	s.mu.Unlock()
	if ended {
		klog.FromContext(ctx).Info("Resource retired")
	}
	return ended
}
