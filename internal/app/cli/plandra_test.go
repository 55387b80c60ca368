package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// planDRA runs plan --dra with further arguments, in a process of its own.
func planDRA(t *testing.T, args ...string) (out, complaints string) {
	t.Helper()
	cmd := program(t, append([]string{"plan", "--dra", "--control-socket="}, args...)...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	return stdout.String(), stderr.String()
}

// dividedNode has a lost GPU, and a GPU in MIG mode without MIG devices.
const dividedNode = `
description: two A100
driver: 580.95.05
cuda: "13.0"
model: a100-sxm4-40gb
gpus:
- {bdf: "0000:1b:00.0", pcie: 0/0/0}
- {bdf: "0000:43:00.0", pcie: 0/1/0, mig: []}
faults:
- {kind: lost, gpu: "0"}
`

func TestPlanDRA(t *testing.T) {
	table, _ := planDRA(t, "--simulate", "dgx-1", "--node-name", "node-1")
	want := `pool node-1, slice 1 of 1: 8 devices
  DEVICE   PROFILE   PRODUCT                GROUP OF 2   OF 4    OF 8    TAINT
  gpu-0    -         Tesla V100-SXM2-16GB   gpu-0        gpu-0   gpu-0   -
`
	if got, _, _ := strings.Cut(table, "  gpu-3"); got != want {
		t.Errorf("-want +got:\n%s", cmp.Diff(want, got))
	}
	state := t.TempDir() // of this machine's daemon, not the simulated node's
	if err := os.WriteFile(filepath.Join(state, "dra-numbers.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	text, _ := planDRA(t, "--simulate", "dgx-1", "-o", "json", "--state-dir", state)
	var list struct {
		Kind  string
		Items []struct {
			Spec struct{ NodeName, Driver string }
		}
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil || list.Kind != "List" || len(list.Items) != 1 ||
		list.Items[0].Spec.NodeName != host {
		t.Errorf("%v, %+v", err, list)
	}
}

// TestPlanDRADivides: MIG devices for claims are printed with their counters. With dra.mode split,
// only selected GPUs have them.
func TestPlanDRADivides(t *testing.T) {
	profile := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(profile, []byte(dividedNode), 0o600); err != nil {
		t.Fatal(err)
	}
	table, complaints := planDRA(t, "--simulate", profile, "--node-name", "node-1", "--dra-dynamic-mig")
	for _, want := range []string{
		"pool node-1, slice 1 of 2: counters of 1 GPU\n" +
			"  gpu-1: copy-engines=7 decoders=5 instances-20 jpeg-engines media-extension memory=40192Mi memory-slice-0 ",
		" multiprocessors=98 ofa-engines\n",
		"pool node-1, slice 2 of 2: 25 devices\n  DEVICE                    PROFILE     PRODUCT                 TAKES   ",
		"  gpu-1-mig-1g10gb-15-6     1g.10gb     NVIDIA A100-SXM4-40GB   copy-engines decoders memory=9984Mi " +
			"memory-slice-6 memory-slice-7 multiprocessors=14    ",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("the table lacks %q:\n%s", want, table)
		}
	}
	if strings.Contains(complaints, "it has no MIG devices") {
		t.Errorf("standard error has %q", complaints)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("{version: v1, dra: {mode: split, gpus: {indices: [3]}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	table, _ = planDRA(t, "--simulate", "dgx-1", "--node-name", "node-1", "--config-file", file)
	if !strings.HasPrefix(table, "pool node-1, slice 1 of 1: 1 device\n") || !strings.Contains(table, "\n  gpu-3 ") {
		t.Errorf("of the mode split:\n%s", table)
	}
}

// TestPlanDRAShares: the table shows the greatest number of claims of a GPU, and the smallest part.
// MIG devices are not shared.
func TestPlanDRAShares(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("{version: v1, dra: {shares: 4}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	table, _ := planDRA(t, "--simulate", "dgx-1", "--node-name", "node-1", "--config-file", file)
	want := `pool node-1, slice 1 of 1: 8 devices
  DEVICE   PROFILE   PRODUCT                GROUP OF 2   OF 4    OF 8    SHARES         TAINT
  gpu-0    -         Tesla V100-SXM2-16GB   gpu-0        gpu-0   gpu-0   4 x 4096 MiB   -
`
	if got, _, _ := strings.Cut(table, "  gpu-3"); got != want {
		t.Errorf("-want +got:\n%s", cmp.Diff(want, got))
	}
	profile := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(profile, []byte(dividedNode), 0o600); err != nil {
		t.Fatal(err)
	}
	table, _ = planDRA(t, "--simulate", profile, "--node-name", "node-1", "--dra-dynamic-mig", "--config-file", file)
	if strings.Contains(table, "SHARES") {
		t.Errorf("without whole GPUs the table is\n%s", table)
	}
}

func TestPlanDRALeavesOut(t *testing.T) {
	profile := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(profile, []byte(dividedNode), 0o600); err != nil {
		t.Fatal(err)
	}
	text, complaints := planDRA(t, "--simulate", profile, "--node-name", "node-1", "-o", "yaml")
	if !strings.HasPrefix(text, "apiVersion: v1\nitems:\n- apiVersion: resource.k8s.io/v1\n  kind: ResourceSlice\n") {
		t.Errorf("got %s", text)
	}
	for _, want := range []string{"left out: GPU 0: the GPU cannot be identified",
		"MIG is enabled on it, but it has no MIG devices"} {
		if !strings.Contains(complaints, want) {
			t.Errorf("standard error has %q, want %q", complaints, want)
		}
	}
}

// TestPlanDRAOfFaults: the taint of a device has its value and effect, and a slice without devices is
// one line.
func TestPlanDRAOfFaults(t *testing.T) {
	t.Parallel()
	table, _ := planDRA(t, "--simulate", brokenNode(t), "--node-name", "n")
	want := `pool n, slice 1 of 1: 3 devices
  DEVICE   PROFILE   PRODUCT    GROUP OF 2   OF 4   OF 8   TAINT
  gpu-2    -         Tesla T4   gpu-2        -      -      -
  gpu-3    -         Tesla T4   gpu-2        -      -      -
  gpu-0    -         Tesla T4   -            -      -      gpu.nvidia.com/unhealthy=reset:NoSchedule
`
	if diff := cmp.Diff(want, table); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	lost := write(t, "node.yaml", `{description: A lost GPU, driver: 580.95.05, cuda: "13.0", model: t4,
gpus: [{bdf: "0000:17:00.0", pcie: 0/0/0}], faults: [{kind: lost, gpu: "0"}]}`)
	if table, _ := planDRA(t, "--simulate", lost, "--node-name", "n"); table != "pool n, slice 1 of 1: 0 devices\n" {
		t.Errorf("without devices: %q", table)
	}
}
