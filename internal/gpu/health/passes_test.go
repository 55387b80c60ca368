package health_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A reading of a GPU that does not answer as it should is no pass for any fault.
func TestReadingsThatFailAreNoPasses(t *testing.T) {
	for _, contact := range []inventory.Contact{inventory.ContactFailing, inventory.ContactResetRequired,
		inventory.ContactLost} {
		s := begin(t, 580)
		s.xid(48)
		s.reads(10, inventory.Reading{Contact: contact})
		s.reopen()
		s.reads(1, s.good)
		if s.gpu.Faults[0].XID != 48 {
			t.Errorf("%v: %+v after one good reading, want the XID still", contact, s.gpu.Faults)
		}
		s.reads(2, s.good)
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
}

// Passes are in a row: one reading that finds the fault restarts the count.
func TestPassesAreInARow(t *testing.T) {
	s := begin(t, 580)
	bad := asking(inventory.RecoveryDrainP2P)
	s.reads(1, bad)
	for range 5 {
		s.reads(1, s.good)
		s.reads(1, bad)
	}
	s.reads(1, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyDrainP2P)
	s.reads(1, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

// A fault that readings find closes although the driver asks for something, which only faults of
// events wait for.
func TestFabricClosesWhileTheDriverAsksForSomething(t *testing.T) {
	s := begin(t, 580)
	sick := asking(inventory.RecoveryGPUReset)
	sick.Fabric = inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})
	s.reads(1, sick)
	if n := len(s.gpu.Faults); n != 2 {
		t.Fatalf("%d faults, want the action and the fabric", n)
	}
	sick.Fabric.Value.State = inventory.FabricCompleted
	s.reads(2, sick)
	if n := len(s.gpu.Faults); n != 1 || s.gpu.Faults[0].Source != health.SourceAction {
		t.Errorf("faults %+v, want the action alone", s.gpu.Faults)
	}
}

// Before the first reading the driver's branch says whether there will be a verdict to wait for.
func TestEventsBeforeTheFirstReading(t *testing.T) {
	for branch, want := range map[int]inventory.State{564: inventory.Unhealthy, 565: inventory.Suspect} {
		s := begin(t, branch)
		s.gpu = health.GPU{UUID: "GPU-0"}
		s.xid(154)
		for _, f := range s.gpu.Faults {
			if f.State != want {
				t.Errorf("on branch %d: %v, want %v", branch, f.State, want)
			}
		}
		if len(s.gpu.Faults) != 1 {
			t.Errorf("on branch %d: faults %+v", branch, s.gpu.Faults)
		}
	}
}

// A GPU that was never asked is Unknown since the moment that nobody could ask it, and not
// allocatable.
func TestSilenceOfAGPUThatWasNeverAsked(t *testing.T) {
	s := begin(t, 580)
	s.gpu = s.policy.FoldSilence(health.GPU{UUID: "GPU-0"}, "the driver hangs", s.now)
	s.want(inventory.Unknown, inventory.RemedyHuman)
	if s.gpu.Health.Allocatable() || !s.gpu.Health.Since.Equal(s.now) || !s.gpu.Limit().IsZero() {
		t.Errorf("%+v", s.gpu.Health)
	}
}

func TestWhatOutlivesARestartOfTheNode(t *testing.T) {
	for remedy, want := range map[inventory.Remedy]bool{
		inventory.RemedyHuman: true, inventory.RemedyHardware: true, inventory.RemedyReset: false,
		inventory.RemedyDrain:    false,
		inventory.RemedyDrainP2P: false, inventory.RemedyReboot: false, inventory.RemedyFabric: false,
		inventory.RemedyIMEX:      false,
		inventory.RemedyReconnect: false, inventory.NoRemedy: false,
	} {
		if got := health.OutlivesBoot(remedy); got != want {
			t.Errorf("%q outlives a restart: %v, want %v", remedy, got, want)
		}
	}
}

// A pass of a fault that an event opened counts no more once a reading was none.
func TestPassesOfAnXIDAreInARow(t *testing.T) {
	for name, bad := range map[string]inventory.Reading{
		"calls fail": {Contact: inventory.ContactFailing}, "the driver asks": asking(inventory.RecoveryDrainP2P),
	} {
		s := begin(t, 580)
		s.xid(48)
		s.reads(1, s.good)
		s.reads(1, bad)
		s.reads(1, s.good)
		if len(s.gpu.Faults) == 0 || s.gpu.Faults[0].XID != 48 {
			t.Errorf("%s: faults %+v after passes that were not in a row", name, s.gpu.Faults)
		}
		s.reads(2, s.good)
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
}

// Passes that follow one another too fast prove little: a recovery has to last.
func TestPassesTakeTime(t *testing.T) {
	s := begin(t, 580)
	s.reads(1, asking(inventory.RecoveryGPUReset))
	s.read(s.good)
	for range 2 {
		s.wait(time.Second)
		s.read(s.good)
	}
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.wait(time.Second)
	s.read(s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

func TestDefaultPolicy(t *testing.T) {
	want := health.Policy{
		Interval: 4 * time.Second, SuspectLimit: 5 * time.Second, UnknownGrace: 10 * time.Second, Passes: 2,
		SuspectSettle: time.Second, Settle: 3 * time.Second,
		FlapLimit: 3, FlapWindow: 24 * time.Hour,
	}
	if diff := cmp.Diff(want, health.Default()); diff != "" {
		t.Errorf("policy (-want +got):\n%s", diff)
	}
}

// Only a new session can tell of a GPU that was lost, wanted a reset or failed its calls in this
// one.
func TestWhoWantsASession(t *testing.T) {
	for name, tt := range map[string]struct {
		reading inventory.Reading
		xid     uint64
		wants   bool
	}{
		"lost":           {inventory.Reading{Contact: inventory.ContactLost}, 0, true},
		"reset required": {inventory.Reading{Contact: inventory.ContactResetRequired}, 0, true},
		"calls fail":     {inventory.Reading{Contact: inventory.ContactFailing}, 0, true},
		"XID 79":         {inventory.Reading{RecoveryAction: inventory.Known(inventory.RecoveryNone)}, 79, true},
		"XID 119":        {inventory.Reading{RecoveryAction: inventory.Known(inventory.RecoveryNone)}, 119, false},
		"action":         {asking(inventory.RecoveryGPUReset), 0, false},
		"good":           {inventory.Reading{RecoveryAction: inventory.Known(inventory.RecoveryNone)}, 0, false},
	} {
		s := begin(t, 580)
		s.wait(time.Second)
		struck := s.now
		if tt.xid != 0 {
			s.xid(tt.xid)
		}
		s.read(tt.reading)
		since, wants := s.policy.WantsSession(s.gpu, s.facts)
		if wants != tt.wants || wants && !since.Equal(struck) {
			t.Errorf("%s: wants a session %v since %v, want %v since %v", name, wants, since, tt.wants, struck)
		}
		s.reopen()
		if _, wants := s.policy.WantsSession(s.gpu, s.facts); wants {
			t.Errorf("%s: it wants another session than the new one", name)
		}
	}
}

// Nothing that was noted of a GPU leaves it as it was.
func TestRestoredWithoutFaults(t *testing.T) {
	s := begin(t, 580)
	nothing := func(string) ([]health.Fault, []time.Time) { return nil, nil }
	if g := (health.GPU{UUID: "GPU-0"}).WithRestored(nothing, s.now); g.Health != (inventory.Health{}) {
		t.Errorf("%+v of a GPU that nobody has asked", g.Health)
	}
	before := s.gpu.Health
	if g := s.gpu.WithRestored(nothing, s.now.Add(time.Hour)); g.Health != before {
		t.Errorf("%+v, want %+v", g.Health, before)
	}
}

// Where the recovery action cannot be read, as may be on a guest, a new driver acquits nobody.
func TestActionThatCannotBeRead(t *testing.T) {
	s := begin(t, 580)
	s.good.RecoveryAction = inventory.Signal[inventory.RecoveryAction]{}
	s.read(s.good)
	s.xid(48)
	s.reads(20, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)

	s = begin(t, 580) // nor is it evidence that what was asked for cannot be read any more
	s.xid(119)
	s.reads(1, asking(inventory.RecoveryGPUReset))
	s.reads(5, inventory.Reading{})
	if len(s.gpu.Faults) != 1 || s.gpu.Faults[0].XID != 119 {
		t.Errorf("faults %+v, want the XID", s.gpu.Faults)
	}
}

// Faults of other events close as those of XIDs do: by NONE, or by evidence of a reset where nobody
// says NONE.
func TestOtherEventsWithoutAnAction(t *testing.T) {
	for _, kind := range []inventory.EventKind{
		inventory.EventFatalPoison, inventory.EventNonFatalPoison, inventory.EventDRAMRetirementFailure,
		inventory.EventUnavailable,
	} {
		s := begin(t, 580)
		s.see(inventory.GPU{Architecture: "turing"})
		s.event(inventory.Event{Kind: kind, GI: inventory.Unattributed, CI: inventory.Unattributed})
		s.wait(time.Minute) // the suspicion runs out
		s.reads(10, s.good)
		if s.gpu.Health.State != inventory.Unhealthy {
			t.Errorf("%v: %+v without evidence of a reset", kind, s.gpu.Health)
		}
		s.wait(1)
		s.gpu = s.policy.FoldReset(s.gpu, s.now)
		s.reads(3, s.good)
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
}

func TestReasonOfASuspicionThatRanOut(t *testing.T) {
	s := begin(t, 580)
	s.xid(154)
	const waiting = "XID 154 (recovery action changed): waiting for the recovery action of the driver"
	if s.gpu.Health.Reason != waiting {
		t.Errorf("reason %q, want %q", s.gpu.Health.Reason, waiting)
	}
	s.wait(5 * time.Second)
	const want = waiting + ", which did not come within 5s: stop all processes on the GPU and reset it"
	if s.gpu.Health.Reason != want {
		t.Errorf("reason %q, want %q", s.gpu.Health.Reason, want)
	}
}

// Answers tells of the last reading alone.
func TestAnswers(t *testing.T) {
	for name, after := range map[string]func(*story){
		"silence": func(s *story) { s.gpu = s.policy.FoldSilence(s.gpu, "it hangs", s.now) },
		"absence": func(s *story) { s.gpu = s.policy.FoldAbsence(s.gpu, "unknown error", s.now) },
		"hang":    func(s *story) { s.gpu = s.hang(s.now) },
		"failing": func(s *story) { s.read(inventory.Reading{Contact: inventory.ContactFailing}) },
	} {
		s := begin(t, 580)
		if !s.gpu.Answers() {
			t.Error("a GPU that answered does not")
		}
		after(s)
		if s.gpu.Answers() {
			t.Errorf("after %s the GPU is said to answer", name)
		}
		s.read(s.good)
		if !s.gpu.Answers() {
			t.Errorf("after %s the GPU that answers does not", name)
		}
	}
}

// An operator who recovers GPUs by hand is not asked about suspicions that the driver acquits.
func TestSuspicionWithManualRecovery(t *testing.T) {
	s := begin(t, 580)
	s.policy.Manual = true
	s.xid(154)
	s.want(inventory.Suspect, inventory.RemedyReset)
	s.read(s.good)
	s.wait(time.Second)
	s.read(s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

// The first branch with a recovery action has the last word about codes that do not decide.
func TestSuspicionThatRanOutOnTheFirstBranchWithAnAction(t *testing.T) {
	s := begin(t, inventory.RecoveryActionBranch)
	s.xid(154)
	s.wait(time.Minute)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

// Restoring leaves the value that it was given alone.
func TestRestoredIsAnotherValue(t *testing.T) {
	s := begin(t, 580)
	s.see(divided(one))
	fault := []health.Fault{{Source: health.SourceXID, XID: 119, State: inventory.Unhealthy,
		Remedy: inventory.RemedyReset, Reason: "x"}}
	restored := s.gpu.WithRestored(func(uuid string) ([]health.Fault, []time.Time) {
		if uuid == one.UUID {
			return fault, nil
		}
		return nil, nil
	}, s.now)
	if s.states()[0] != inventory.Healthy || restored.Instances[0].Health.State != inventory.Unhealthy ||
		len(restored.Faults) != 0 {
		t.Errorf("before %v, restored %+v", s.states(), restored)
	}
}

// A fault that was found meanwhile stays as it was found, and others are added.
func TestRestoredBesideWhatWasFound(t *testing.T) {
	s := begin(t, 580)
	s.xid(119)
	found := s.gpu.Faults[0]
	noted := []health.Fault{
		{Source: found.Source, XID: 119, State: inventory.Unhealthy, Remedy: inventory.RemedyReboot,
			Reason: "an earlier one"},
		{Source: found.Source, XID: 79, State: inventory.Unhealthy, Remedy: inventory.RemedyReboot, Reason: "x"},
		{Source: health.SourceHang, XID: 119, State: inventory.Unhealthy, Remedy: inventory.RemedyReboot, Reason: "y"},
	}
	restored := s.gpu.WithRestored(func(string) ([]health.Fault, []time.Time) { return noted, nil }, s.now)
	var reasons []string
	for _, f := range restored.Faults {
		reasons = append(reasons, f.Reason)
	}
	if diff := cmp.Diff([]string{found.Reason, "x", "y"}, reasons); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// Each suspicion has a limit of its own.
func TestLimitsOfSeveralSuspicions(t *testing.T) {
	s := begin(t, 580)
	s.xid(154)
	s.wait(2 * time.Second)
	s.xid(160)
	states := func() (all []inventory.State) {
		for _, f := range s.gpu.Faults {
			all = append(all, f.State)
		}
		return all
	}
	const suspect, bad = inventory.Suspect, inventory.Unhealthy
	for _, want := range [][]inventory.State{{suspect, suspect}, {bad, suspect}, {bad, bad}} {
		if diff := cmp.Diff(want, states()); diff != "" {
			t.Errorf("states (-want +got):\n%s", diff)
		}
		s.wait(max(0, s.gpu.Limit().Sub(s.now)))
	}
	if limit := s.gpu.Limit(); !limit.IsZero() {
		t.Errorf("limit %v where nothing waits", limit)
	}
}

// Time alone says nothing of a GPU that nobody has asked.
func TestTimeOfAGPUThatWasNeverAsked(t *testing.T) {
	s := begin(t, 580)
	s.gpu = s.policy.FoldTime(health.GPU{UUID: "GPU-0"}, s.now)
	if s.gpu.Health != (inventory.Health{}) {
		t.Errorf("%+v", s.gpu.Health)
	}
}

// Suspect tells of the GPU and of its MIG devices.
func TestSuspect(t *testing.T) {
	s := begin(t, 580)
	s.see(divided(one))
	if s.gpu.Suspect() {
		t.Error("a Healthy GPU is said to be Suspect")
	}
	s.event(inventory.Event{Kind: inventory.EventXID, XID: 154, GI: one.GI, CI: one.CI})
	if !s.gpu.Suspect() {
		t.Error("a GPU with a Suspect MIG device is not said to be Suspect")
	}
	s.wait(time.Minute)
	if s.gpu.Suspect() {
		t.Error("an Unhealthy MIG device is said to be Suspect")
	}
}
