package serve

import (
	"cmp"
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

// This file reads the kubelet's accounts for devices and resources that left the
// plan. Package listing decides when a list drops a device.

// adoptTimeout bounds the wait for PodResources before the first registration if the checkpoint
// cannot be read. It is short because pods admitted before the registration fail.
const adoptTimeout = time.Second

// adopt adds to the list, as retiring, the devices of the resource that the kubelet knows and the
// plan lacks. An earlier process listed them, or a process that is about to end. adopt is called
// before each registration. The checkpoint has all such devices. If the checkpoint cannot be read,
// adopt asks PodResources, before the first registration only.
func (s *Servers) adopt(ctx context.Context, entry *servedResource) {
	s.mu.Lock()
	first := !entry.adopted
	entry.adopted = true
	s.mu.Unlock()
	checkpoint, err := s.collaborators.Checkpoint()
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read the kubelet's checkpoint", "reason", err.Error())
		if !first {
			return
		}
		checkpoint = s.askPodResources(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := entry.list.name
	if s.decide(s.listing.Adopt(name, accountOf(checkpoint).Known(name), s.holders, s.collaborators.Clock.Now())) {
		s.wakeReaper()
	}
}

// askPodResources returns the answers of PodResources in the form of a checkpoint.
// The result may be incomplete.
func (s *Servers) askPodResources(ctx context.Context) kubelet.Checkpoint {
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
		klog.FromContext(ctx).V(2).Info("Cannot ask the kubelet for the devices of the resource", "reason", err.Error())
	}
	return kubelet.Checkpoint{Healthy: healthy, Held: held}
}

// readSoon is how often the accounts are read after the kubelet allocated a retiring device. On a
// node without a free device, the next pod gets a device moments after the last pod ended. The
// device changes its form only if a reading finds it free in between.
const readSoon = 100 * time.Millisecond

// runReaper drops retiring devices held by no pod, and stops the servers of retired
// resources without devices.
//
// The checkpoint may name pods that have ended, because the kubelet does not write
// its checkpoint when a pod ends. The kubelet writes the checkpoint when it
// receives a list. So the lists are sent again while only the checkpoint names the
// pod of a device, and while the checkpoint cannot be read.
//
// While no device is retiring, the accounts are read after the kubelet or another
// plugin starts or stops, because pods may hold devices without a server.
func (s *Servers) runReaper(ctx context.Context) error {
	r := s.newAccountPoller()
	for {
		if !r.await(ctx) {
			return nil
		}
		waits, pause := s.waits(r.tickDue)
		if pause > 0 {
			r.tickIn(pause)
		}
		if !waits && !r.lookDue {
			continue
		}
		if r.soon == nil && s.isBusy() {
			r.soon = s.collaborators.Clock.After(readSoon)
		}
		e := r.accounts.read(ctx)
		if s.hasUnserved() {
			r.accounts.readOthers(ctx, &e)
		}
		now := s.collaborators.Clock.Now()
		outdated := s.drop(e, now)
		if r.pacing.Due(now, outdated && waits) {
			s.sendAgain()
		}
		if e.UnknownBecause != "" {
			r.lookIn(listing.CompareLater)
		}
		if !waits && s.hasUnserved() {
			s.wakeReaper()
		}
	}
}

// An accountPoller decides when runReaper reads the accounts.
type accountPoller struct {
	set                            *Servers
	accounts                       accounts
	pacing                         listing.ResendPacing
	tick                           <-chan time.Time // nil while nothing departs, so as not to wake an idle process
	pause                          time.Duration    // before tick
	soon                           <-chan time.Time // after the kubelet gave away a retiring device
	look                           <-chan time.Time // after the kubelet or another plugin came or went
	lookAt                         time.Time        // of look
	kubeletChanged, socketsChanged <-chan struct{}

	tickDue, lookDue bool // what the last wait ended with: tick, look
}

func (s *Servers) newAccountPoller() *accountPoller {
	r := &accountPoller{set: s, accounts: accounts{Collaborators: s.collaborators}}
	_, r.kubeletChanged = s.collaborators.Incarnation.Latest()
	_, r.socketsChanged = s.collaborators.Sockets.Latest()
	r.lookIn(listing.ReadInterval)
	return r
}

// lookIn sets the latest time of the next reading, even if no device is retiring.
func (r *accountPoller) lookIn(d time.Duration) {
	c := r.set.collaborators.Clock
	if at := c.Now().Add(d); r.look == nil || at.Before(r.lookAt) {
		r.look, r.lookAt = c.After(d), at
	}
}

// tickIn sets the time of the next reading. It shortens a longer pause that has
// begun, because units were allocated or released since.
func (r *accountPoller) tickIn(d time.Duration) {
	if r.tick == nil || d < r.pause {
		r.tick, r.pause = r.set.collaborators.Clock.After(d), d
	}
}

// await waits for the next work. It returns false if ctx ends.
func (r *accountPoller) await(ctx context.Context) bool {
	r.tickDue, r.lookDue = false, false
	select {
	case <-ctx.Done():
		return false
	case <-r.set.reaperWoken:
	case <-r.soon:
		r.soon = nil
	case <-r.tick:
		r.tickDue, r.tick = true, nil
	case <-r.kubeletChanged:
		_, r.kubeletChanged = r.set.collaborators.Incarnation.Latest()
		r.lookIn(listing.ReadInterval)
	case <-r.socketsChanged:
		_, r.socketsChanged = r.set.collaborators.Sockets.Latest()
		r.lookIn(listing.ReadInterval)
	case <-r.look:
		r.lookDue, r.look = true, nil
	}
	return true
}

// sendAgain sends all lists again, so that the kubelet writes its checkpoint.
func (s *Servers) sendAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, entry := range s.resources {
		entry.list.resend.Publish(entry.list.resend.Value() + 1)
	}
}

