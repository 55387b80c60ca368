package inventory_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestNames: every value of an enumeration has its name, and the values beside them have a number.
func TestNames(t *testing.T) {
	t.Parallel()
	names := func(from, to int, name func(int) string) []string {
		var all []string
		for i := from; i <= to; i++ {
			all = append(all, name(i))
		}
		return all
	}
	for _, tt := range []struct {
		got, want []string
	}{
		{
			names(-1, 5, func(i int) string { return inventory.State(i).String() }),
			[]string{"State(-1)", "Unknown", "Healthy", "Suspect", "Unhealthy", "Lost", "State(5)"},
		},
		{
			names(-1, 4, func(i int) string { return inventory.Contact(i).String() }),
			[]string{"Contact(-1)", "good", "failing", "reset-required", "lost", "Contact(4)"},
		},
		{
			names(-1, 3, func(i int) string { return inventory.MIGMode(i).String() }),
			[]string{"MIGMode(-1)", "unsupported", "disabled", "enabled", "MIGMode(3)"},
		},
		{
			names(0, 4, func(i int) string { return inventory.FabricState(i).String() }),
			[]string{"FabricState(0)", "not-started", "in-progress", "completed", "FabricState(4)"},
		},
		{
			names(0, 4, func(i int) string { return inventory.FabricSummary(i).String() }),
			[]string{"unknown", "healthy", "unhealthy", "limited-capacity", "FabricSummary(4)"},
		},
		{
			names(-1, 7, func(i int) string { return inventory.PCIePath(i).String() }),
			[]string{"PCIePath(-1)", "?", "PSB", "PIX", "PXB", "PHB", "NODE", "SYS", "PCIePath(7)"},
		},
		{
			names(0, 3, func(i int) string { return inventory.Remnant(i).String() }),
			[]string{"Remnant(0)", "clocks", "ecc", "Remnant(3)"},
		},
		{
			names(-1, 4, func(i int) string { return inventory.ComputeMode(i).String() }),
			[]string{"ComputeMode(-1)", "DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS",
				"ComputeMode(4)"},
		},
		{
			names(0, 14, func(i int) string { return inventory.EventKind(i).String() }),
			[]string{
				"EventKind(0)", "xid", "mig-change", "single-bit-ecc", "double-bit-ecc", "single-bit-ecc-storm",
				"dram-retirement",
				"dram-retirement-failure", "non-fatal-poison", "fatal-poison", "unavailable", "recovery-action",
				"lost", "binding",
				"EventKind(14)",
			},
		},
		{
			names(0, 8, func(i int) string { return inventory.RecoveryAction(i).String() }),
			[]string{
				"none", "gpu-reset", "node-reboot", "drain-p2p", "drain-and-reset", "imex-domain", "bus-reset",
				"system-reboot",
				"RecoveryAction(8)",
			},
		},
		{inventory.ClockReasons(1 | 2).Names(), []string{"idle", "application-clocks"}},
		{inventory.FabricFault(1 | 4 | 1<<11).Names(), []string{"degraded bandwidth", "route unhealthy",
			"misconfigured"}},
		{inventory.FabricFault(1<<13 | 1<<4).Names(), []string{"wrong system GUID", "fabric manager not connected"}},
		{inventory.FabricFault(2 | 8).Names(), []string{"route recovery", "access timeout"}},
		{
			names(-1, 1, func(i int) string { return inventory.Measure(i).String() }),
			[]string{"Measure(-1)", "SMClock", "MemoryClock"},
		},
		{[]string{inventory.MaxMemoryClock.String(), (inventory.MaxMemoryClock + 1).String()},
			[]string{"MaxMemoryClock", "Measure(46)"}},
		{
			[]string{
				inventory.Call{GPU: inventory.NoGPU}.String(), inventory.Call{GPU: 0}.String(),
				inventory.Call{Function: "nvmlInit", GPU: inventory.NoGPU}.String(),
			},
			[]string{"reading the driver's files", "reading the driver's files of GPU 0", "nvmlInit"},
		},
		{inventory.ClockReasons(1<<3 | 1<<10 | 1<<11).Names(), []string{"hardware-slowdown", "reliability", "bit 11"}},
		{[]string{inventory.ComputeCapability{Major: 8, Minor: 6}.String()}, []string{"8.6"}},
	} {
		if diff := cmp.Diff(tt.want, tt.got); diff != "" {
			t.Errorf("names (-want +got):\n%s", diff)
		}
	}
}

