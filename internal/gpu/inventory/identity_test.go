package inventory_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestIdentify: what is wrong is left out beside what was left out before, in the order of the
// GPUs, and nothing else changes.
func TestIdentify(t *testing.T) {
	t.Parallel()
	link := func(peer int) inventory.Link { return inventory.Link{PeerIndex: peer, NVLinks: 2} }
	gpu := func(index int, uuid string) inventory.GPU {
		g := inventory.GPU{Index: index, UUID: uuid, Model: "NVIDIA H100", Minor: index}
		for peer := range 4 {
			if peer != index {
				g.Links = append(g.Links, link(peer))
			}
		}
		return g
	}
	long := "GPU-" + strings.Repeat("x", 92)
	good := inventory.Snapshot{
		GPUs:    []inventory.GPU{gpu(0, "GPU-a"), gpu(1, long), gpu(2, "GPU-b_c.3"), gpu(3, "GPU-4")},
		LeftOut: []inventory.LeftOut{{Index: 4, Reason: "it is lost"}},
	}
	good.GPUs[0].Model, good.GPUs[1].Minor = long, 1<<20-1
	if diff := cmp.Diff(good, inventory.Identify(good, inventory.Snapshot{})); diff != "" {
		t.Errorf("nothing is wrong (-want +got):\n%s", diff)
	}

	bad := good
	bad.GPUs = []inventory.GPU{gpu(0, "GPU-a"), gpu(1, long+"x"), gpu(2, "GPU-b"), gpu(3, "GPU-a")}
	bad.GPUs[2].Minor = 1 << 20
	want := inventory.Snapshot{
		GPUs: []inventory.GPU{gpu(0, "GPU-a")},
		LeftOut: []inventory.LeftOut{
			{Index: 1, Reason: `the GPU cannot be identified: its UUID "` +
				long[:40] + `"... (97 bytes) is not one of NVIDIA's, which begin with GPU-`},
			{Index: 2, Reason: "the GPU cannot be identified: its minor number 1048576 is out of range"},
			{Index: 3, Reason: `the GPU cannot be identified: its UUID "GPU-a" is that of another device`},
			{Index: 4, Reason: "it is lost"},
		},
	}
	want.GPUs[0].Links = []inventory.Link{}
	if diff := cmp.Diff(want, inventory.Identify(bad, inventory.Snapshot{})); diff != "" {
		t.Errorf("much is wrong (-want +got):\n%s", diff)
	}
	// GPU 3 had the UUID first.
	if got := inventory.Identify(bad, inventory.Snapshot{GPUs: []inventory.GPU{gpu(3, "GPU-a")}}); len(got.GPUs) != 1 ||
		got.GPUs[0].Index != 3 {
		t.Errorf("GPU 3 had the UUID, and the GPUs are %v", got.GPUs)
	}
}

// TestIdentifyMIGDevices: of a GPU's MIG devices, only those are left out that cannot be named. A
// GPU has no name with slashes.
func TestDriverVersionsThatCannotBeShown(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{
		"580.95.05": "580.95.05", "": "", "580\n\x1b[31m": `"580\n\x1b[31m"`, "580\xff": `"580\xff"`,
		strings.Repeat("5", 97): `"` + strings.Repeat("5", 40) + `"... (97 bytes)`,
	} {
		got := inventory.Identify(inventory.Snapshot{Driver: inventory.Driver{Version: version}},
			inventory.Snapshot{}).Driver.Version
		if got != want {
			t.Errorf("version %q is shown as %s, want %s", version, got, want)
		}
	}
}