// hasUnserved reports whether the kubelet has devices of resources that this
// process does not serve and may have to serve.
func (s *Servers) hasUnserved() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listing.HasUnserved()
}

// waits reports whether new evidence is awaited. pause is the pause until the next tick; 0 if
// neither evidence is awaited nor servers will stop. With a tick, waits stops the servers of retired
// resources without devices once the empty list was sent: the kubelet has received the list by the
// next tick.
func (s *Servers) waits(ticked bool) (waits bool, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, entry := range s.resources {
		ended := s.hasEnded(entry)
		unsent := entry.phase == PhaseServing && entry.list.last.Load() != entry.list.views.Value().response
		// With a kubelet up to 1.36, the end of this stream would end the service
		// of another plugin.
		yields := entry.phase == PhaseYielding || entry.phase == PhaseOtherPlugin
		if ended && ticked && !unsent && !yields && entry.stop != nil {
			entry.stop()
		}
		if ended {
			pause = listing.ReadInterval
		}
	}
	now := s.collaborators.Clock.Now()
	waits = s.listing.Awaits(s.holders)
	switch {
	case waits && pause == 0:
		pause = s.listing.Pause(now)
	case !waits && s.holders.EndSilence():
		s.decide(s.listing.Again(s.holders, now))
	}
	return waits, pause
}

// hasEnded reports whether a resource has left the plan and none of its devices is listed.
func (s *Servers) hasEnded(entry *servedResource) bool {
	return entry.retired && !s.listing.HasRetiring(entry.list.name)
}

// isBusy reports whether the kubelet allocated a retiring device a short time ago.
func (s *Servers) isBusy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listing.IsBusy(s.collaborators.Clock.Now())
}

// drop applies a reading of the accounts, and reports whether the kubelet's
// checkpoint may be outdated.
func (s *Servers) drop(r listing.Reading, now time.Time) (outdated bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next, outdated := s.listing.Read(r, s.holders, now)
	s.decide(next)
	return outdated
}

// forget removes a retired resource from Servers unless the plan has the resource
// again. It reports whether the resource was removed.
func (s *Servers) forget(ctx context.Context, entry *servedResource) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.hasEnded(entry) {
		return false
	}
	delete(s.resources, entry.list.name)
	s.decide(s.listing.Remove(entry.list.name))
	klog.FromContext(ctx).Info("Resource retired")
	return true
}
