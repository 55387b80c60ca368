package field_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestClassesOfResources: plan -o classes names each resource that claims cannot replace (kdp#1786;
// C1). The scheduler's allocator holds the same for random configurations in
// test/e2e/devicemanager/claims.
func TestClassesOfResources(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args, file   string
		says, prints []string
		without      string // what is not printed
		status       int
	}{
		"one GPU is shared, and the others are not": {
			"--simulate=dgx-h100", `{version: v1, sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, devices: ["0"], replicas: 4}]}}}`,
			[]string{"nvidia.com/gpu: no claim can have 7 of its 7 devices: they are not shared",
				"claims cannot replace nvidia.com/gpu on this node"},
			[]string{"extendedResourceName: nvidia.com/gpu.shared", "shares: 4"}, "extendedResourceName: nvidia.com/gpu\n", 1,
		},
		"all are shared": {
			"--simulate=dgx-h100", "{version: v1, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}",
			nil, []string{"extendedResourceName: nvidia.com/gpu\n", "shares: 4"}, "no claim", 0,
		},
		"claims have fewer shares": {
			"--simulate=t4", "{version: v1, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 400}]}}}",
			[]string{"each device has 48 shares for claims: the device plugin has 400 replicas of a device"}, []string{"shares: 48"}, "no claim", 0,
		},
		"only the GPUs of claims count": {
			"--simulate=dgx-h100", `{version: v1, dra: {mode: split, gpus: {indices: ["0"]}}, sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}}`,
			nil, []string{"nvidia.com/gpu.shared"}, "no claim", 0,
		},
		"whole GPUs in MIG mode": {
			"--simulate=h100-mig-1g", "version: v1", []string{"nvidia.com/gpu: no claim can have 8 of its 8 devices: the GPUs are in MIG mode"},
			[]string{"classes: []"}, "extendedResourceName", 1,
		},
		"units of memory": {
			"--simulate=t4", `{version: v1, units: {enforce: none}, selectors: [{indices: ["0"], units: true}]}`,
			[]string{"volcano.sh/gpu-mem.128Mi: no claim can have"}, []string{"classes: []"}, "extendedResourceName", 1,
		},
		"names of shares": {
			"--simulate=t4 --dra-share-by=unlimited", "version: v1", []string{"pods ask for nvidia.com/gpu.shared in place of nvidia.com/gpu"},
			[]string{"shareBy: unlimited"}, "no claim", 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(file, []byte(c.file), 0o600); err != nil {
				t.Fatal(err)
			}
			text, status := run(t, append([]string{"plan", "-o", "classes", "--config-file", file},
				strings.Fields(c.args)...)...)
			if status != c.status || strings.Contains(text, c.without) {
				t.Errorf("exit status %d, want %d, and nothing of %q:\n%s", status, c.status, c.without, text)
			}
			for _, want := range append(c.says, c.prints...) {
				if !strings.Contains(text, want) {
					t.Errorf("no %q in:\n%s", want, text)
				}
			}
		})
	}
}
