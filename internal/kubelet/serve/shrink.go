package serve

import "github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"

// PendingShrink returns the feed of the number of the change that removes devices and waits for
// ApproveShrink; 0 if no change waits. A change waits only with Options.AnnounceShrink, and for 30
// s at most. Unhealthy devices, and devices that the device plugin may not give, never wait.
func (s *Servers) PendingShrink() *feed.Feed[uint64] { return s.shrinkNumber }

// ApproveShrink lets the pending change proceed: the lists lose the devices. The
// number of another change has no effect.
func (s *Servers) ApproveShrink(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.decide(s.listing.Approve(number, s.holders, s.collaborators.Clock.Now())) {
		s.wakeReaper()
	}
}
