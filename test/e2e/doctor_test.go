package e2e

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// doctorSeesTheNode runs doctor in the daemon's container, as the static manifest makes it: there
// it sees containerd, kubelet and the daemon. The node has no runtime of NVIDIA's, which the device
// list strategy would need.
func doctorSeesTheNode(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	// Its exit status is 3, because there is an error.
	out, err := n.Kubectl(ctx, "-n", namespace, "exec", theDaemonPod(ctx, t, n).Name, "--", "gpu-device-plugin", "doctor",
		"-o", "json")
	if err == nil {
		t.Error("doctor exits with 0 and the node has no runtime of NVIDIA's")
	}
	var report struct {
		Node     string `json:"node"`
		Findings []struct {
			Check, Severity, Message string
			Evidence                 []string
		} `json:"findings"`
	}
	text, _, _ := strings.Cut(out[max(0, strings.Index(out, "{")):], "\n}\n")
	if err := json.Unmarshal([]byte(text+"\n}"), &report); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	severities := map[string]string{}
	for _, f := range report.Findings {
		if f.Severity != "ok" {
			t.Logf("%s: %s: %s %v", f.Check, f.Severity, f.Message, f.Evidence)
		}
		if severities[f.Check] == "" { // the worst comes first
			severities[f.Check] = f.Severity
		}
	}
	for check, want := range map[string]string{
		"container-runtime": "ok", "nvidia-runtime": "error", "daemon-reload": "ok", "kubelet": "ok", "pod-resources": "ok", "selinux": "ok",
		"device-nodes": "ok", "persistence": "ok", "daemon": "info", // the GPUs are simulated
	} {
		if severities[check] != want {
			t.Errorf("%s is %q, want %q", check, severities[check], want)
		}
	}
	if want := "the node's files: /driver-root"; !strings.HasPrefix(report.Node, want) {
		t.Errorf("doctor looked at %q, want %q", report.Node, want)
	}
}
