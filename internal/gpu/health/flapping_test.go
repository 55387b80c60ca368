package health_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// repair ends the faults of the GPU: a session that is newer, and good readings.
func (s *story) repair() {
	s.reopen()
	s.reads(3, s.good)
}

// What counts as a recovery, so that a GPU that comes back too often is left to an operator.
func TestWhatFlaps(t *testing.T) {
	reading := func(r inventory.Reading) func(*story) { return func(s *story) { s.reads(1, r) } }
	for name, tt := range map[string]struct {
		strike func(*story)
		flaps  bool
	}{
		"lost":              {reading(inventory.Reading{Contact: inventory.ContactLost}), true},
		"reset required":    {reading(inventory.Reading{Contact: inventory.ContactResetRequired}), true},
		"absent":            {func(s *story) { s.gpu = s.policy.FoldAbsence(s.gpu, "unknown error", s.now) }, true},
		"reset":             {reading(asking(inventory.RecoveryGPUReset)), true},
		"drain and reset":   {reading(asking(inventory.RecoveryDrainAndReset)), true},
		"drain P2P":         {reading(asking(inventory.RecoveryDrainP2P)), false},
		"IMEX":              {reading(asking(inventory.RecoveryIMEXDomain)), false},
		"an unknown action": {reading(asking(99)), true},
		"XID, a reset":      {func(s *story) { s.xid(119); s.wait(1); s.gpu = s.policy.FoldReset(s.gpu, s.now) }, true},
		"XID, acquitted":    {func(s *story) { s.xid(48) }, false},
		"poison, acquitted": {func(s *story) {
			s.event(inventory.Event{Kind: inventory.EventFatalPoison, GI: -1, CI: -1})
		},
			false},
		"fabric": {
			reading(inventory.Reading{Fabric: inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})}),
			false,
		},
		"fabric, and a reset": {func(s *story) {
			s.reads(1, inventory.Reading{Fabric: inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})})
			s.wait(1)
			s.gpu = s.policy.FoldReset(s.gpu, s.now)
		}, false},
		"calls fail": {
			func(s *story) { s.reads(1, inventory.Reading{Contact: inventory.ContactFailing}); s.wait(time.Minute) },
			false,
		},
		"silence": {
			func(s *story) { s.gpu = s.policy.FoldSilence(s.gpu, "it hangs", s.now); s.wait(time.Minute) }, false,
		},
		"suspicion, acquitted": {func(s *story) { s.xid(154) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.policy.IMEXGates = true
			for i := range s.policy.FlapLimit + 1 {
				if h := s.gpu.Health; h.State != inventory.Healthy {
					t.Fatalf("after %d: %+v", i, h)
				}
				tt.strike(s)
				if s.gpu.Health.State == inventory.Healthy {
					t.Fatal("not struck")
				}
				s.repair()
			}
			if flaps := s.gpu.Health.State != inventory.Healthy; flaps != tt.flaps {
				t.Errorf("%+v after %d times", s.gpu.Health, s.policy.FlapLimit+1)
			}
			if tt.flaps {
				s.want(inventory.Unhealthy, inventory.RemedyHuman)
			}
		})
	}
}

// A limit of 1 believes one recovery; the window forgets those that are as old as it is.
func TestFlapLimitOfOne(t *testing.T) {
	for name, tt := range map[string]struct {
		between time.Duration
		want    inventory.State
	}{
		"at once":         {0, inventory.Unhealthy},
		"within a window": {23 * time.Hour, inventory.Unhealthy},
		"a window later":  {24 * time.Hour, inventory.Healthy},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.policy.FlapLimit = 1
			s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
			s.repair()
			s.want(inventory.Healthy, inventory.NoRemedy)
			s.wait(tt.between)
			s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
			s.repair()
			if h := s.gpu.Health; h.State != tt.want {
				t.Errorf("%+v after the second time", h)
			}
			if tt.want == inventory.Unhealthy {
				want := "the device became Unhealthy and Healthy again 2 times within 24h0m0s: " +
					"find the cause, then clear the fault"
				if s.gpu.Health.Reason != want {
					t.Errorf("reason %q, want %q", s.gpu.Health.Reason, want)
				}
			}
		})
	}
}

// Several faults that are repaired together are one recovery, and one that leaves another open is
// none.
func TestRecoveryIsOfTheDevice(t *testing.T) {
	s := begin(t, 580)
	s.policy.FlapLimit = 1
	s.xid(119)
	s.xid(46)
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.repair()
	s.want(inventory.Healthy, inventory.NoRemedy)
	if n := len(s.gpu.Recoveries); n != 1 {
		t.Errorf("%d recoveries, want 1", n)
	}

	s = begin(t, 580)
	bad := s.good
	bad.Fabric = inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})
	sick := asking(inventory.RecoveryGPUReset)
	sick.Fabric = bad.Fabric
	s.reads(1, sick)
	s.reads(3, bad)
	s.want(inventory.Unhealthy, inventory.RemedyFabric)
	if n := len(s.gpu.Recoveries); n != 0 {
		t.Errorf("%d recoveries of a GPU that is still bad", n)
	}
}

