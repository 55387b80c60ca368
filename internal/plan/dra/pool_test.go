package dra_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

var update = flag.Bool("update", false, "rewrite testdata/devices.txt")

// scan returns what a simulated machine has, all of it Healthy.
func scan(t testing.TB, name string, faults ...simulator.Fault) inventory.Snapshot {
	t.Helper()
	var s inventory.Snapshot
	simulated.InVirtualTime(t, func(t testing.TB) {
		node, session := simulated.Open(t, name)
		for i := range len(faults) + 1 {
			if i > 0 {
				if err := node.Inject(faults[i-1]); err != nil {
					t.Fatal(err)
				}
			}
			var err error
			if s, err = session.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
	return simulated.Healthy(s)
}

func pool(s inventory.Snapshot) dra.Pool {
	return dra.New(s, "node-1", dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil)
}

// text writes a device in one line.
func text(d dra.Device) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(d.Attributes)) {
		a := d.Attributes[name]
		parts = append(parts, fmt.Sprintf("%s=%s:%s", name, a.Type, a.Value))
	}
	for _, name := range slices.Sorted(maps.Keys(d.Capacity)) {
		parts = append(parts, fmt.Sprintf("%s=%d", name, d.Capacity[name]))
	}
	for _, taint := range d.Taints {
		parts = append(parts, fmt.Sprintf("taint %s=%s:%s", taint.Key, taint.Value, taint.Effect))
	}
	return d.Name + " " + strings.Join(parts, " ")
}

// TestDevices holds the devices of four simulated machines to testdata/devices.txt, and has nothing
// left out of any.
func TestDevices(t *testing.T) {
	t.Parallel()
	var got strings.Builder
	for _, name := range simulator.Names() {
		p := pool(scan(t, name))
		if len(p.LeftOut) > 0 {
			t.Errorf("%s: left out %q", name, p.LeftOut)
		}
		if !slices.Contains([]string{"a100-mig-mixed", "dgx-1", "gb300-nvl72", "t4"}, name) {
			continue
		}
		for i, s := range p.Slices {
			fmt.Fprintf(&got, "%s, slice %d of %d\n", name, i+1, len(p.Slices))
			for _, d := range s.Devices {
				fmt.Fprintf(&got, "  %s\n", text(d))
			}
		}
	}
	const file = "testdata/devices.txt"
	if *update {
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("run go test ./internal/plan/dra -run TestDevices -update if this is right (-want +got):\n%s", diff)
	}
}

// changed counts the slices that have to be written; all of them where their number is another.
func changed(before, after dra.Pool) int {
	if len(before.Slices) != len(after.Slices) {
		return max(len(before.Slices), len(after.Slices))
	}
	count := 0
	for i := range before.Slices {
		if !before.Slices[i].Equal(after.Slices[i]) {
			count++
		}
	}
	return count
}

// TestHealthIsOneWrite has each GPU and MIG device of each machine fail and recover: each time one
// slice changes, and in the end all is as it was.
func TestHealthIsOneWrite(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 11, 1, 12, 0, 0, 5, time.UTC)
	for _, name := range simulator.Names() {
		good := scan(t, name)
		before := pool(good)
		fail := func(what string, change func(*inventory.Snapshot)) {
			s := simulated.Healthy(good)
			change(&s)
			after := pool(s)
			if got := changed(before, after); got != 1 {
				t.Errorf("%s: %s changes %d slices", name, what, got)
			}
			if got := changed(before, pool(simulated.Healthy(s))); got != 0 {
				t.Errorf("%s: after %s, %d slices are not as they were", name, what, got)
			}
		}
		for i, g := range good.GPUs {
			for _, h := range []inventory.Health{
				{State: inventory.Unhealthy, XID: 79, Remedy: inventory.RemedyReset, Since: since},
				{State: inventory.Lost, Remedy: inventory.RemedyReconnect, Since: since},
				{State: inventory.Unknown},
			} {
				if g.MIG != inventory.MIGEnabled || len(g.MIGDevices) > 0 {
					fail(fmt.Sprintf("GPU %d %v", i, h.State), func(s *inventory.Snapshot) { s.GPUs[i].Health = h })
				}
				for j := range g.MIGDevices {
					fail(fmt.Sprintf("MIG device %d:%d %v", i, j, h.State),
						func(s *inventory.Snapshot) { s.GPUs[i].MIGDevices[j].Health = h })
				}
			}
		}
	}
}

