package health_test

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Ten thousand things happen to GPUs in no order. Whatever it was: no GPU is Healthy while the last
// reading is bad, every verdict says why, folding leaves the value that it was given alone, and
// once the remedy is applied and all readings are good the GPU is Healthy.
func TestRandomFaults(t *testing.T) {
	const stories, steps = 200, 50
	for seed := range uint64(stories) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := begin(t, []int{535, 565, 580}[r.IntN(3)])
		s.policy.FlapLimit = 2 + r.IntN(3)
		s.gpu = s.gpu.WithScan(inventory.GPU{MIGDevices: []inventory.MIGDevice{{UUID: "MIG-1", GI: 1},
			{UUID: "MIG-2", GI: 2, CI: 1}}}, false, s.now)
		for range steps {
			before, kept := s.gpu, clone(s.gpu)
			bad := s.random(r)
			if !reflect.DeepEqual(before, kept) {
				t.Fatalf("seed %d: folding changed the value that it was given", seed)
			}
			if bad && s.gpu.Health.State == inventory.Healthy {
				t.Fatalf("seed %d: Healthy though the reading was bad", seed)
			}
			s.sane(s.gpu.Health)
			for _, i := range s.gpu.Instances {
				s.sane(i.Health)
			}
			if limit := s.gpu.Limit(); !limit.IsZero() && !limit.After(s.now) {
				t.Fatalf("seed %d: a limit ran out unseen", seed)
			}
		}
		s.repairAll()
		s.want(inventory.Healthy, inventory.NoRemedy)
		for _, i := range s.gpu.Instances {
			if i.Health.State != inventory.Healthy {
				t.Fatalf("seed %d: %s is %+v after the repair", seed, i.UUID, i.Health)
			}
		}
	}
}

// random lets something happen. It reports whether that was a reading that forbids the GPU to be
// Healthy.
func (s *story) random(r *rand.Rand) (bad bool) {
	s.wait(time.Duration(r.IntN(7000)) * time.Millisecond)
	switch r.IntN(10) {
	case 0, 1:
		gi, ci := r.IntN(3), r.IntN(2)
		e := inventory.Event{Kind: inventory.EventXID, XID: uint64(1 + r.IntN(180)), GI: gi, CI: ci}
		if gi == 0 {
			e.GI, e.CI = inventory.Unattributed, inventory.Unattributed
		}
		s.event(e)
	case 2:
		kind := inventory.EventKind(1 + r.IntN(int(inventory.EventLost)))
		s.event(inventory.Event{Kind: kind, GI: inventory.Unattributed, CI: inventory.Unattributed})
	case 3:
		s.gpu = s.policy.FoldSilence(s.gpu, "the driver hangs", s.now)
		return true
	case 4:
		s.gpu = s.policy.FoldAbsence(s.gpu, "unknown error", s.now)
		return true
	case 5:
		s.reopen()
	case 6, 7:
		reading := inventory.Reading{Contact: inventory.Contact(r.IntN(int(inventory.ContactLost) + 1))}
		if s.good.RecoveryAction.Known {
			reading.RecoveryAction = inventory.Known(inventory.RecoveryAction(r.IntN(9)))
		}
		reading.RowRemapFailure = inventory.Known(r.IntN(20) == 0)
		reading.UncorrectedECC = inventory.Known(r.Uint64N(3))
		s.read(reading)
		action := reading.RecoveryAction.Value
		return reading.Contact != inventory.ContactGood || action != inventory.RecoveryNone &&
			action != inventory.RecoveryIMEXDomain ||
			reading.RowRemapFailure.Value
	default:
		s.read(s.good)
	}
	return false
}

// repairAll does what the verdicts ask for, as an operator would: a reset, and where hands or a
// reboot are asked for, a clear.
func (s *story) repairAll() {
	s.reopen()
	s.gpu = s.policy.FoldReset(s.gpu, s.now)
	s.reads(3, s.good)
	byHand := []inventory.Remedy{inventory.RemedyReboot, inventory.RemedyHuman, inventory.RemedyHardware}
	hands := func(f health.Fault) bool { return slices.Contains(byHand, f.Remedy) }
	if slices.ContainsFunc(s.gpu.Faults, hands) {
		s.gpu, _ = s.policy.Clear(s.gpu, s.gpu.UUID, s.now)
	}
	for _, i := range s.gpu.Instances {
		if slices.ContainsFunc(i.Faults, hands) {
			s.gpu, _ = s.policy.Clear(s.gpu, i.UUID, s.now)
		}
	}
	s.reads(3, s.good)
}

func clone(g health.GPU) health.GPU {
	device := func(d health.Device) health.Device {
		d.Faults, d.Counts, d.Recoveries = slices.Clone(d.Faults), slices.Clone(d.Counts), slices.Clone(d.Recoveries)
		return d
	}
	g.Device = device(g.Device)
	g.Instances = slices.Clone(g.Instances)
	for i := range g.Instances {
		g.Instances[i].Device = device(g.Instances[i].Device)
	}
	return g
}
