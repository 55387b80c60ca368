package health_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// A reading of a GPU that does not answer as it should is no pass for any fault.
func TestReadingsThatFailAreNoPasses(t *testing.T) {
	for _, contact := range []inventory.Contact{inventory.ContactFailing, inventory.ContactResetRequired, inventory.ContactLost} {
		s := begin(t, 580)
		s.xid(48)
		s.reads(10, inventory.Reading{Contact: contact})
		s.reopen()
		s.reads(1, s.good)
		if s.gpu.Faults[0].XID != 48 {
			t.Errorf("%v: %+v after one good reading, want the XID still", contact, s.gpu.Faults)
		}
		s.reads(2, s.good)
		s.want(inventory.Healthy, inventory.NoCure)
	}
}

// Passes are in a row: one reading that finds the fault again begins anew.
func TestPassesAreInARow(t *testing.T) {
	s := begin(t, 580)
	bad := asking(inventory.RecoveryDrainP2P)
	s.reads(1, bad)
	for range 5 {
		s.reads(1, s.good)
		s.reads(1, bad)
	}
	s.reads(1, s.good)
	s.want(inventory.Unhealthy, inventory.CureDrainP2P)
	s.reads(1, s.good)
	s.want(inventory.Healthy, inventory.NoCure)
}

// A fault that readings find closes although the driver asks for something, which only faults of events wait for.
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

// A GPU that was never asked is Unknown since the moment that nobody could ask it, and not allocatable.
func TestSilenceOfAGPUThatWasNeverAsked(t *testing.T) {
	s := begin(t, 580)
	s.gpu = s.policy.FoldSilence(health.GPU{UUID: "GPU-0"}, "the driver hangs", s.now)
	s.want(inventory.Unknown, inventory.CureHuman)
	if s.gpu.Health.Allocatable() || !s.gpu.Health.Since.Equal(s.now) || !s.gpu.Limit().IsZero() {
		t.Errorf("%+v", s.gpu.Health)
	}
}

func TestWhatOutlivesARestartOfTheNode(t *testing.T) {
	for cure, want := range map[inventory.Cure]bool{
		inventory.CureHuman: true, inventory.CureHardware: true, inventory.CureReset: false, inventory.CureDrain: false,
		inventory.CureDrainP2P: false, inventory.CureReboot: false, inventory.CureFabric: false, inventory.CureIMEX: false,
		inventory.CureReconnect: false, inventory.NoCure: false,
	} {
		if got := health.OutlivesBoot(cure); got != want {
			t.Errorf("%q outlives a restart: %v, want %v", cure, got, want)
		}
	}
}
