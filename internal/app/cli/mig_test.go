package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// runMIG runs a mig command and returns its output.
func runMIG(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return printed(t, append([]string{"mig"}, args...)...)
}

// migNode writes a simulated machine with one GPU of each given model, the last of them busy, and
// returns its path.
func migNode(t *testing.T) string {
	t.Helper()
	return write(t, "node.yaml", `description: One GPU of each model
driver: 580.95.05
cuda: "13.0"
gpus:
- {bdf: "0000:17:00.0", pcie: 0/0/0, model: h100-sxm5-80gb, uuid: GPU-aaaaaaaa-0000-0000-0000-000000000000}
- {bdf: "0000:18:00.0", pcie: 0/0/1, model: t4, uuid: GPU-bbbbbbbb-0000-0000-0000-000000000000}
- {bdf: "0000:19:00.0", pcie: 0/0/2, model: rtx-pro-6000, mig: [1g.24gb+me.all, 1g.24gb-me],
   uuid: GPU-cccccccc-0000-0000-0000-000000000000}
- {bdf: "0000:1a:00.0", pcie: 0/0/3, model: a100-sxm4-80gb, mig: [3g.40gb, 1c.3g.40gb, 1c.3g.40gb],
   uuid: GPU-dddddddd-0000-0000-0000-000000000000}
faults:
- {kind: processes, gpu: "3:0", count: 1}
`)
}

