package health_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// see has a look find the GPU, of the given chip.
func (s *story) see(g inventory.GPU) { s.gpu = s.gpu.WithScan(g, false, s.now) }

// restart begins a new process: of what was known it has what the ledger kept.
func (s *story) restart() {
	faults, recoveries := s.gpu.DurableFaults(), s.gpu.Recoveries
	for i := range faults {
		faults[i].LastSeen = faults[i].Since // the ledger has one time of each fault
	}
	s.gpu = health.GPU{UUID: "GPU-0"}.WithRestored(func(string) ([]health.Fault, []time.Time) {
		return faults, recoveries
	},
		s.now)
	s.reopen()
}

// What counters of a GPU with XID 119, which the driver does not speak for, prove when they fall.
func TestCountersThatFall(t *testing.T) {
	on, off := inventory.Known(true), inventory.Known(false)
	ecc := func(n uint64, persistence inventory.Signal[bool]) inventory.Reading {
		return inventory.Reading{UncorrectedECC: inventory.Known(n), Persistence: persistence}
	}
	energy := func(mJ uint64, persistence inventory.Signal[bool]) inventory.Reading {
		return inventory.Reading{Energy: inventory.Known(mJ), Persistence: persistence}
	}
	var unknown inventory.Signal[bool]
	tests := map[string]struct {
		before, after inventory.Reading
		reopened      bool // the readings are of two sessions
		energy        bool // the policy takes energy for evidence
		proves        bool
	}{
		"errors to zero in one session":               {ecc(2, unknown), ecc(0, unknown), false, false, true},
		"errors to zero, not persistent, one session": {ecc(2, off), ecc(0, off), false, false, true},
		"errors to zero over two sessions":            {ecc(2, unknown), ecc(0, unknown), true, false, false},
		"errors to zero, not persistent":              {ecc(2, off), ecc(0, off), true, false, false},
		"errors to zero, persistent":                  {ecc(2, on), ecc(0, on), true, false, true},
		"errors to zero, persistent only now":         {ecc(2, off), ecc(0, on), true, false, false},
		"errors to zero, persistent no more":          {ecc(2, on), ecc(0, off), true, false, false},
		"fewer errors, not none":                      {ecc(2, on), ecc(1, on), false, false, false},
		"no errors as before":                         {ecc(0, on), ecc(0, on), false, false, false},
		"errors not known any more": {ecc(2, on), inventory.Reading{Persistence: on}, false, false,
			false},
		"errors not known before":     {inventory.Reading{Persistence: on}, ecc(0, on), false, false, false},
		"energy fell":                 {energy(9, on), energy(8, on), false, true, true},
		"energy fell, by default":     {energy(9, on), energy(8, on), false, false, false},
		"energy fell, persistent":     {energy(9, on), energy(8, on), true, true, true},
		"energy fell, not persistent": {energy(9, off), energy(8, off), true, true, false},
		"energy is the same":          {energy(9, on), energy(9, on), false, true, false},
		"energy rose":                 {energy(9, on), energy(10, on), false, true, false},
		"energy not known any more": {energy(9, on), inventory.Reading{Persistence: on}, false, true,
			false},
		"energy not known before": {inventory.Reading{Persistence: on}, energy(0, on), false, true,
			false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.policy.EnergyEvidence = tt.energy
			tt.before.RecoveryAction, tt.after.RecoveryAction = s.good.RecoveryAction, s.good.RecoveryAction
			s.reads(1, tt.before)
			s.xid(119)
			if tt.reopened {
				s.reopen()
			}
			s.reads(3, tt.after)
			s.reads(3, s.good)
			if tt.proves {
				s.want(inventory.Healthy, inventory.NoRemedy)
			} else {
				s.want(inventory.Unhealthy, inventory.RemedyReset)
			}
		})
	}
}

// A driver that asked for a reset before the daemon was restarted, and asks no more, has seen one:
// both bits outlive a restart of the driver's state. That it asked for a restart of the node it
// forgets by itself.
func TestWhatTheDriverAskedForIsRememberedOverARestart(t *testing.T) {
	for action, proves := range map[inventory.RecoveryAction]bool{
		inventory.RecoveryGPUReset: true, inventory.RecoveryDrainAndReset: true, inventory.RecoveryNodeReboot: false,
		inventory.RecoveryDrainP2P: false,
	} {
		t.Run(action.String(), func(t *testing.T) {
			s := begin(t, 580)
			s.xid(119)
			s.reads(1, asking(action))
			s.restart()
			s.reads(2, s.good)
			if healthy := s.gpu.Health.State == inventory.Healthy; healthy != proves {
				t.Errorf("%+v after a restart, and the driver asks for nothing", s.gpu.Health)
			}
		})
	}
}

