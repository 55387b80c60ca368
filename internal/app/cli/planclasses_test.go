package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// planClasses runs plan -o classes with further arguments.
func planClasses(t *testing.T, args ...string) string {
	t.Helper()
	out, err := run(t, append([]string{"plan", "-o", "classes"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// undividedNode has a GPU in MIG mode without MIG devices.
const undividedNode = `
description: an A100
driver: 580.95.05
cuda: "13.0"
model: a100-sxm4-40gb
gpus:
- {bdf: "0000:43:00.0", pcie: 0/1/0, mig: []}
`

// TestPlanClasses: each resource of a device plugin configuration has a class, with the sharing of
// its devices.
func TestPlanClasses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "{version: v1, sharing: {mps: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}}"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	values := planClasses(t, "--simulate", "t4", "--config-file", file, "--mps-root", "/mps")
	want := `dra:
  classes:
  - config:
    - opaque:
        driver: gpu.nvidia.com
        parameters:
          apiVersion: resource.nvidia.com/v1beta1
          kind: GpuConfig
          sharing:
            strategy: MPS
    extendedResourceName: nvidia.com/gpu.shared
    name: gpu.shared.nvidia.com
    selector: device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type
      == 'gpu' && 'shared' in device.attributes['gpu-device-plugin.github.io']
  shareBy: count
  shares: 4`
	if values != want {
		t.Errorf("-want +got:\n%s", cmp.Diff(want, values))
	}
	table := planClasses(t, "--simulate", "a100-mig-mixed", "--mig-strategy", "mixed")
	if !strings.Contains(table, "mig-1g.10gb.me.nvidia.com") || !strings.Contains(table, "nvidia.com/mig-1g.10gb.me") {
		t.Errorf("of MIG devices:\n%s", table)
	}
	made := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(made, []byte(undividedNode), 0o600); err != nil {
		t.Fatal(err)
	}
	table = planClasses(t, "--simulate", made, "--dra-dynamic-mig", "--mig-strategy", "mixed")
	if !strings.Contains(table, "mig-3g.20gb.nvidia.com") {
		t.Errorf("of MIG devices that can be made:\n%s", table)
	}
	table = planClasses(t, "--simulate", "t4", "--dra-share-by", "unlimited")
	if !strings.Contains(table, "gpu.shared.nvidia.com") {
		t.Errorf("of GPUs that are shared:\n%s", table)
	}
}
