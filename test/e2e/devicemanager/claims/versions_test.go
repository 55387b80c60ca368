package claims

import (
	"os"
	"slices"
	"strings"
	"testing"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/version"
	"k8s.io/kubernetes/pkg/features"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestVersions compares a table of docs/dra.md with the gates of this version of Kubernetes.
func TestVersions(t *testing.T) {
	text, err := os.ReadFile("../../../../docs/dra.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "<!-- versions:")
	table, _, _ = strings.Cut(table, "<!-- end of versions -->")
	known := utilfeature.DefaultMutableFeatureGate.GetAll()
	column, rows := -1, 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if column < 0 {
			column = slices.Index(cells, version.DefaultKubeBinaryVersion)
			continue
		}
		if len(cells) <= column || !strings.HasPrefix(cells[2], "`") {
			continue
		}
		rows++
		gate, want := featuregate.Feature(strings.Trim(cells[2], "`")), "-"
		if _, has := known[gate]; has {
			want = map[bool]string{true: "on", false: "off"}[utilfeature.DefaultFeatureGate.Enabled(gate)]
		}
		if got := cells[column]; got != want {
			t.Errorf("%s is %q in the table, and %q in Kubernetes %s", gate, got, want, version.DefaultKubeBinaryVersion)
		}
	}
	if rows < 8 {
		t.Errorf("the table has %d rows for Kubernetes %s", rows, version.DefaultKubeBinaryVersion)
	}
}

// TestDefaultGates: with what the default gates of this version leave of them, the slices of a node
// are valid, and no claim gets a device that is ill, or a part of a GPU that another claim has.
func TestDefaultGates(t *testing.T) {
	off := func(gate featuregate.Feature) bool { return !utilfeature.DefaultFeatureGate.Enabled(gate) }
	dropped := dra.Dropped{
		Taints: off(features.DRADeviceTaints), Counters: off(features.DRAPartitionableDevices),
		Shares: off(features.DRAConsumableCapacity),
	}
	s := scan(t, "dgx-h100", inventory.Health{State: inventory.Healthy})
	s.GPUs[1].Health = inventory.Health{State: inventory.Unhealthy, XID: 79}
	s.GPUs[2].MIG = inventory.MIGEnabled
	divided := dra.Divided{Profiles: []inventory.MIGProfile{{
		Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4},
		Attributes: inventory.MIGAttributes{GISlices: 3, CISlices: 3},
	}}}
	pool := dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), dra.Divisions{s.GPUs[2].UUID: divided})
	all := objects(t, pool.Shared(4).Without(dropped))
	for i, slice := range all {
		if errs := refused(t, slice); len(errs) > 0 {
			t.Errorf("slice %d is refused: %v", i, errs)
		}
	}
	for count, want := range map[int]int{7: 0, 6: 6} {
		if _, devices := schedulerOf(t, all).allocate(request(t, "gpu.nvidia.com", count, "")); len(devices) != want ||
			slices.Contains(devices, "gpu-1") {
			t.Errorf("a claim for %d GPUs of six that are healthy and whole got %v", count, devices)
		}
	}
}
