package health_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// mostFaults is more than a device may have: 32 XIDs, and one for each step to a stricter fault.
const mostFaults = 48

// TestDistinctXIDs: a driver that reports thousands of different XIDs costs no more memory and time
// for each than one that reports some, and the device stays Unhealthy for as long as the last of
// them asks for it.
func TestDistinctXIDs(t *testing.T) {
	for name, branch := range map[string]int{"without a recovery action": 535, "with one": 580} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, branch)
			s.policy.Overrides, _ = health.ParseOverrides("", "all")
			for i := range uint64(5000) {
				s.xid(1000 + i)
				s.wait(time.Millisecond)
			}
			s.want(inventory.Unhealthy, inventory.RemedyReset)
			if h := s.gpu.Health; h.XID != 1000 {
				t.Errorf("the verdict names XID %d, not the first", h.XID)
			}
			if n := len(s.gpu.Faults); n > mostFaults {
				t.Errorf("%d faults", n)
			}
			s.reads(3, s.good)
			s.want(inventory.Unhealthy, inventory.RemedyReset) // only a reset ends it
			s.gpu = s.policy.FoldReset(s.gpu, s.now)
			s.wait(time.Second)
			s.xid(9999) // after the reset
			s.reads(3, s.good)
			s.want(inventory.Unhealthy, inventory.RemedyReset)
			s.gpu = s.policy.FoldReset(s.gpu, s.now)
			s.reads(3, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		})
	}
}

// TestDistinctXIDsBeforeAStricterOne: a device with all the faults that it may have still gets one
// that takes more to close.
func TestDistinctXIDsBeforeAStricterOne(t *testing.T) {
	many := func(t *testing.T) *story {
		s := begin(t, 580)
		for i := range uint64(5000) { // the recovery action decides about each of them
			s.xid(1000 + i)
			s.wait(20 * time.Millisecond)
			if i%200 == 0 {
				s.read(asking(inventory.RecoveryDrainP2P)) // keeps them open
			}
		}
		if n := len(s.gpu.Faults); n > mostFaults {
			t.Errorf("%d faults", n)
		}
		return s
	}
	t.Run("none", func(t *testing.T) {
		s := many(t)
		s.reads(4, s.good)
		s.want(inventory.Healthy, inventory.NoRemedy)
	})
	for name, c := range map[string]struct {
		xid    uint64
		state  inventory.State
		remedy inventory.Remedy
	}{
		"an operator": {54, inventory.Unhealthy, inventory.RemedyHardware},
		"a reboot":    {151, inventory.Unhealthy, inventory.RemedyReboot},
		"a reset":     {46, inventory.Unhealthy, inventory.RemedyReset},
		"a session":   {79, inventory.Lost, inventory.RemedyReboot},
	} {
		t.Run(name, func(t *testing.T) {
			s := many(t)
			s.xid(c.xid)
			s.reads(4, s.good)
			s.want(c.state, c.remedy)
		})
	}
}