// TestFaultOfAGPUIsOneWrite has GPUs fall off the bus, on the real edge: what the driver still
// tells of the links of others changes too.
func TestFaultOfAGPUIsOneWrite(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"dgx-1", "dgx-2", "dgx-h100", "a100-mig-mixed"} {
		before, after := scan(t, name), scan(t, name, simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 79})
		after.GPUs[1].Health = inventory.Health{State: inventory.Lost}
		if got := changed(pool(before), pool(after)); got != 1 {
			t.Errorf("%s: a GPU that fell off the bus changes %d slices", name, got)
		}
	}
}

// TestTaintsOfWhatNoProgramMayUse: a GPU that is well and that no program may use is tainted (A13).
func TestTaintsOfWhatNoProgramMayUse(t *testing.T) {
	t.Parallel()
	well := inventory.Health{State: inventory.Healthy}
	for want, gpu := range map[int]inventory.GPU{
		0: {UUID: "GPU-a", Health: well, Unlicensed: true},
		1: {UUID: "GPU-a", Health: well, NotReady: true},
		2: {UUID: "GPU-a", Health: well, ComputeMode: inventory.ComputeProhibited},
	} {
		taints := pool(inventory.Snapshot{GPUs: []inventory.GPU{gpu}}).Slices[0].Devices[0].Taints
		if len(taints) != min(want, 1) || want > 0 && taints[0].Key != dra.TaintUnhealthy {
			t.Errorf("%+v has the taints %+v", gpu, taints)
		}
	}
}

// TestTaints names the taint of each kind of bad health.
func TestTaints(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 11, 1, 12, 0, 0, 999, time.FixedZone("", 3600))
	for _, test := range []struct {
		health inventory.Health
		want   string
	}{
		{inventory.Health{State: inventory.Healthy}, ""},
		{inventory.Health{State: inventory.Suspect, XID: 31}, ""},
		{inventory.Health{State: inventory.Unknown, Grace: true}, ""},
		{inventory.Health{State: inventory.Unknown}, `{"key":"gpu.nvidia.com/unmonitored","effect":"NoSchedule"}`},
		{inventory.Health{State: inventory.Lost, XID: 79, Remedy: inventory.RemedyReconnect},
			`{"key":"gpu.nvidia.com/gpu-lost","effect":"NoSchedule"}`},
		{inventory.Health{State: inventory.Unhealthy, XID: 48, Since: since},
			`{"key":"gpu.nvidia.com/xid","value":"48","effect":"NoSchedule","timeAdded":"2026-11-01T11:00:00Z"}`},
		{inventory.Health{State: inventory.Unhealthy, Remedy: inventory.RemedyDrain},
			`{"key":"gpu.nvidia.com/unhealthy","value":"drain-reset","effect":"NoSchedule"}`},
		{inventory.Health{State: inventory.Unhealthy}, `{"key":"gpu.nvidia.com/unhealthy","effect":"NoSchedule"}`},
	} {
		p := pool(inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "GPU-a", Health: test.health}}})
		got := ""
		for _, taint := range p.Slices[0].Devices[0].Taints {
			line, err := json.Marshal(taint)
			if err != nil {
				t.Fatal(err)
			}
			got += string(line)
		}
		if got != test.want {
			t.Errorf("%+v: got %s, want %s", test.health, got, test.want)
		}
	}
}

// TestNoDevices: a node without devices has one empty slice, so that nobody believes in an older
// one.
func TestNoDevices(t *testing.T) {
	t.Parallel()
	undivided := inventory.GPU{UUID: "GPU-a", Index: 3, MIG: inventory.MIGEnabled}
	for name, s := range map[string]inventory.Snapshot{"no GPU": {}, "undivided": {GPUs: []inventory.GPU{undivided}}} {
		p := pool(s)
		got, err := json.Marshal(p.List())
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(got),
			`"pool":{"name":"node-1","generation":1,"resourceSliceCount":1},"devices":[]}`) {
			t.Errorf("%s: %s", name, got)
		}
		if len(p.LeftOut) != len(s.GPUs) {
			t.Errorf("%s: left out %q", name, p.LeftOut)
		}
	}
}

