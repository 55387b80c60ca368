package e2e

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// kubectlGPU is the path of the plugin of kubectl.
func kubectlGPU() string { return filepath.Join(filepath.Dir(*imageRoot), "kubectl-gpu") }

// explains asks kubectl gpu why a pod has no GPU or lost it, and wants a sentence with each of these parts.
func explains(ctx context.Context, t *testing.T, n *node.Node, pod string, parts ...string) {
	t.Helper()
	out, err := exec.CommandContext(ctx, kubectlGPU(), "--kubeconfig", n.Kubeconfig(), "why", pod).CombinedOutput()
	if err != nil {
		t.Errorf("kubectl gpu why %s: %v: %s", pod, err, out)
		return
	}
	t.Logf("kubectl gpu why %s: %s", pod, strings.TrimSpace(string(out)))
	for _, part := range parts {
		if !strings.Contains(string(out), part) {
			t.Errorf("kubectl gpu why %s says %q, want %q in it", pod, out, part)
		}
	}
}