// The evidence counts once: a later fault needs its own.
func TestEvidenceOfAResetIsOlderThanALaterFault(t *testing.T) {
	s := begin(t, 580)
	s.reads(1, asking(inventory.RecoveryGPUReset))
	s.reads(1, s.good)
	s.xid(119)
	s.reads(20, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
}

// A new session is no evidence as long as the GPU does not answer in it: it may have been lost
// again.
func TestASessionInWhichAGPUStaysLostIsNoEvidence(t *testing.T) {
	s := begin(t, 550)
	s.xid(119)
	lost := inventory.Reading{Contact: inventory.ContactLost}
	s.reads(1, lost)
	s.reopen()
	s.reads(1, lost)
	s.reads(20, s.good)
	s.want(inventory.Lost, inventory.RemedyReboot)
	if len(s.gpu.Faults) != 2 {
		t.Errorf("faults %+v, want the XID and that the GPU was lost", s.gpu.Faults)
	}
	s.reopen()
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

// What the driver asks for counts although the GPU refuses everything else, or cannot be reached.
func TestRecoveryActionOfAGPUThatRefusesCalls(t *testing.T) {
	for contact, state := range map[inventory.Contact]inventory.State{
		inventory.ContactFailing: inventory.Unhealthy, inventory.ContactResetRequired: inventory.Unhealthy,
		inventory.ContactLost: inventory.Lost,
	} {
		t.Run(contact.String(), func(t *testing.T) {
			s := begin(t, 580)
			s.xid(119)
			sick := asking(inventory.RecoveryNodeReboot)
			sick.Contact = contact
			s.reads(1, sick)
			s.want(state, inventory.RemedyReboot)
			if len(s.gpu.Faults) != 3 || s.gpu.Faults[1].Source != health.SourceAction {
				t.Errorf("faults %+v, want the XID, the action and how it answers", s.gpu.Faults)
			}

			s = begin(t, 580)
			s.xid(119)
			sick.RecoveryAction = inventory.Known(inventory.RecoveryGPUReset)
			s.reads(1, sick)
			s.reopen()
			s.reads(2, s.good) // which is the evidence, in the first of the two
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

// NVIDIA's catalog and the recovery action say nothing of chips before Ampere: there NONE acquits
// nobody.
func TestNoneAcquitsNoOldGPU(t *testing.T) {
	for architecture, old := range map[string]bool{
		"kepler": true, "maxwell": true, "pascal": true, "volta": true, "turing": true,
		"ampere": false, "ada": false, "hopper": false, "blackwell": false, "": false, "rubin": false,
	} {
		for _, code := range []uint64{48, 154} {
			s := begin(t, 580)
			s.see(inventory.GPU{Architecture: architecture})
			s.xid(code)
			if atOnce := s.gpu.Health.State; atOnce == inventory.Suspect != (code == 154 && !old) {
				t.Errorf("XID %d of %q: %v at once", code, architecture, atOnce)
			}
			s.reads(10, s.good)
			if healthy := s.gpu.Health.State == inventory.Healthy; healthy == old {
				t.Errorf("XID %d of %q: %+v after the driver had nothing to say", code, architecture, s.gpu.Health)
			}
			s.reads(1, asking(inventory.RecoveryGPUReset)) // which it can say of an old one
			s.reads(2, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		}
		s := begin(t, 580)
		s.see(inventory.GPU{Architecture: architecture})
		s.good.UncorrectedECC = inventory.Known(uint64(1))
		s.reads(1, s.good)
		s.good.UncorrectedECC = inventory.Known(uint64(2))
		s.reads(1, s.good)
		if suspect := s.gpu.Health.State == inventory.Suspect; suspect == old {
			t.Errorf("%q after another memory error: %+v", architecture, s.gpu.Health)
		}
	}
}

// XID 64 is NVIDIA's "reset first" where the rows can be read: then they say whether one could not
// be remapped.
func TestFailedRemappingIsReadWhereRowsCanBe(t *testing.T) {
	rows := func(s *story, failed bool) { s.good.RowRemapFailure = inventory.Known(failed) }
	s := begin(t, 535)
	rows(s, false)
	s.reads(1, s.good)
	s.xid(64)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)

	s.xid(64)
	rows(s, true)
	s.reads(2, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyHardware)
	s.reads(20, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyHardware)

	s = begin(t, 580) // another one of the hardware is none of the rows'
	rows(s, false)
	s.reads(1, s.good)
	s.xid(54)
	s.reads(5, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyHardware)

	s = begin(t, 580) // as before Ampere, and while there are MIG devices
	s.xid(64)
	s.want(inventory.Unhealthy, inventory.RemedyHardware)
	s.reads(20, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyHardware)
	rows(s, false) // they can be read again
	s.reads(3, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)

	s.policy.Overrides = s.policy.Overrides.With(64, health.RuleFatal)
	s.xid(64)
	s.reads(20, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
}

// A driver that asks for more than the reset now has not seen one: the bits of a reset stand behind
// what it asks for.
func TestAskingForARestartIsNoEvidenceOfAReset(t *testing.T) {
	for _, action := range []inventory.RecoveryAction{inventory.RecoveryNodeReboot, inventory.RecoverySystemReboot} {
		s := begin(t, 580)
		s.xid(119)
		s.reads(1, asking(inventory.RecoveryGPUReset))
		s.reads(1, asking(action))
		s.reads(20, s.good)
		if n := len(s.gpu.Faults); n != 2 || s.gpu.Faults[0].XID != 119 {
			t.Errorf("%v: faults %+v, want the XID and the action", action, s.gpu.Faults)
		}
	}
}