// TestModelThatIsNotPlainText: only its name is in question, so the GPU is served under a cleaned
// one.
func TestModelThatIsNotPlainText(t *testing.T) {
	t.Parallel()
	for model, want := range map[string]string{
		"NVIDIA H100 80GB HBM3": "NVIDIA H100 80GB HBM3", "": "", "H100\n": "H100", "H\x1b[31m100": "H[31m100",
		"H\xff100\xc3": "H100",
		"\x00\xff":     "", strings.Repeat("G", 97): strings.Repeat("G", 96),
		strings.Repeat("é", 49):       strings.Repeat("é", 48),
		"x" + strings.Repeat("é", 49): "x" + strings.Repeat("é", 47),
	} {
		given := []inventory.GPU{{UUID: "GPU-a", Model: model}}
		s := inventory.Identify(inventory.Snapshot{GPUs: given}, inventory.Snapshot{})
		if len(s.GPUs) != 1 || s.GPUs[0].Model != want || len(s.LeftOut) > 0 || given[0].Model != model {
			t.Errorf("model %q: %+v, want %q", model, s, want)
		}
	}
}

// TestWordsThatAreNoUUIDs: a list of devices gives these words a meaning of their own, or other
// characters could be part of a path. A device without a UUID of NVIDIA's form is left out, and the
// others are served.
func TestWordsThatAreNoUUIDs(t *testing.T) {
	t.Parallel()
	for _, uuid := range []string{
		"", "all", "ALL", "none", "void", "0", "0:0", "x", strings.Repeat("x",
			90), "GPU-", "GPU", "gpu-a", "GPU-a,GPU-b", "GPU-a b", "GPU-../x",
		"GPU-a/0", "GPU-a::0", "GPU-a\n", "GPU--", "GPU-é", "MIG-a", "IGPU-a", "nvidia.com/gpu=all",
	} {
		s := inventory.Identify(inventory.Snapshot{GPUs: []inventory.GPU{
			{UUID: "GPU-a"}, {UUID: uuid, Index: 1}, {UUID: "GPU-c", Index: 2, MIGDevices: []inventory.MIGDevice{
				{UUID: strings.Replace(uuid, "MIG-a", "GPU-d", 1)}, {UUID: "MIG-b", Index: 1},
			}},
		}}, inventory.Snapshot{})
		if len(s.GPUs) != 2 || len(s.GPUs[1].MIGDevices) != 1 || len(s.LeftOut) != 2 {
			t.Errorf("%q: %+v", uuid, s)
		}
	}
}

func TestIdentifyMIGDevices(t *testing.T) {
	t.Parallel()
	const old = "MIG-GPU-0a1b/13/0"
	devices := func(uuids ...string) (all []inventory.MIGDevice) {
		for i, uuid := range uuids {
			all = append(all, inventory.MIGDevice{UUID: uuid, Index: i})
		}
		return all
	}
	s := inventory.Identify(inventory.Snapshot{GPUs: []inventory.GPU{
		{UUID: "GPU-a", Index: 0, MIGDevices: devices("MIG-a", old, "MIG/a", "MIG-a", "GPU-b")},
		{UUID: old + "0", Index: 1},
		{UUID: "GPU-b", Index: 2, Minor: -1}, {UUID: "GPU-c", Index: 3, Model: "H100\n"},
		{UUID: "GPU-d", Index: 4, MIGDevices: devices("MIG-GPU-0a1c/1/0")},
	}}, inventory.Snapshot{})
	var got []string
	for _, l := range s.LeftOut {
		got = append(got, fmt.Sprintf("%d %s", l.Index, l.Reason))
	}
	const mig, gpu = "cannot be identified: its UUID ", "the GPU cannot be identified: its "
	want := []string{
		"0 MIG device 0:2 " + mig + `"MIG/a" is not one of NVIDIA's, which begin with MIG-`, "0 MIG device 0:3 " + mig +
			`"MIG-a" is that of another device`,
		"0 MIG device 0:4 " + mig + `"GPU-b" is not one of NVIDIA's, which begin with MIG-`, "1 " + gpu + `UUID "` +
			old + `0" is not one of NVIDIA's, which begin with GPU-`,
		"2 " + gpu + "minor number -1 is out of range",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
	if len(s.GPUs) != 3 || len(s.GPUs[0].MIGDevices) != 2 || s.GPUs[1].Model != "H100" ||
		len(s.GPUs[2].MIGDevices) != 1 {
		t.Errorf("GPUs: %+v", s.GPUs)
	}
}
