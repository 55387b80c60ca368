package mig

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// These two are inside: that a name is there once, and that a MIG device was created again in its place,
// changes a text alone.

// Adjacent holders with the same name are named once.
func TestHolderNames(t *testing.T) {
	t.Parallel()
	a, b := Pod{Namespace: "ns", Name: "a"}, Pod{UID: "4711"}
	all := []Holder{{Pod: a, Device: "GPU-0"}, {Pod: a, Device: "GPU-1"}, {Pod: b}, {PID: 7, Name: "dcgm"}, {PID: 8},
		{Pod: a}}
	if got, want := holders(all), "pod ns/a, pod with UID 4711, process 7 (dcgm), process 8, pod ns/a"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// The text changes with the division and the index of a GPU, and not with its health.
func TestDivisionText(t *testing.T) {
	t.Parallel()
	base := inventory.GPU{Index: 1, MIG: inventory.MIGEnabled, MIGDevices: []inventory.MIGDevice{{UUID: "MIG-0", GI: 1}}}
	for name, change := range map[string]func(*inventory.GPU){
		"index":  func(g *inventory.GPU) { g.Index = 2 },
		"mode":   func(g *inventory.GPU) { g.MIG = inventory.MIGDisabled },
		"device": func(g *inventory.GPU) { g.MIGDevices = nil },
		"UUID":   func(g *inventory.GPU) { g.MIGDevices = []inventory.MIGDevice{{UUID: "MIG-1", GI: 1}} },
		"GI":     func(g *inventory.GPU) { g.MIGDevices = []inventory.MIGDevice{{UUID: "MIG-0", GI: 2}} },
		"CI":     func(g *inventory.GPU) { g.MIGDevices = []inventory.MIGDevice{{UUID: "MIG-0", GI: 1, CI: 1}} },
	} {
		other := base
		if change(&other); divisionText(other) == divisionText(base) {
			t.Errorf("another %s is not seen", name)
		}
	}
	sick := base
	if sick.Health.State = inventory.Unhealthy; divisionText(sick) != divisionText(base) {
		t.Error("a GPU that is Unhealthy looks otherwise")
	}
}