// TestVerdicts: which states let new work in, and which of two is the worse.
func TestVerdicts(t *testing.T) {
	t.Parallel()
	order := []inventory.State{inventory.Healthy, inventory.Suspect, inventory.Unknown, inventory.Unhealthy,
		inventory.Lost}
	for i, state := range order {
		for _, grace := range []bool{false, true} {
			h := inventory.Health{State: state, Grace: grace}
			want := state == inventory.Healthy || state == inventory.Suspect || state == inventory.Unknown && grace
			if h.Allocatable() != want {
				t.Errorf("%v, grace %v: allocatable %v, want %v", state, grace, h.Allocatable(), want)
			}
		}
		for j, other := range order {
			a, b := inventory.Health{State: state, Reason: "a"}, inventory.Health{State: other, Reason: "b"}
			want := a
			if j > i {
				want = b
			}
			if got := inventory.Worst(a, b); got != want {
				t.Errorf("worst of %v and %v: %+v", state, other, got)
			}
		}
	}
}

// TestWhy: the reason and the remedy, as far as there are any; a state that nobody knows is the
// gravest.
func TestWhy(t *testing.T) {
	t.Parallel()
	for want, h := range map[string]inventory.Health{
		"": {}, "XID 79": {Reason: "XID 79"}, "remedy: reset": {Remedy: inventory.RemedyReset},
		"XID 79; remedy: reset": {Reason: "XID 79", Remedy: inventory.RemedyReset},
	} {
		if got := h.Why(); got != want {
			t.Errorf("%+v: %q, want %q", h, got, want)
		}
	}
	lost, strange := inventory.Health{State: inventory.Lost}, inventory.Health{State: inventory.Lost + 1}
	if inventory.Worst(lost, strange) != strange || inventory.Worst(strange, lost) != strange {
		t.Error("a state that nobody knows is not the gravest")
	}
}

func TestBranch(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]int{"580.95.05": 580, "418": 418, "": 0, "x580": 0, "90.1": 90, "5:1": 5,
		"5/1": 5} {
		if got := (inventory.Driver{Version: version}).Branch(); got != want {
			t.Errorf("branch of %q: %d, want %d", version, got, want)
		}
	}
}

func TestVersionBefore(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]bool{
		"575.51.01": true, "575.51": true, "575": true, "574.99.99": true, "470.256.02": true,
		"575.51.02": false, "575.51.02.1": false, "575.52.01": false, "580.95.05": false, "1000": false,
		"": false, "x": false,
	} {
		if got := (inventory.Driver{Version: version}).Before("575.51.02"); got != want {
			t.Errorf("%q is before 575.51.02: %v, want %v", version, got, want)
		}
	}
}

// TestSignals: a value that is known may be 0, and one that is 0 need not be known.
func TestSignals(t *testing.T) {
	t.Parallel()
	if s := inventory.Known(0); !s.Known || s.Value != 0 || s == (inventory.Signal[int]{}) {
		t.Errorf("a known 0 is %+v", s)
	}
}

// TestAStallIsNoAnswer: and says which call does not return.
func TestAStallIsNoAnswer(t *testing.T) {
	t.Parallel()
	for want, call := range map[string]inventory.Call{
		"nvmlInit_v2 does not return":                         {GPU: inventory.NoGPU, Function: "nvmlInit_v2"},
		"reading the driver's files of GPU 3 does not return": {GPU: 3},
	} {
		var err error = &inventory.Stall{Call: call}
		if !errors.Is(err, inventory.ErrNoAnswer) || !strings.HasSuffix(err.Error(), ": "+want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestMeasures: a value is there once it was set, also if it is 0.
func TestMeasures(t *testing.T) {
	t.Parallel()
	var m inventory.Measures
	all := 0
	for which := range inventory.AllMeasures() {
		if value, known := m.Get(which); value != 0 || known {
			t.Errorf("%v is %v, %v before it was set", which, value, known)
		}
		m.Set(which, float64(which))
		if value, known := m.Get(which); value != float64(which) || !known {
			t.Errorf("%v is %v, %v", which, value, known)
		}
		all++
	}
	if all != 46 {
		t.Errorf("there are %d measures", all)
	}
	for range inventory.AllMeasures() {
		break // ends the iteration
	}
}

func TestGPUByIndex(t *testing.T) {
	t.Parallel()
	s := inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "a", Index: 1}, {UUID: "b", Index: 0}}}
	for index, want := range map[int]string{0: "b true", 1: "a true", 2: " false"} {
		g, ok := s.GPUAt(index)
		if got := fmt.Sprint(g.UUID, " ", ok); got != want {
			t.Errorf("GPU at %d: %q, want %q", index, got, want)
		}
	}
}

func TestGPUByUUID(t *testing.T) {
	t.Parallel()
	s := inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "a", Index: 0}, {UUID: "b", Index: 1}}}
	for uuid, want := range map[string]string{"a": "0 true", "b": "1 true", "c": "0 false"} {
		g, ok := s.GPU(uuid)
		if got := fmt.Sprint(g.Index, ok); got != want {
			t.Errorf("GPU %s: %s, want %s", uuid, got, want)
		}
	}
}