// write writes a file for a test and returns its path.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const layouts = `version: v1
mig-configs:
  mixed:
  - devices: [0]
    mig-enabled: true
    mig-devices: {1c.3g.40gb: 2, 1g.10gb+me: 1}
  - devices: [GPU-cccccccc-0000-0000-0000-000000000000]
    mig-enabled: false
  - devices: all
    device-filter: "0x20B210DE"
    mig-enabled: true
    mig-devices: {3g.40gb: 1, 2g.20gb: 1}
  too-much:
  - {devices: [0, 3, 9], mig-enabled: true, mig-devices: {3g.40gb: 2, 1g.10gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {}}
`

func TestMIGPlan(t *testing.T) {
	t.Parallel()
	node, file := migNode(t), write(t, "layouts.yaml", layouts)
	got, err := runMIG(t, "plan", "--simulate", node, "--config", file, "--layout", "mixed")
	if err != nil {
		t.Fatal(err)
	}
	want := `Layout mixed is possible. It changes 3 of 4 GPUs.

GPU 0  NVIDIA H100 80GB HBM3  GPU-aaaaaaaa-0000-0000-0000-000000000000
  slice    0          1          2          3          4          5          6          7
  before  MIG disabled
  after   |2 x 1c.3g.40gb                             |1g.10gb+me|          |          |          |
   1. enable MIG mode while nothing uses the GPU
   2. create GPU instance 3g.40gb at slices 0 to 3, with 2 x 1c.3g.40gb
   3. create GPU instance 1g.10gb+me at slice 4

GPU 1  Tesla T4  GPU-bbbbbbbb-0000-0000-0000-000000000000
  before  MIG unsupported
  stays: the layout has no item for this GPU

GPU 2  NVIDIA RTX PRO 6000 Blackwell Server Edition  GPU-cccccccc-0000-0000-0000-000000000000
  slice    0      1      2      3      4      5      6      7      8      9      10     11
  before  |1g.24gb+me.all      |1g.24gb-me          |      |      |      |      |      |      |
  after   MIG disabled
   1. destroy GPU instance 3, 1g.24gb+me.all at slices 0 to 2
   2. destroy GPU instance 4, 1g.24gb-me at slices 3 to 5
   3. disable MIG mode while nothing uses the GPU

GPU 3  NVIDIA A100-SXM4-80GB  GPU-dddddddd-0000-0000-0000-000000000000
  slice    0          1          2          3          4          5          6          7
  before  |3g.40gb                                    |2 x 1c.3g.40gb                             |
  after   |3g.40gb                                    |2g.20gb              |          |          |
   1. destroy GPU instance 2, 3g.40gb at slices 4 to 7
   2. create GPU instance 2g.20gb at slices 4 to 5
   =  GPU instance 1, 3g.40gb at slices 0 to 3 stays, in use
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestMIGPlanImpossible(t *testing.T) {
	t.Parallel()
	node, file := migNode(t), write(t, "layouts.yaml", layouts)
	got, err := runMIG(t, "plan", "--simulate", node, "--config", file, "--layout", "too-much")
	if err == nil || err.Error() != "layout too-much is not possible on GPU 0, 1, 3: the plan says why" {
		t.Errorf("got error %v", err)
	}
	for _, want := range []string{
		"Layout too-much is not possible. It changes 0 of 4 GPUs.\n",
		"  before  MIG disabled\n" +
			"  not possible: the instances need 9 memory slices, and the GPU has 8: of them, 2 of 3g.40gb would\n    fit\n",
		"  before  MIG unsupported\n  not possible: the GPU has no multi-instance mode: leave it out of the layout\n",
		"\nwarning: the layout names GPU 9, and there is no such GPU\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	if got, err = runMIG(t, "plan", "--simulate", node, "--config", file, "--layout", "too-much", "--gpu",
		"2"); err != nil {
		t.Errorf("GPU 2, which the layout is not about: %v\n%s", err, got)
	}
}

func TestMIGPlanJSON(t *testing.T) {
	t.Parallel()
	got, err := runMIG(t, "plan", "--simulate", migNode(t), "--layout", "all-3g.40gb", "--gpu",
		"3,GPU-aaaaaaaa-0000-0000-0000-000000000000", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var p layout.Planned
	if err := json.Unmarshal([]byte(got), &p); err != nil {
		t.Fatal(err)
	}
	if len(p.GPUs) != 2 || p.GPUs[0].Index != 0 || p.GPUs[1].Index != 3 || !p.Possible {
		t.Fatalf("got\n%s", got)
	}
	var actions []inventory.MIGAction
	for _, s := range p.GPUs[1].Steps {
		actions = append(actions, s.Action)
	}
	want := []inventory.MIGAction{
		inventory.MIGDestroyCompute, inventory.MIGDestroyCompute, inventory.MIGDestroyInstance, inventory.MIGCreateInstance,
		inventory.MIGCreateCompute,
	}
	if diff := cmp.Diff(want, actions); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if kept := p.GPUs[1].After.Instances[0]; kept.ID == nil || *kept.ID != 1 || !kept.InUse || kept.Start != 0 {
		t.Errorf("kept: %+v", kept)
	}
}

// TestMIGExport exports a layout and plans it: there is nothing to do.
func TestMIGExport(t *testing.T) {
	t.Parallel()
	node := migNode(t)
	got, err := runMIG(t, "export", "--simulate", node)
	if err != nil {
		t.Fatal(err)
	}
	want := `mig-configs:
  current:
  - devices:
    - 0
    mig-devices: {}
    mig-enabled: false
  - devices:
    - 2
    mig-devices:
      1g.24gb+me.all: 1
      1g.24gb-me: 1
    mig-enabled: true
  - devices:
    - 3
    mig-devices:
      1c.3g.40gb: 2
      3g.40gb: 1
    mig-enabled: true
version: v1
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	plan, err := runMIG(t, "plan", "--simulate", node, "--config", write(t, "layouts.yaml", got))
	if err != nil || !strings.HasPrefix(plan, "Layout current is possible. It changes 0 of 4 GPUs.\n") {
		t.Errorf("%v\n%s", err, plan)
	}
	lost := write(t, "node.yaml", `{description: Instances that are not told, driver: 580.95.05, cuda: "13.0", model: h100-sxm5-80gb,
gpus: [{bdf: "0000:17:00.0", pcie: 0/0/0, mig: [1g.10gb]}, {bdf: "0000:18:00.0", pcie: 0/0/0, mig: [1g.10gb]}],
faults: [{kind: fail, gpu: "1", call: DeviceGetGpuInstances, return: NO_PERMISSION}]}`)
	if got, err := runMIG(t, "export", "--simulate", lost, "-o", "json"); err == nil ||
		!strings.Contains(got, `"1g.10gb": 1`) ||
		!strings.HasPrefix(err.Error(), "GPU 1 is not in the layout: the instances cannot be read: no permission") {
		t.Errorf("%v\n%s", err, got)
	}
}

// TestMIGPlanWithProcessesSomewhere has a driver that does not name the instance of a process: each
// may be in use.
func TestMIGPlanWithProcessesSomewhere(t *testing.T) {
	t.Parallel()
	node := write(t, "node.yaml", `{description: A process somewhere, driver: 580.95.05, cuda: "13.0", model: h100-sxm5-80gb,
gpus: [{bdf: "0000:17:00.0", pcie: 0/0/0, mig: [3g.40gb, 3g.40gb]}], faults: [{kind: processes, gpu: "0", count: 1}]}`)
	got, err := runMIG(t, "plan", "--simulate", node, "--layout", "all-7g.80gb")
	if err != nil || strings.Count(got, ", once nothing uses it\n") != 2 {
		t.Errorf("%v\n%s", err, got)
	}
}

// TestMIGPlanUnprivileged has a driver that shows placements and instances only to root.
func TestMIGPlanUnprivileged(t *testing.T) {
	t.Parallel()
	node := write(t, "node.yaml", `description: As a process without privileges sees it
driver: 580.95.05
cuda: "13.0"
model: h100-sxm5-80gb
gpus:
- {bdf: "0000:17:00.0", pcie: 0/0/0}
- {bdf: "0000:18:00.0", pcie: 0/0/1, mig: [1g.10gb]}
faults:
- {kind: fail, call: DeviceGetGpuInstancePossiblePlacements, return: NO_PERMISSION}
- {kind: fail, call: DeviceGetGpuInstances, return: NO_PERMISSION}
`)
	got, err := runMIG(t, "plan", "--simulate", node, "--layout", "all-1g.20gb")
	if err == nil || err.Error() != "layout all-1g.20gb is not possible on GPU 1: the plan says why" {
		t.Errorf("got error %v", err)
	}
	for _, want := range []string{
		"  after   |1g.20gb              |1g.20gb              |1g.20gb              |1g.20gb              |\n",
		"  before  MIG enabled, not known how it is divided\n" +
			"  not possible: the instances cannot be read: no permission: add",
		"SYS_ADMIN",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
}

func TestMIGPlanRefuses(t *testing.T) {
	t.Parallel()
	node := migNode(t)
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"a layout that is not there": {[]string{"--layout", "all-9g.9gb"},
			`--layout: no layout is called "all-9g.9gb": give one of all-1g.10gb, `},
		"no layout": {nil, `--layout: no layout is called "": give one of all-1g.10gb, `},
		"a GPU that is not there": {[]string{"--layout", "all-enabled", "--gpu", "0,4"},
			`--gpu: no GPU has the index or UUID "4"`},
		"a file that is not there": {[]string{"--config", "/none.yaml"}, "--config: "},
		"a file that is wrong":     {[]string{"--config", write(t, "x.yaml", "version: v2")}, "--config "},
		"an output that is not there": {[]string{"-o", "table"},
			`invalid argument "table" for "-o, --output" flag: unknown output "table": give one of text`},
	} {
		_, err := runMIG(t, append([]string{"plan", "--simulate", node}, tt.args...)...)
		if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %s", name, err, tt.want)
		}
	}
}

// TestMIGPlanFits: each built-in layout of each simulated machine fits 100 columns.
func TestMIGPlanFits(t *testing.T) {
	t.Parallel()
	planned := 0
	for _, node := range append(slices.DeleteFunc(simulator.Names(), func(name string) bool { return name == "dgx-2" }),
		migNode(t)) {
		_, err := runMIG(t, "plan", "--simulate", node, "--layout", "?")
		if err == nil {
			t.Fatal("a layout is called ?")
		}
		_, list, _ := strings.Cut(err.Error(), "give one of ")
		for name := range strings.SplitSeq(list, ", ") {
			got, err := runMIG(t, "plan", "--simulate", node, "--layout", name)
			if err != nil {
				t.Errorf("%s: %s: %v", node, name, err)
			}
			planned++
			for line := range strings.Lines(got) {
				if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > 100 {
					t.Errorf("%s: %s: a line of more than 100 columns: %s", node, name, line)
				}
			}
		}
	}
	if planned < 50 {
		t.Errorf("%d plans were tried", planned)
	}
}
