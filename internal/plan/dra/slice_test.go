package dra_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/equality"
)

func TestEqual(t *testing.T) {
	t.Parallel()
	// the API has neither: name and counters tell it
	const partition, switched = ".Devices[0].Partition (not nil)", ".Devices[0].Switched"
	slice := func() dra.Slice {
		since := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
		return dra.Slice{Devices: []dra.Device{{
			Name: "gpu-0", Attributes: map[string]dra.Attribute{"type": {Type: dra.String, Value: "gpu"}},
			Capacity: map[string]dra.Capacity{"memory": 1}, Taints: []dra.Taint{{Key: "a", TimeAdded: &since}},
			ConsumesCounters: []dra.CounterUse{{Counters: map[string]dra.Capacity{"a": 1}}},
		}}, SharedCounters: []dra.CounterSet{{Counters: map[string]dra.Capacity{"a": 1}}}}
	}
	equality.Check(t, slice, dra.Slice.Equal, partition, switched)
	equality.Check(t, func() dra.Pool { return dra.Pool{Slices: []dra.Slice{slice()}} }, dra.Pool.Equal,
		".Slices[0]"+partition, ".Slices[0]"+switched)
	one, two := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC), time.Date(2026, 11, 1, 13, 0, 0, 0,
		time.FixedZone("", 3600))
	for _, test := range []struct {
		a, b dra.Taint
		want bool
	}{
		{dra.Taint{Key: "a", TimeAdded: &one}, dra.Taint{Key: "a", TimeAdded: &two}, true},
		{dra.Taint{Key: "a", TimeAdded: &one}, dra.Taint{Key: "b", TimeAdded: &two}, false},
		{dra.Taint{Key: "a", TimeAdded: &one}, dra.Taint{Key: "a"}, false},
		{dra.Taint{Key: "a"}, dra.Taint{Key: "a"}, true},
	} {
		if test.a.Equal(test.b) != test.want {
			t.Errorf("%v and %v are equal: %t", test.a, test.b, !test.want)
		}
	}
}

// TestJSON holds the form of values to that of the API: capacities as Kubernetes writes quantities.
func TestJSON(t *testing.T) {
	t.Parallel()
	for _, n := range []int64{0, 1, 9, 10, 1023, 1024, 1536, 1 << 20, 81559 << 20, 3 << 40, 1 << 60, 1<<63 - 1} {
		got, err := json.Marshal(dra.Capacity(n))
		if want := `{"value":"` + resource.NewQuantity(n, resource.BinarySI).String() + `"}`; err != nil ||
			string(got) != want {
			t.Errorf("%d: got %s and %v, want %s", n, got, err, want)
		}
	}
	for want, a := range map[string]dra.Attribute{
		`{"string":"a\"b"}`:   {Type: dra.String, Value: `a"b`},
		`{"version":"1.2.3"}`: {Type: dra.Version, Value: "1.2.3"},
		`{"int":0}`:           {Type: dra.Int, Value: "0"},
	} {
		if got, err := json.Marshal(a); err != nil || string(got) != want {
			t.Errorf("got %s and %v, want %s", got, err, want)
		}
	}
}

// TestValuesAtTheLimit: what has just the length that the API server takes is there.
func TestValuesAtTheLimit(t *testing.T) {
	t.Parallel()
	model := strings.Repeat("x", 64)
	version := "1." + strings.Repeat("2", 60) + ".3"
	g := inventory.GPU{UUID: "GPU-a", Model: model, Health: inventory.Health{State: inventory.Healthy}}
	d := pool(inventory.Snapshot{Driver: inventory.Driver{Version: version, CUDA: version + "3"},
		GPUs: []inventory.GPU{g}}).Slices[0].Devices[0]
	if d.Attributes["productName"].Value != model || d.Attributes["driverVersion"].Value != version {
		t.Errorf("attributes: %v", d.Attributes)
	}
	for _, name := range []string{"cudaDriverVersion", "cudaComputeCapability"} { // too long; not known
		if a, is := d.Attributes[name]; is {
			t.Errorf("%s is %v", name, a)
		}
	}
	// 12 attributes and 7 capacities leave room for 13 memory slices.
	for slices, want := range map[int]int{12: 32 - 1, 13: 32, 14: 32 - 13} {
		m := inventory.GPU{
			UUID: "GPU-a", Model: "M", Brand: "B", Architecture: "hopper", AddressingMode: "HMM", BDF: "0000:1b:00.0",
			PCIeRoot: "pci0000:1a",
			NUMANode: inventory.NoNUMANode, MIG: inventory.MIGEnabled, MIGDevices: []inventory.MIGDevice{
				{UUID: "MIG-a", Profile: "1g.5gb", Placement: inventory.MIGPlacement{Size: slices}},
			},
		}
		d := pool(inventory.Snapshot{Driver: inventory.Driver{Version: "580"},
			GPUs: []inventory.GPU{m}}).Slices[0].Devices[0]
		if got := len(d.Attributes) + len(d.Capacity); got != want {
			t.Errorf("with %d memory slices %d attributes and %d capacities, want %d in all", slices, len(d.Attributes),
				len(d.Capacity), want)
		}
	}
}
