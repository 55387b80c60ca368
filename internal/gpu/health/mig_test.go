package health_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// divided is a GPU with MIG devices.
func divided(devices ...inventory.MIGDevice) inventory.GPU {
	return inventory.GPU{MIG: inventory.MIGEnabled, MIGDevices: devices}
}

var one, two = inventory.MIGDevice{UUID: "MIG-1", GI: 1, CI: 0}, inventory.MIGDevice{UUID: "MIG-2", GI: 2, CI: 0}

// strike reports XID 119 of an instance.
func (s *story) strike(gi, ci int) (hit bool) {
	e := inventory.Event{Kind: inventory.EventXID, XID: 119, GI: gi, CI: ci}
	s.gpu, hit = s.policy.FoldEvent(s.gpu, e, s.facts, s.now)
	return hit
}

// states are those of the GPU's MIG devices.
func (s *story) states() (all []inventory.State) {
	for _, i := range s.gpu.Instances {
		all = append(all, i.Health.State)
	}
	return all
}

// A MIG device keeps its faults through another GI or CI, and events find it where it is now.
func TestMIGDeviceThatMoves(t *testing.T) {
	for name, moved := range map[string]inventory.MIGDevice{
		"another GI": {UUID: "MIG-2", GI: 5, CI: 0}, "another CI": {UUID: "MIG-2", GI: 2, CI: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.see(divided(one, two))
			s.see(divided(one, moved))
			if s.strike(two.GI, two.CI) {
				t.Error("an event found it where it was")
			}
			if !s.strike(moved.GI, moved.CI) || s.states()[1] != inventory.Unhealthy ||
				s.states()[0] != inventory.Healthy {
				t.Errorf("an event did not find it: %v", s.states())
			}
			s.see(divided(one, two))
			if s.states()[1] != inventory.Unhealthy {
				t.Errorf("it lost its fault: %v", s.states())
			}
			s = begin(t, 580)
			s.see(divided(two))
			s.see(divided(moved))
			if s.strike(two.GI, two.CI) || !s.strike(moved.GI, moved.CI) {
				t.Errorf("an event did not find the only one: %v", s.states())
			}
		})
	}
}

// A reset of the GPU finds a MIG device good again, also where the GPU itself had no fault.
func TestMIGDeviceRecovers(t *testing.T) {
	s := begin(t, 580)
	s.see(divided(one, two))
	s.good.UncorrectedECC = inventory.Known(uint64(2))
	s.reads(1, s.good)
	s.strike(two.GI, two.CI)
	if got := s.states(); got[1] != inventory.Unhealthy || s.gpu.Health.State != inventory.Healthy {
		t.Fatalf("struck: the GPU is %v, its MIG devices %v", s.gpu.Health.State, got)
	}
	s.good.UncorrectedECC = inventory.Known(uint64(0)) // only a reset does that
	s.reads(3, s.good)
	if got := s.states(); got[0] != inventory.Healthy || got[1] != inventory.Healthy {
		t.Errorf("after good readings: %v", got)
	}
}

// A MIG device that is new is Healthy, and one that is gone is forgotten, but for those that only
// cannot be read.
func TestMIGDevicesThatComeAndGo(t *testing.T) {
	s := begin(t, 580)
	s.see(divided(two))
	s.strike(2, inventory.Unattributed)
	s.see(divided(one, two))
	if got := s.states(); got[0] != inventory.Healthy || got[1] != inventory.Unhealthy {
		t.Fatalf("%v after another was made", got)
	}
	s.gpu = s.gpu.WithScan(divided(one), true, s.now) // the other one cannot be read
	s.gpu = s.gpu.WithScan(divided(one), true, s.now)
	if len(s.gpu.Unread) != 1 || !s.gpu.HasLedgerEntries() {
		t.Fatalf("unread %+v", s.gpu.Unread)
	}
	s.gpu = s.gpu.WithScan(divided(one), false, s.now) // it is gone
	if len(s.gpu.Unread) != 0 || s.gpu.HasLedgerEntries() {
		t.Fatalf("unread %+v of one that is gone", s.gpu.Unread)
	}
	s.see(divided(one, two))
	if got := s.states(); got[1] != inventory.Healthy {
		t.Errorf("%v after it was made again", got)
	}
}

// Clearing one MIG device that cannot be read leaves what is known of the other.
func TestClearOneOfTwoUnreadMIGDevices(t *testing.T) {
	s := begin(t, 580)
	s.see(divided(one, two))
	s.strike(1, inventory.Unattributed)
	s.strike(2, inventory.Unattributed)
	s.gpu = s.gpu.WithScan(divided(), true, s.now)
	cleared, ok := s.policy.Clear(s.gpu, "MIG-1", s.now)
	if !ok || len(cleared.Unread) != 1 || cleared.Unread[0].UUID != "MIG-2" || len(s.gpu.Unread) != 2 {
		t.Fatalf("cleared %v: %+v of %+v", ok, cleared.Unread, s.gpu.Unread)
	}
	s.gpu = cleared
	s.see(divided(one, two))
	if got := s.states(); got[0] != inventory.Healthy || got[1] != inventory.Unhealthy {
		t.Errorf("%v after the first was cleared", got)
	}
	before := s.gpu
	s.gpu, ok = s.policy.Clear(s.gpu, "MIG-2", s.now)
	if before.Instances[1].Health.State != inventory.Unhealthy {
		t.Error("clearing changed the value that it was given")
	}
	if got := s.states(); !ok || got[1] != inventory.Healthy {
		t.Errorf("%v after the second was cleared", got)
	}
}