// TestOwners: a GPU is in a slice exactly if it is the driver's, and one that leaves has a taint
// more; the others keep what is theirs.
func TestOwners(t *testing.T) {
	t.Parallel()
	s := scan(t, "dgx-1")
	s.GPUs[3].Health = inventory.Health{State: inventory.Lost}
	owners := dra.All(s.GPUs)
	owners[s.GPUs[0].UUID] = dra.OwnedByPlugin
	owners[s.GPUs[1].UUID] = dra.LeavesPlugin
	delete(owners, s.GPUs[2].UUID)
	owners[s.GPUs[3].UUID] = dra.LeavesDRA
	owners[s.GPUs[4].UUID] = dra.LeavesDRA
	whole := map[string]dra.Device{}
	for _, d := range pool(s).Slices[0].Devices {
		whole[d.Name] = d
	}
	var got []string
	for _, d := range dra.New(s, "node-1", dra.Numbers{}.With(s.GPUs), owners, nil).Slices[0].Devices {
		var keys []string
		for _, taint := range d.Taints {
			keys = append(keys, taint.Key+":"+taint.Effect)
		}
		got = append(got, fmt.Sprint(d.Name, keys))
		if d.Taints = whole[d.Name].Taints; !d.Equal(whole[d.Name]) {
			t.Errorf("%s is another than where every GPU is in a slice", d.Name)
		}
	}
	slices.Sort(got)
	want := []string{"gpu-3[gpu.nvidia.com/gpu-lost:NoSchedule gpu.nvidia.com/leaving:NoSchedule]",
		"gpu-4[gpu.nvidia.com/leaving:NoSchedule]",
		"gpu-5[]", "gpu-6[]", "gpu-7[]"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if p := dra.New(s, "node-1", dra.Numbers{}.With(s.GPUs), nil, nil); len(p.Slices) != 1 ||
		len(p.Slices[0].Devices) != 0 {
		t.Errorf("without owners: %+v", p)
	}
}

// TestNames has GPUs come, go and change their places: each keeps its name, and its slice.
func TestNames(t *testing.T) {
	t.Parallel()
	s := scan(t, "dgx-2")
	numbers := dra.Numbers{}.With(s.GPUs)
	names := func(s inventory.Snapshot) map[string]string {
		found := map[string]string{}
		numbers = numbers.With(s.GPUs)
		for i, slice := range dra.New(s, "n", numbers, dra.All(s.GPUs), nil).Slices {
			for _, d := range slice.Devices {
				found[d.Attributes["uuid"].Value] = fmt.Sprint(i, d.Name)
			}
		}
		return found
	}
	before := names(s)
	without := s
	without.GPUs = slices.Delete(slices.Clone(s.GPUs), 2, 3)
	for i := range without.GPUs {
		without.GPUs[i].Index, without.GPUs[i].Minor = i, i
	}
	want := maps.Clone(before)
	delete(want, s.GPUs[2].UUID)
	if diff := cmp.Diff(want, names(without)); diff != "" {
		t.Errorf("after a GPU left and the minors changed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before, names(s)); diff != "" {
		t.Errorf("after it came back (-want +got):\n%s", diff)
	}
	for i := range 10 {
		shuffled := s
		shuffled.GPUs = slices.Clone(s.GPUs)
		rand.New(rand.NewPCG(uint64(i), 1)).Shuffle(len(shuffled.GPUs), func(a, b int) {
			shuffled.GPUs[a], shuffled.GPUs[b] = shuffled.GPUs[b], shuffled.GPUs[a]
		})
		if changed(dra.New(s, "n", numbers, dra.All(s.GPUs), nil),
			dra.New(shuffled, "n", numbers, dra.All(s.GPUs), nil)) != 0 {
			t.Error("the slices depend on the order of the GPUs in the Snapshot")
		}
	}
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	gpu := func(uuid string, minor int) inventory.GPU { return inventory.GPU{UUID: uuid, Minor: minor} }
	for _, test := range []struct {
		name   string
		before dra.Numbers
		gpus   []inventory.GPU
		want   dra.Numbers
	}{
		{"new", nil, []inventory.GPU{gpu("a", 0), gpu("b", 7)}, dra.Numbers{"a": 0, "b": 7}},
		{"known", dra.Numbers{"a": 4}, []inventory.GPU{gpu("a", 0)}, dra.Numbers{"a": 4}},
		{"the minor is another's", dra.Numbers{"a": 1}, []inventory.GPU{gpu("a", 0), gpu("b", 1)},
			dra.Numbers{"a": 1, "b": 0}},
		{"a GPU that is away", dra.Numbers{"a": 1}, []inventory.GPU{gpu("b", 0)}, dra.Numbers{"a": 1, "b": 0}},
		{"a GPU that was replaced", dra.Numbers{"a": 1}, []inventory.GPU{gpu("b", 1)}, dra.Numbers{"b": 1}},
		{"no minors", nil, []inventory.GPU{gpu("a", -1), gpu("b", 1<<40), gpu("c", 0)},
			dra.Numbers{"a": 0, "b": 1, "c": 2}},
	} {
		before := maps.Clone(test.before)
		if diff := cmp.Diff(test.want, test.before.With(test.gpus)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
		if diff := cmp.Diff(before, test.before); diff != "" {
			t.Errorf("%s: With changed what it was called on:\n%s", test.name, diff)
		}
	}
}
