package dra_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

var (
	deviceName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	semver     = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$`)
	identifier = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]{0,31}$`)
)

// refusedBy says what the API server would refuse of a pool.
func refusedBy(p dra.Pool) (problems []string) {
	names, sets := map[string]bool{}, map[string]bool{}
	for i, s := range p.Slices {
		if len(s.Devices) > 64 {
			problems = append(problems, fmt.Sprintf("slice %d has %d devices", i, len(s.Devices)))
		}
		if len(s.SharedCounters) > 8 || s.SharedCounters != nil && s.Devices != nil {
			problems = append(problems, fmt.Sprintf("slice %d has %d counter sets and %d devices", i,
				len(s.SharedCounters), len(s.Devices)))
		}
		for _, set := range s.SharedCounters {
			if sets[set.Name] || len(set.Counters) > 32 || len(set.Counters) == 0 {
				problems = append(problems, fmt.Sprintf("counter set %q of %d counters", set.Name, len(set.Counters)))
			}
			sets[set.Name] = true
		}
		for _, d := range s.Devices {
			for _, use := range d.ConsumesCounters {
				if !sets[use.CounterSet] || len(use.Counters) == 0 {
					problems = append(problems, fmt.Sprintf("device %q uses %d counters of %q", d.Name,
						len(use.Counters), use.CounterSet))
				}
			}
			if names[d.Name] || !deviceName.MatchString(d.Name) || len(d.Attributes)+len(d.Capacity) > 32 {
				problems = append(problems, fmt.Sprintf("device %q, %d attributes, %d capacities", d.Name,
					len(d.Attributes), len(d.Capacity)))
			}
			names[d.Name] = true
			for name, a := range d.Attributes {
				id := name[strings.LastIndex(name, "/")+1:]
				ok := identifier.MatchString(id) && utf8.ValidString(a.Value) && a.Value != ""
				if a.Type != dra.Int {
					ok = ok && len(a.Value) <= 64
				}
				if a.Type == dra.Version {
					ok = ok && semver.MatchString(a.Value)
				}
				if !ok {
					problems = append(problems, fmt.Sprintf("device %s: attribute %s = %+v", d.Name, name, a))
				}
			}
			for name, c := range d.Capacity {
				if !identifier.MatchString(name) || c < 0 {
					problems = append(problems, fmt.Sprintf("device %s: capacity %s = %d", d.Name, name, c))
				}
			}
		}
	}
	return problems
}

// TestLimits has a driver that tells nonsense: what the API server would refuse is left out, so
// that it takes the rest.
func TestLimits(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 65)
	whole := inventory.GPU{
		UUID: "GPU-a", Model: long, Brand: "\xff\xfe", Architecture: long, AddressingMode: long, BDF: long,
		PCIeRoot: long,
		Clique:   long,
		ComputeCapability: inventory.ComputeCapability{Major: 9,
			Minor: 0}, MemoryBytes: 1 << 63, NUMANode: inventory.NoNUMANode,
	}
	divided := inventory.GPU{UUID: "GPU-b", Index: 1, Minor: 1, MIG: inventory.MIGEnabled, Model: "M", Brand: "B",
		Architecture: "hopper", AddressingMode: "HMM",
		BDF: "0000:1b:00.0", PCIeRoot: "pci0000:1a", ComputeCapability: inventory.ComputeCapability{Major: 12},
		MemoryBytes: 1 << 30}
	for i := range 64 { // as many as the adapter reads
		divided.MIGDevices = append(divided.MIGDevices, inventory.MIGDevice{
			UUID: fmt.Sprintf("MIG-%d", i), Index: i, Profile: "1g.5gb", Placement: inventory.MIGPlacement{Profile: 19,
				Start: i, Size: 12},
		})
	}
	odd := inventory.GPU{UUID: "GPU-c", Index: 2, Minor: 2, MIG: inventory.MIGEnabled,
		MIGDevices: []inventory.MIGDevice{
			{UUID: "MIG-twice", Profile: "1g.5gb", Placement: inventory.MIGPlacement{Profile: 19, Size: 1}},
			{UUID: "MIG-twice", Index: 1, Profile: "1g.5gb", Placement: inventory.MIGPlacement{Profile: 19, Size: 1}},
			{UUID: "MIG-unplaced", Index: 2, Profile: "1g.5gb"},
			{UUID: "MIG-unnamed", Index: 3, Profile: long, Placement: inventory.MIGPlacement{Profile: 19, Start: 1,
				Size: 1}},
		}}
	s := inventory.Snapshot{
		Driver:  inventory.Driver{Version: "580.95.05-grid", CUDA: "13." + strings.Repeat("1", 64)},
		GPUs:    []inventory.GPU{whole, divided, odd},
		LeftOut: []inventory.LeftOut{{Index: 3, Reason: "cannot be identified"}},
	}
	p := pool(s)
	if problems := refusedBy(p); len(problems) > 0 {
		t.Errorf("the API server would refuse:\n%s", strings.Join(problems, "\n"))
	}
	var names []string
	for _, d := range p.Slices[0].Devices {
		names = append(names, d.Name)
	}
	if got := strings.Join(names[:2], " "); len(names) != 1+8+1 || got != "gpu-0 gpu-1-mig-1g5gb-19-0" {
		t.Errorf("devices: %v", names)
	}
	if got := strings.Join(slices.Sorted(maps.Keys(p.Slices[0].Devices[0].Attributes)),
		" "); got != "cudaComputeCapability type uuid" {
		t.Errorf("attributes of the GPU: %s", got)
	}
	left := strings.Join(p.LeftOut, "\n")
	for _, want := range []string{
		"GPU 3: cannot be identified",
		"MIG device 1:8 (MIG-8): a GPU can have 8 devices at most",
		"MIG device 2:1 (MIG-twice): another MIG device has the name gpu-2-mig-1g5gb-19-0",
		"MIG device 2:2 (MIG-unplaced): where it lies on the GPU could not be read; only a privileged process may " +
			"ask the driver for it",
		"cannot be the name of a device",
	} {
		if !strings.Contains(left, want) {
			t.Errorf("left out:\n%s\nwant %s", left, want)
		}
	}
	if want := 1 + 56 + 3; len(p.LeftOut) != want {
		t.Errorf("%d are left out, want %d", len(p.LeftOut), want)
	}
}

// TestMaximum has as many GPUs with as many devices as a node can have, all tainted.
func TestMaximum(t *testing.T) {
	t.Parallel()
	var s inventory.Snapshot
	for i := range 64 {
		g := inventory.GPU{UUID: fmt.Sprintf("GPU-%d", i), Index: i, Minor: i, MIG: inventory.MIGEnabled}
		for j := range 8 {
			g.MIGDevices = append(g.MIGDevices, inventory.MIGDevice{
				UUID: fmt.Sprintf("MIG-%d-%d", i, j), Index: j, Profile: "1g.5gb",
				Placement: inventory.MIGPlacement{Profile: 19, Start: j, Size: 1},
			})
		}
		s.GPUs = append(s.GPUs, g)
	}
	p := pool(s)
	if problems := refusedBy(p); len(problems) > 0 || len(p.Slices) != 8 || len(p.LeftOut) > 0 {
		t.Errorf("%d slices, left out %q, problems %q", len(p.Slices), p.LeftOut, problems)
	}
}
