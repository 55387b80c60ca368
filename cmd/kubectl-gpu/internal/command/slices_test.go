package command_test

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/machines"
)

// TestSlices: each machine has slices, which are marked; the template has nothing of one machine
// alone.
func TestSlices(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, machine := range machines.Names() {
		out := s.must("slices", "--profile", machine)
		for _, text := range strings.Split(strings.TrimPrefix(out, "---\n"), "\n---\n") {
			var slice resourceapi.ResourceSlice
			if err := yaml.UnmarshalStrict([]byte(text), &slice); err != nil || slice.Spec.Driver != "gpu.nvidia.com" ||
				slice.Annotations["gpu-device-plugin.github.io/simulated"] != machine {
				t.Errorf("%s: %v, %v", machine, err, slice.ObjectMeta)
			}
		}
	}
	out := s.must("slices", "--profile", "dgx-h100", "--template", "karpenter")
	if !strings.Contains(out, "kind: NodeOverlay\n") || strings.Count(out, "name: gpu-") != 8 ||
		!strings.Contains(out, "string: NVIDIA H100 80GB HBM3\n") || strings.Contains(out, "GPU-") ||
		strings.Contains(out, "pciBusID") || strings.Contains(out, "NODE") {
		t.Errorf("the template:\n%s", out)
	}
	for _, wrong := range [][]string{{"slices"}, {"slices", "--profile", "dgx-9"},
		{"slices", "--profile", "dgx-h100", "--template", "helm"}} {
		if _, problems, code := s.run(wrong...); code != 1 || !strings.HasPrefix(problems, "error: ") {
			t.Errorf("%v: %d, %s", wrong, code, problems)
		}
	}
	if requests := s.server.Requests(); len(requests) != 0 {
		t.Errorf("a cluster was asked: %v", requests)
	}
}
