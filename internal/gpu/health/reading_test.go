package health_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// What each reading makes of a good GPU, and whether good readings in a new session make it Healthy
// again.
func TestReadings(t *testing.T) {
	fabric := func(f inventory.Fabric) inventory.Reading { return inventory.Reading{Fabric: inventory.Known(f)} }
	const completed = inventory.FabricCompleted
	tests := map[string]struct {
		reading inventory.Reading
		state   inventory.State
		remedy  inventory.Remedy
		stays   bool
	}{
		"nothing known": {inventory.Reading{}, inventory.Healthy, inventory.NoRemedy, false},
		"nothing wrong": {asking(inventory.RecoveryNone), inventory.Healthy, inventory.NoRemedy, false},
		"remap pending": {inventory.Reading{RowRemapPending: inventory.Known(true)}, inventory.Healthy,
			inventory.NoRemedy, false},
		"remap fine": {inventory.Reading{RowRemapFailure: inventory.Known(false)}, inventory.Healthy,
			inventory.NoRemedy, false},
		"remap failure": {inventory.Reading{RowRemapFailure: inventory.Known(true)}, inventory.Unhealthy,
			inventory.RemedyHardware, true},
		"unrepairable": {inventory.Reading{UnrepairableMemory: inventory.Known(true)}, inventory.Unhealthy,
			inventory.RemedyHardware, true},
		"errors of old": {inventory.Reading{UncorrectedECC: inventory.Known(uint64(7))}, inventory.Healthy,
			inventory.NoRemedy, false},
		"lost": {inventory.Reading{Contact: inventory.ContactLost}, inventory.Lost, inventory.RemedyReboot, false},
		"reset required": {inventory.Reading{Contact: inventory.ContactResetRequired}, inventory.Unhealthy,
			inventory.RemedyReset, false},
		"failing": {inventory.Reading{Contact: inventory.ContactFailing}, inventory.Suspect, inventory.RemedyReset,
			false},
		"fabric completed": {fabric(inventory.Fabric{State: completed}), inventory.Healthy, inventory.NoRemedy, false},
		"fabric healthy": {
			fabric(inventory.Fabric{State: completed, Summary: inventory.FabricSummaryHealthy}),
			inventory.Healthy, inventory.NoRemedy, false,
		},
		"fabric limited": {
			fabric(inventory.Fabric{State: completed, Summary: inventory.FabricSummaryLimitedCapacity}),
			inventory.Healthy, inventory.NoRemedy, false,
		},
		"fabric not started": {fabric(inventory.Fabric{State: inventory.FabricNotStarted}), inventory.Unhealthy,
			inventory.RemedyFabric, false},
		"fabric in progress": {fabric(inventory.Fabric{State: inventory.FabricInProgress}), inventory.Unhealthy,
			inventory.RemedyFabric, false},
		"fabric failed": {fabric(inventory.Fabric{State: completed, Status: 999}), inventory.Unhealthy,
			inventory.RemedyFabric, false},
		"fabric faults": {
			fabric(inventory.Fabric{State: completed, Faults: inventory.FabricRouteUnhealthy}),
			inventory.Unhealthy, inventory.RemedyFabric, false,
		},
		"fabric unhealthy": {
			fabric(inventory.Fabric{State: completed, Summary: inventory.FabricSummaryUnhealthy}),
			inventory.Unhealthy, inventory.RemedyFabric, false,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.wait(time.Second)
			s.read(tt.reading)
			s.want(tt.state, tt.remedy)
			s.reopen()
			s.reads(1, s.good)
			if tt.state == inventory.Unhealthy || tt.state == inventory.Lost {
				s.want(tt.state, tt.remedy) // one pass is not enough
			}
			s.reads(1, s.good)
			if tt.stays {
				s.want(tt.state, tt.remedy)
				s.gpu, _ = s.policy.Clear(s.gpu, "GPU-0", s.now)
			}
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

// A GPU without a part in the fabric of its machine may be told as one that is not up: an operator
// knows.
func TestFabricThatIsOnlyReported(t *testing.T) {
	s := begin(t, 580)
	bad := s.good
	bad.Fabric = inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})
	s.reads(1, bad)
	s.want(inventory.Unhealthy, inventory.RemedyFabric)
	s.policy.FabricReported = true
	s.reads(2, bad)
	s.want(inventory.Healthy, inventory.NoRemedy)
	if s.gpu.Reading.Fabric != bad.Fabric {
		t.Errorf("the fabric is kept as %+v", s.gpu.Reading.Fabric)
	}
}

func TestNewMemoryErrorsAreSuspectWhereTheDriverHasAVerdict(t *testing.T) {
	for branch, want := range map[int]inventory.State{580: inventory.Suspect, 535: inventory.Healthy} {
		s := begin(t, branch)
		s.good.UncorrectedECC = inventory.Known(uint64(3))
		s.reads(1, s.good)
		s.good.UncorrectedECC = inventory.Known(uint64(5))
		s.reads(1, s.good)
		if got := s.gpu.Health.State; got != want {
			t.Errorf("on branch %d: %v, want %v", branch, got, want)
		}
		for range 2 { // one second apart, as while a verdict is being waited for
			s.wait(time.Second)
			s.read(s.good)
		}
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
}

// A GPU that answered that it is lost, and answers again, needs no new session, unless something
// else is wrong with it that does.
func TestALostGPUThatAnswersAgain(t *testing.T) {
	s := begin(t, 580)
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.want(inventory.Lost, inventory.RemedyReboot)
	s.reads(1, s.good)
	s.want(inventory.Lost, inventory.RemedyReboot)
	if _, wants := s.policy.WantsSession(s.gpu, s.facts); wants {
		t.Error("it wants another session although it answers")
	}
	s.reads(1, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
	for range 3 { // and only so often
		s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
		s.reads(2, s.good)
	}
	s.want(inventory.Unhealthy, inventory.RemedyHuman)
}

func TestHandlesFromBeforeTheLossProveNothing(t *testing.T) {
	for name, first := range map[string]func(*story){
		"lost after XID 79":  func(s *story) { s.xid(79) },
		"lost after XID 119": func(s *story) { s.xid(119) },
		"lost after it asked for a reset": func(s *story) {
			s.reads(1, inventory.Reading{Contact: inventory.ContactResetRequired})
		},
		"the driver could not find the GPU": func(s *story) { s.gpu = s.policy.FoldAbsence(s.gpu, "x", s.now) },
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			first(s)
			r := inventory.Reading{Contact: inventory.ContactLost}
			if name == "the driver could not find the GPU" {
				r = s.good
			}
			s.reads(1, r)
			s.reads(10, s.good)
			since, wants := s.policy.WantsSession(s.gpu, s.facts)
			if s.gpu.Health.Allocatable() || !wants || since.IsZero() || !s.gpu.Answers() {
				t.Fatalf("%+v, wants a session: %v since %v", s.gpu.Health, wants, since)
			}
			s.reopen()
			s.reads(2, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

func TestOnlyEvidenceOfAResetClosesWhatTheDriverDoesNotSpeakFor(t *testing.T) {
	evidence := map[string]func(*story){
		"the driver asked for a reset and does no more": func(s *story) {
			s.reads(1, asking(inventory.RecoveryGPUReset))
		},
		"the count of errors is back at zero": func(s *story) {
			s.reads(1, inventory.Reading{UncorrectedECC: inventory.Known(uint64(2)),
				RecoveryAction: s.good.RecoveryAction})
			s.good.UncorrectedECC = inventory.Known(uint64(0))
		},
		"the GPU was gone": func(s *story) { s.gpu = s.policy.FoldReset(s.gpu, s.now) },
		"the GPU was lost and is back": func(s *story) {
			s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
			s.reopen()
		},
		"the GPU was lost and answered in the old session first": func(s *story) {
			s.reads(1, inventory.Reading{Contact: inventory.ContactResetRequired})
			s.reads(3, s.good)
			s.reopen()
		},
	}
	for name, happen := range evidence {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.xid(119)
			s.reads(50, s.good)
			s.want(inventory.Unhealthy, inventory.RemedyReset)
			happen(s)
			s.reads(1, s.good)
			if s.gpu.Health.Allocatable() {
				t.Fatal("one pass was enough")
			}
			s.reads(2, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

// Other recovery actions end without a reset: they prove none.
func TestActionsThatTakeNoResetProveNone(t *testing.T) {
	for _, action := range []inventory.RecoveryAction{
		inventory.RecoveryDrainP2P, inventory.RecoveryIMEXDomain, inventory.RecoveryAction(99),
	} {
		t.Run(action.String(), func(t *testing.T) {
			s := begin(t, 580)
			s.xid(119)
			s.reads(2, asking(action))
			s.reads(50, s.good)
			s.want(inventory.Unhealthy, inventory.RemedyReset)

			// A reset was done if the driver asks for less now.
			s.reads(1, asking(inventory.RecoveryGPUReset))
			s.reads(1, asking(action))
			s.reads(2, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

func TestWhatAnEventSaidStandsWhileTheDriverAsksForSomething(t *testing.T) {
	s := begin(t, 580)
	s.xid(48)
	s.reads(10, asking(inventory.RecoveryGPUReset))
	if f := s.gpu.Faults; len(f) != 2 || f[0].XID != 48 || f[1].Source != health.SourceAction {
		t.Errorf("faults %+v, want the XID and the recovery action", f)
	}
	if s.gpu.Health.XID != 48 {
		t.Errorf("the verdict names XID %d", s.gpu.Health.XID)
	}
}

func TestSinceIsWhenTheStateWasEntered(t *testing.T) {
	s := begin(t, 580)
	s.wait(time.Hour)
	struck := s.now
	s.xid(119)
	s.reads(3, s.good)
	s.xid(119)
	s.xid(46)
	if f := s.gpu.Faults; !s.gpu.Health.Since.Equal(struck) || !f[0].Since.Equal(struck) ||
		!f[0].LastSeen.Equal(s.now) || !f[1].Since.Equal(s.now) {
		t.Errorf("struck at %v: %+v", struck, s.gpu.Device)
	}
	s.wait(time.Hour)
	s.gpu, _ = s.policy.Clear(s.gpu, "GPU-0", s.now)
	if !s.gpu.Health.Since.Equal(s.now) {
		t.Errorf("cleared at %v: %+v", s.now, s.gpu.Health)
	}
}

func TestLostGPUAndItsMIGDevicesRecoverTogether(t *testing.T) {
	s := begin(t, 580)
	s.xid(119)
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.reopen()
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

func TestSuspicionRunsOut(t *testing.T) {
	s := begin(t, 580)
	s.xid(154)
	s.want(inventory.Suspect, inventory.RemedyReset)
	if limit := s.gpu.Limit(); !limit.Equal(s.now.Add(5 * time.Second)) {
		t.Errorf("limit %v, want 5 s from now", limit)
	}
	s.wait(5*time.Second - 1)
	s.want(inventory.Suspect, inventory.RemedyReset)
	s.xid(154) // again: no new limit
	s.wait(1)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.xid(154) // nor milder
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

func TestSilenceHasAGraceAndIsOverWithTheFirstAnswer(t *testing.T) {
	s := begin(t, 580)
	s.gpu = s.policy.FoldSilence(s.gpu, "the driver hangs", s.now)
	s.want(inventory.Unknown, inventory.RemedyHuman)
	if !s.gpu.Health.Allocatable() {
		t.Error("no grace")
	}
	s.wait(9 * time.Second)
	s.gpu = s.policy.FoldSilence(s.gpu, "the driver hangs", s.now) // again: no new grace
	s.wait(time.Second)
	s.want(inventory.Unknown, inventory.RemedyHuman)
	if s.gpu.Health.Allocatable() {
		t.Error("the grace lasts")
	}
	s.read(s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)

	never := s.policy.FoldSilence(health.GPU{UUID: "GPU-1"}, "the driver hangs", s.now)
	if never.Health.Allocatable() {
		t.Error("a GPU that never answered has a grace")
	}
}

func TestMIGDevicesThatCannotBeReadAreCleared(t *testing.T) {
	mig := []inventory.MIGDevice{{UUID: "MIG-1", GI: 1}, {UUID: "MIG-2", GI: 2}}
	for _, cleared := range []string{"GPU-0", "MIG-2"} {
		s := begin(t, 580)
		s.gpu = s.gpu.WithScan(inventory.GPU{MIGDevices: mig}, false, s.now)
		s.event(inventory.Event{Kind: inventory.EventXID, XID: 119, GI: 2, CI: inventory.Unattributed})
		s.gpu = s.gpu.WithScan(inventory.GPU{MIGDevices: mig[:1]}, true, s.now)
		if len(s.gpu.Instances) != 1 || len(s.gpu.Unread) != 1 || !s.gpu.HasLedgerEntries() {
			t.Fatalf("%+v", s.gpu)
		}
		if _, ok := s.policy.Clear(s.gpu, "MIG-3", s.now); ok {
			t.Error("a MIG device that nobody knows was cleared")
		}
		s.gpu, _ = s.policy.Clear(s.gpu, cleared, s.now)
		s.gpu = s.gpu.WithScan(inventory.GPU{MIGDevices: mig}, false, s.now)
		if h := s.gpu.Instances[1].Health; h.State != inventory.Healthy || s.gpu.HasLedgerEntries() {
			t.Errorf("after %s was cleared: %+v", cleared, h)
		}
	}
}

func TestSilenceDoesNotHideWhatIsWorse(t *testing.T) {
	s := begin(t, 580)
	s.xid(119)
	s.gpu = s.policy.FoldSilence(s.gpu, "the driver hangs", s.now)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.read(s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
}

func TestFlapping(t *testing.T) {
	s := begin(t, 580)
	strike := func() {
		s.reads(1, asking(inventory.RecoveryGPUReset))
		s.want(inventory.Unhealthy, inventory.RemedyReset)
		s.reads(2, s.good)
	}
	for range 3 {
		strike()
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
	strike()
	s.want(inventory.Unhealthy, inventory.RemedyHuman)
	s.reads(1000, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyHuman)
	s.gpu, _ = s.policy.Clear(s.gpu, "GPU-0", s.now)
	s.want(inventory.Healthy, inventory.NoRemedy)
	strike()
	s.want(inventory.Healthy, inventory.NoRemedy)

	for range 10 { // rare ones are believed
		s.wait(9 * time.Hour)
		strike()
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
	for range 10 { // what the driver acquits is no recovery, nor what was the fabric's
		s.xid(48)
		s.reads(2, s.good)
		s.reads(1, inventory.Reading{Fabric: inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})})
		s.reads(2, s.good)
		s.reads(1, asking(inventory.RecoveryIMEXDomain))
		s.reads(2, s.good)
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
}

func TestManualRecovery(t *testing.T) {
	s := begin(t, 580)
	s.policy.Manual = true
	s.reads(1, asking(inventory.RecoveryGPUReset))
	s.reopen()
	s.reads(100, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.gpu, _ = s.policy.Clear(s.gpu, "GPU-0", s.now)
	s.xid(154) // a suspicion is no fault yet
	s.reads(1, s.good)
	s.wait(time.Second)
	s.read(s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
}

func TestOverridesBeatTheCatalogButNotTheReadings(t *testing.T) {
	s := begin(t, 580)
	s.policy.Overrides = s.policy.Overrides.With(79, health.RuleIgnore).With(31, health.RuleFatal).With(48,
		health.RuleSuspect)
	s.xid(79)
	s.want(inventory.Healthy, inventory.NoRemedy)
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.want(inventory.Lost, inventory.RemedyReboot)
	s.reopen()
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
	s.xid(48)
	s.want(inventory.Suspect, inventory.RemedyReset)
	s.wait(time.Second)
	s.read(s.good)
	s.wait(time.Second)
	s.read(s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
	s.xid(31)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(100, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
}

func TestRebootIsNotTakenBackByTheDriver(t *testing.T) {
	s := begin(t, 580)
	s.reads(1, asking(inventory.RecoveryNodeReboot))
	s.reads(1, asking(inventory.RecoveryGPUReset))
	s.want(inventory.Unhealthy, inventory.RemedyReboot)
	s.reads(100, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReboot)
}

func TestOtherEvents(t *testing.T) {
	for kind, want := range map[inventory.EventKind]inventory.State{
		inventory.EventMIGChange: inventory.Healthy, inventory.EventSingleBitECC: inventory.Healthy,
		inventory.EventDoubleBitECC: inventory.Healthy, inventory.EventSingleBitECCStorm: inventory.Healthy,
		inventory.EventDRAMRetirement: inventory.Healthy, inventory.EventDRAMRetirementFailure: inventory.Suspect,
		inventory.EventNonFatalPoison: inventory.Suspect, inventory.EventFatalPoison: inventory.Unhealthy,
		inventory.EventUnavailable: inventory.Suspect, inventory.EventRecoveryAction: inventory.Healthy,
		inventory.EventLost: inventory.Healthy,
	} {
		t.Run(kind.String(), func(t *testing.T) {
			s := begin(t, 580)
			s.event(inventory.Event{Kind: kind, GI: inventory.Unattributed, CI: inventory.Unattributed})
			if got := s.gpu.Health.State; got != want {
				t.Errorf("%v, want %v", got, want)
			}
			if len(s.gpu.Counts) != 1 || s.gpu.Counts[0].Kind != kind {
				t.Errorf("counts %+v", s.gpu.Counts)
			}
			s.reads(2, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

// Too many errors of the chip's own memories mean nothing alone; with an XID of uncorrected errors,
// the part is used up.
func TestSRAMThresholdWithUncorrectedErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		code   uint64
		state  inventory.State
		remedy inventory.Remedy
	}{
		"no XID":            {0, inventory.Healthy, inventory.NoRemedy},
		"an application's":  {31, inventory.Healthy, inventory.NoRemedy},
		"uncorrected error": {48, inventory.Unhealthy, inventory.RemedyHardware},
		"its detail":        {172, inventory.Unhealthy, inventory.RemedyHardware},
		"another fault":     {95, inventory.Unhealthy, inventory.RemedyReset},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			bad := s.good
			bad.SRAMThreshold = inventory.Known(true)
			s.reads(1, bad)
			s.want(inventory.Healthy, inventory.NoRemedy)
			if tt.code != 0 {
				s.xid(tt.code)
			}
			s.reads(1, bad)
			if tt.remedy == inventory.RemedyHardware {
				s.want(tt.state, tt.remedy)
				s.reads(3, s.good) // also if it says otherwise later
			}
			s.want(tt.state, tt.remedy)
			s.gpu, _ = s.policy.Clear(s.gpu, "GPU-0", s.now)
			s.reads(2, bad)
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}