// Clearing one MIG device leaves the others, whichever it is.
func TestClearOneMIGDevice(t *testing.T) {
	for i, uuid := range []string{"MIG-1", "MIG-2"} {
		s := begin(t, 580)
		s.see(divided(one, two))
		s.strike(1, 0)
		s.strike(2, 0)
		var ok bool
		s.gpu, ok = s.policy.Clear(s.gpu, uuid, s.now)
		if got := s.states(); !ok || got[i] != inventory.Healthy || got[1-i] != inventory.Unhealthy {
			t.Errorf("%v after %s was cleared: %v", got, uuid, ok)
		}
	}
}

// An event of a GI concerns all its CIs, one of a CI that alone.
func TestEventsOfInstances(t *testing.T) {
	first, second := inventory.MIGDevice{UUID: "MIG-1", GI: 1, CI: 0}, inventory.MIGDevice{UUID: "MIG-2", GI: 1, CI: 1}
	other := inventory.MIGDevice{UUID: "MIG-3", GI: 2, CI: 0}
	const good, bad = inventory.Healthy, inventory.Unhealthy
	for name, tt := range map[string]struct {
		gi, ci int
		want   [3]inventory.State
	}{
		"a CI":     {1, 1, [3]inventory.State{good, bad, good}},
		"a GI":     {1, inventory.Unattributed, [3]inventory.State{bad, bad, good}},
		"other GI": {2, 0, [3]inventory.State{good, good, bad}},
		"the GPU":  {inventory.Unattributed, inventory.Unattributed, [3]inventory.State{good, good, good}},
		"no CI":    {2, 1, [3]inventory.State{good, good, good}},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.see(divided(first, second, other))
			hit := s.strike(tt.gi, tt.ci)
			if got := [3]inventory.State(s.states()); got != tt.want || hit != (name != "no CI") {
				t.Errorf("%v, hit %v, want %v", got, hit, tt.want)
			}
			if whole := s.gpu.Health.State == bad; whole != (name == "the GPU") {
				t.Errorf("the GPU is %+v", s.gpu.Health)
			}
		})
	}
}

// Marked says that something may have to be kept, of the GPU or of any MIG device.
func TestMarked(t *testing.T) {
	fresh := begin(t, 580)
	fresh.see(divided(one, two))
	if fresh.gpu.HasLedgerEntries() {
		t.Error("a GPU of which nothing is known is marked")
	}
	for name, strike := range map[string]func(*story){
		"the GPU":            func(s *story) { s.xid(119) },
		"the first instance": func(s *story) { s.strike(1, 0) },
		"the last instance":  func(s *story) { s.strike(2, 0) },
		"an unread instance": func(s *story) { s.strike(2, 0); s.gpu = s.gpu.WithScan(divided(one), true, s.now) },
		"a recovery": func(s *story) {
			s.reads(1, asking(inventory.RecoveryGPUReset))
			s.reads(2, s.good)
		},
	} {
		s := begin(t, 580)
		s.see(divided(one, two))
		strike(s)
		if !s.gpu.HasLedgerEntries() {
			t.Errorf("%s: not marked", name)
		}
	}
}

// Events are counted by kind and XID, the last 32 that were seen.
func TestCounts(t *testing.T) {
	s := begin(t, 580)
	other := inventory.Event{Kind: inventory.EventSingleBitECC, GI: inventory.Unattributed, CI: inventory.Unattributed}
	s.xid(13)
	s.event(other)
	other.Kind = inventory.EventDRAMRetirement
	s.event(other)
	s.wait(1)
	s.xid(13)
	want := []health.Count{
		{Kind: inventory.EventSingleBitECC, N: 1}, {Kind: inventory.EventDRAMRetirement, N: 1},
		{Kind: inventory.EventXID,
			XID: 13, N: 2},
	}
	if len(s.gpu.Counts) != len(want) {
		t.Fatalf("counts %+v", s.gpu.Counts)
	}
	for i, c := range s.gpu.Counts {
		if c.Kind != want[i].Kind || c.XID != want[i].XID || c.N != want[i].N || c.Last.Equal(s.now) != (i == 2) {
			t.Errorf("count %d is %+v, want %+v", i, c, want[i])
		}
	}
	for code := range uint64(40) {
		s.xid(100 + code)
	}
	if n := len(s.gpu.Counts); n != 32 || s.gpu.Counts[0].XID != 108 || s.gpu.Counts[31].XID != 139 {
		t.Errorf("%d counts, from %+v", n, s.gpu.Counts[0])
	}
}

// A MIG device that was created again in the place of another one is not the other.
func TestMIGDeviceThatIsReplaced(t *testing.T) {
	s := begin(t, 580)
	if !s.gpu.Whole() {
		t.Error("a GPU without MIG devices is not whole")
	}
	s.see(divided(one))
	if s.gpu.Whole() {
		t.Error("a GPU with a MIG device is whole")
	}
	s.strike(1, 0)
	s.see(divided(inventory.MIGDevice{UUID: "MIG-9", GI: 1, CI: 0}))
	if i := s.gpu.Instances[0]; i.UUID != "MIG-9" || i.Health.State != inventory.Healthy || len(i.Faults) > 0 {
		t.Errorf("%+v in the place of one with a fault", i)
	}
}