// A recovery that an earlier process saw counts.
func TestRecoveriesOutliveTheProcess(t *testing.T) {
	s := begin(t, 580)
	s.policy.FlapLimit = 1
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.repair()
	s.want(inventory.Healthy, inventory.NoRemedy)
	if !s.gpu.HasLedgerEntries() {
		t.Error("nothing is said to be kept of it")
	}
	s.restart()
	s.read(s.good)
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.repair()
	s.want(inventory.Unhealthy, inventory.RemedyHuman)
	s.gpu, _ = s.policy.Clear(s.gpu, "GPU-0", s.now)
	if s.gpu.HasLedgerEntries() {
		t.Errorf("%+v after it was cleared", s.gpu.Device)
	}
}

// TestClockThatWentBack: what an earlier process found at a time that is to come closes like any
// other fault, and counts for a day at most.
func TestClockThatWentBack(t *testing.T) {
	s := begin(t, 580)
	s.policy.FlapLimit = 1
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.repair()
	s.reads(1, inventory.Reading{Contact: inventory.ContactLost})
	s.now = s.now.Add(-10 * 365 * 24 * time.Hour)
	s.restart()
	if since := s.gpu.Health.Since; since.After(s.now) {
		t.Errorf("lost since %v, and it is %v", since, s.now)
	}
	s.now = s.now.Add(25 * time.Hour)
	s.repair()
	s.want(inventory.Healthy, inventory.NoRemedy)
}

// Where the driver asks for more than before, the stronger remedy stays, whatever it asks for
// later.
func TestResetThatBecomesReboot(t *testing.T) {
	s := begin(t, 580)
	s.reads(1, asking(inventory.RecoveryGPUReset))
	since := s.now
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(1, asking(inventory.RecoveryNodeReboot))
	s.want(inventory.Unhealthy, inventory.RemedyReboot)
	if !s.gpu.Health.Since.Equal(since) || len(s.gpu.Faults) != 1 {
		t.Errorf("%+v, want one fault since %v", s.gpu.Device, since)
	}
	reason := s.gpu.Health.Reason
	s.reads(1, asking(inventory.RecoveryGPUReset))
	s.want(inventory.Unhealthy, inventory.RemedyReboot)
	if s.gpu.Health.Reason != reason {
		t.Errorf("reason %q, want the reboot's: %q", s.gpu.Health.Reason, reason)
	}
	s.reads(20, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReboot)
}

// Of several faults the gravest is the verdict, and of equals the one whose remedy takes most.
func TestVerdictOfSeveralFaults(t *testing.T) {
	const (
		bad, lost                    = inventory.Unhealthy, inventory.Lost
		reset, drain, reboot, fabric = inventory.RemedyReset, inventory.RemedyDrain, inventory.RemedyReboot,
			inventory.RemedyFabric
		human, hardware, reconnect = inventory.RemedyHuman, inventory.RemedyHardware, inventory.RemedyReconnect
	)
	fault := func(state inventory.State, remedy inventory.Remedy) health.Fault {
		return health.Fault{Source: health.SourceXID, State: state, Remedy: remedy, Reason: string(remedy)}
	}
	for name, tt := range map[string]struct {
		faults []health.Fault
		want   inventory.Remedy
	}{
		"reset and hardware":       {[]health.Fault{fault(bad, reset), fault(bad, hardware)}, hardware},
		"hardware and human":       {[]health.Fault{fault(bad, hardware), fault(bad, human)}, hardware},
		"human and hardware":       {[]health.Fault{fault(bad, human), fault(bad, hardware)}, hardware},
		"reboot and human":         {[]health.Fault{fault(bad, reboot), fault(bad, human)}, human},
		"reset and reboot":         {[]health.Fault{fault(bad, reset), fault(bad, reboot)}, reboot},
		"reboot and drain":         {[]health.Fault{fault(bad, reboot), fault(bad, drain)}, reboot},
		"fabric and reconnect":     {[]health.Fault{fault(bad, fabric), fault(bad, reconnect)}, reconnect},
		"the first of equals":      {[]health.Fault{fault(bad, reset), fault(bad, drain)}, reset},
		"a lost one is graver":     {[]health.Fault{fault(bad, hardware), fault(lost, reconnect)}, reconnect},
		"a lost one stays graver":  {[]health.Fault{fault(lost, reconnect), fault(bad, hardware)}, reconnect},
		"three, the middle counts": {[]health.Fault{fault(bad, reset), fault(bad, human), fault(bad, reboot)}, human},
	} {
		for i := range tt.faults {
			tt.faults[i].XID = uint64(i)
		}
		g := health.GPU{UUID: "GPU-0"}.WithRestored(func(string) ([]health.Fault, []time.Time) {
			return tt.faults, nil
		},
			time.Time{})
		if got := g.Health.Remedy; got != tt.want {
			t.Errorf("%s: remedy %q, want %q", name, got, tt.want)
		}
	}
}
