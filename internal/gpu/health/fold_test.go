package health_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// story is one GPU, what is known of it, and a clock: tests tell what happens and ask what follows.
type story struct {
	t      *testing.T
	policy health.Policy
	facts  health.Facts
	now    time.Time
	gpu    health.GPU
	good   inventory.Reading // what the GPU answers when nothing is wrong
}

// begin begins a story on a driver branch with a GPU that was read once and is Healthy.
func begin(t *testing.T, branch int) *story {
	t.Helper()
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := &story{t: t, policy: health.Default(), now: now, gpu: health.GPU{UUID: "GPU-0"},
		facts: health.Facts{Branch: branch, Opened: now}}
	if branch >= 565 {
		s.good.RecoveryAction = inventory.Known(inventory.RecoveryNone)
	}
	s.read(s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
	return s
}

func (s *story) wait(d time.Duration) {
	s.now = s.now.Add(d)
	s.gpu = s.policy.FoldTime(s.gpu, s.now)
}

func (s *story) read(r inventory.Reading) { s.gpu = s.policy.FoldReading(s.gpu, r, s.facts, s.now) }

// reads reads the GPU n times, five seconds apart, the first time after five seconds.
func (s *story) reads(n int, r inventory.Reading) {
	for range n {
		s.wait(5 * time.Second)
		s.read(r)
	}
}

func (s *story) xid(code uint64) {
	s.event(inventory.Event{Kind: inventory.EventXID, XID: code, GI: inventory.Unattributed,
		CI: inventory.Unattributed})
}

func (s *story) event(e inventory.Event) {
	s.gpu, _ = s.policy.FoldEvent(s.gpu, e, s.facts, s.now)
}

// reopen opens a new session.
func (s *story) reopen() {
	s.wait(time.Millisecond)
	s.facts.Opened = s.now
}

func (s *story) want(state inventory.State, remedy inventory.Remedy) {
	s.t.Helper()
	h := s.gpu.Health
	if h.State != state || h.Remedy != remedy {
		s.t.Fatalf("%v (remedy %q, %s), want %v (remedy %q)", h.State, h.Remedy, h.Reason, state, remedy)
	}
	s.sane(h)
}

// sane fails unless a verdict says why, if it is not good, in a sentence.
func (s *story) sane(h inventory.Health) {
	s.t.Helper()
	good := h.State == inventory.Healthy
	if (h.Reason == "") != good || (h.Remedy == inventory.NoRemedy) != good || strings.HasSuffix(h.Reason, ".") {
		s.t.Fatalf("%v has the reason %q and the remedy %q", h.State, h.Reason, h.Remedy)
	}
	if h.Since.IsZero() || h.Since.After(s.now) {
		s.t.Fatalf("%v since %v, and it is %v", h.State, h.Since, s.now)
	}
}

func asking(a inventory.RecoveryAction) inventory.Reading {
	return inventory.Reading{RecoveryAction: inventory.Known(a)}
}

// What every XID does at once, what it comes to when the driver has nothing to say, and when it
// asks for a reset that is then done: on a driver without a recovery action and on one that has
// spoken for every linked XID.
func TestEveryXID(t *testing.T) {
	codes := []uint64{177, 999}
	for _, x := range health.Catalog() {
		codes = append(codes, x.Code)
	}
	for _, code := range codes {
		x := health.Lookup(code)
		for _, branch := range []int{535, 580} {
			t.Run(fmt.Sprintf("%d on %d", code, branch), func(t *testing.T) {
				atOnce, remedy := inventory.Unhealthy, inventory.RemedyReset
				spoken := branch == 580 && (x.CoveredFrom != 0 || x.Class == health.Decode)
				switch {
				case x.Class == health.Application || x.Class == health.Informational:
					atOnce, remedy = inventory.Healthy, inventory.NoRemedy
				case code == 79:
					atOnce, remedy = inventory.Lost, inventory.RemedyReboot
				case code == 151:
					remedy = inventory.RemedyReboot
				case x.Class == health.Hardware:
					remedy = inventory.RemedyHardware
				case spoken && x.Class == health.Decode:
					atOnce = inventory.Suspect
				}

				s := begin(t, branch)
				s.xid(code)
				s.want(atOnce, remedy)
				if got := s.gpu.Counts; len(got) != 1 || got[0].XID != code || got[0].N != 1 {
					t.Errorf("counts %+v, want XID %d once", got, code)
				}
				if atOnce != inventory.Healthy && s.gpu.Health.XID != code {
					t.Errorf("the verdict names XID %d", s.gpu.Health.XID)
				}

				// Nothing bad is read: the driver acquits the GPU if it speaks for the XID.
				acquitted := atOnce == inventory.Healthy || spoken && x.Class != health.Hardware || code == 79
				if code == 79 {
					s.reopen()
				}
				s.reads(2, s.good)
				if acquitted {
					s.want(inventory.Healthy, inventory.NoRemedy)
				} else {
					s.want(atOnce, remedy)
					s.reads(100, s.good)
					s.want(atOnce, remedy)
				}
				if branch < 565 {
					return
				}

				// The driver asks for each of its actions, and later for none.
				for action, want := range map[inventory.RecoveryAction]inventory.Remedy{
					inventory.RecoveryGPUReset:      inventory.RemedyReset,
					inventory.RecoveryNodeReboot:    inventory.RemedyReboot,
					inventory.RecoveryDrainP2P:      inventory.RemedyDrainP2P,
					inventory.RecoveryDrainAndReset: inventory.RemedyDrain,
					inventory.RecoveryIMEXDomain:    inventory.RemedyIMEX,
					inventory.RecoveryBusReset:      inventory.RemedyReset,
					inventory.RecoverySystemReboot:  inventory.RemedyReboot,
					inventory.RecoveryAction(99):    inventory.RemedyHuman,
				} {
					s := begin(t, branch)
					s.policy.IMEXGates = true
					s.xid(code)
					s.reads(3, asking(action))
					if s.gpu.Health.Allocatable() {
						t.Fatalf("allocatable while the driver asks for %v", action)
					}
					if h := s.gpu.Health; atOnce == inventory.Healthy && (h.State != inventory.Unhealthy ||
						h.Remedy != want) {
						t.Fatalf("%v (remedy %q) while the driver asks for %v, want remedy %q", h.State, h.Remedy,
							action, want)
					}
					s.reopen()
					s.reads(2, s.good)
					s.sane(s.gpu.Health)
					// Only these two remedies reset the GPU.
					reset := want == inventory.RemedyReset || want == inventory.RemedyDrain
					stays := want == inventory.RemedyReboot || !acquitted && !reset ||
						x.Class == health.Hardware && code != 79 || code == 151
					if healthy := s.gpu.Health.State == inventory.Healthy; healthy == stays {
						t.Fatalf("%v (%s) after %v was done", s.gpu.Health.State, s.gpu.Health.Reason, action)
					}
				}
			})
		}
	}
}

// TestReasonOfAnActionNamesItsXID: the driver tells of an error by an event and by the recovery
// action, and either may be read first.
func TestReasonOfAnActionNamesItsXID(t *testing.T) {
	reset := asking(inventory.RecoveryGPUReset)
	for name, happens := range map[string]func(*story){
		"the event is read first":       func(s *story) { s.xid(48); s.read(reset) },
		"the action is read first":      func(s *story) { s.read(reset); s.xid(48) },
		"a later event does not matter": func(s *story) { s.xid(48); s.read(reset); s.xid(63); s.xid(95) },
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			happens(s)
			s.want(inventory.Unhealthy, inventory.RemedyReset)
			if h := s.gpu.Health; h.XID != 48 || !strings.HasPrefix(h.Reason, "XID 48 (double-bit ECC error): ") {
				t.Errorf("XID %d, %q, want a reason that begins with XID 48", h.XID, h.Reason)
			}
			s.reads(3, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

// TestCountsThatTheDaemonClearedAreNoEvidence: of a reset, which would acquit a GPU that has none
// behind it; nor of new errors.
func TestCountsThatTheDaemonClearedAreNoEvidence(t *testing.T) {
	s := begin(t, 580)
	s.good.UncorrectedECC = inventory.Known(uint64(2))
	s.reads(1, s.good)
	s.xid(119)
	s.gpu = s.policy.FoldCleared(s.gpu)
	s.good.UncorrectedECC = inventory.Known(uint64(0))
	s.reads(50, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)

	s = begin(t, 580)
	s.good.UncorrectedECC = inventory.Known(uint64(2))
	s.reads(1, s.good)
	s.gpu = s.policy.FoldCleared(s.gpu)
	s.good.UncorrectedECC = inventory.Known(uint64(3)) // the driver refused
	s.reads(1, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
	s.good.UncorrectedECC = inventory.Known(uint64(5))
	s.reads(1, s.good)
	if h := s.gpu.Health; h.State != inventory.Suspect ||
		!strings.Contains(h.Reason, "2 new uncorrected memory errors") {
		t.Errorf("%v (%s) after two errors that followed, want Suspect", h.State, h.Reason)
	}
}

// The recovery action acquits a GPU of an XID from the branch on since which it speaks for it.
func TestBranchesThatSpeakForAnXID(t *testing.T) {
	for _, x := range health.Catalog() {
		if x.CoveredFrom == 0 || x.Class != health.Transient {
			continue
		}
		for _, branch := range []int{x.CoveredFrom - 1, x.CoveredFrom} {
			s := begin(t, branch)
			// Also the branch before answers, as if its recovery action covered the XID.
			s.good.RecoveryAction = inventory.Known(inventory.RecoveryNone)
			s.read(s.good)
			s.xid(x.Code)
			s.reads(10, s.good)
			if healthy := s.gpu.Health.State == inventory.Healthy; healthy != (branch == x.CoveredFrom) {
				t.Errorf("%v on branch %d: %+v", x, branch, s.gpu.Health)
			}
		}
	}
}
