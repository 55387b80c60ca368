package command_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/command"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/pty"
)

// addFleet adds 300 nodes, of which node-042 has one bad GPU, node-123 three, and the kubelet of
// node-299 does not respond.
func (s *stage) addFleet() {
	s.t.Helper()
	for i := range 300 {
		name, healthy := fmt.Sprintf("node-%03d", i), 8
		switch i {
		case 42:
			healthy = 7
		case 123:
			healthy = 5
		}
		s.addNode(name, healthy, func(n *corev1.Node) {
			if healthy < 8 {
				n.Status.Conditions = []corev1.NodeCondition{{Type: "GPUHealthy", Status: "False", Message: "XID 79"}}
			}
			if i == 299 {
				n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: "Unknown", LastTransitionTime: readySince}}
			}
		})
		s.addDaemon("daemon-"+name, name, nil)
	}
}

// TestManyNodes: totals first, then the worst nodes, and with --unhealthy only these; models have no
// spaces in JSON and YAML.
func TestManyNodes(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addFleet()
	const totals = "Nodes: 300, of which 3 not healthy. Devices: 2396 healthy of 2400, 0 allocated."
	out, _, _ := s.run()
	rows := strings.Split(fields(out), "\n")
	if len(rows) != 302 || rows[0] != totals || !strings.HasPrefix(rows[2], "node-299 ") ||
		!strings.HasPrefix(rows[3], "node-123 ") || !strings.HasPrefix(rows[4], "node-042 ") ||
		!strings.HasPrefix(rows[5], "node-000 ") {
		t.Errorf("%d lines:\n%s", len(rows), strings.Join(rows[:min(len(rows), 6)], "\n"))
	}
	out, _, _ = s.run("--unhealthy")
	if bad := strings.Split(fields(out), "\n"); !slices.Equal(bad, rows[:5]) {
		t.Errorf("--unhealthy:\n%s", out)
	}
	var told struct {
		Nodes []struct{ Name, Model string }
	}
	out, _, _ = s.run("--unhealthy", "-o", "json")
	if err := json.Unmarshal([]byte(out), &told); err != nil || len(told.Nodes) != 3 ||
		told.Nodes[1].Name != "node-123" || told.Nodes[1].Model != "NVIDIA-H100-80GB-HBM3" {
		t.Errorf("JSON: %v, %+v", err, told)
	}
	s.addDaemon("daemon-node-042", "node-042", answering(status.Status{GPUs: []status.Device{gpu(0, "Healthy"), fallen(3)}}))
	if got := fields(s.must("list", "node-042", "--unhealthy")); strings.Count(got, "\n") != 1 || !strings.HasSuffix(got,
		" daemon reboot XID 79 (GPU fell off the bus): restart the node") {
		t.Errorf("list --unhealthy:\n%s", got)
	}
}

// TestNarrowTerminal: in a terminal of 80 columns no line is longer; reasons and remedies have lines
// of their own, and only -o wide has the last columns.
func TestNarrowTerminal(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a-node-with-a-name-of-forty-columns-in-all", 7, nil)
	s.addNode("b", 8, nil)
	s.addDaemon("daemon-a", "a-node-with-a-name-of-forty-columns-in-all", answering(status.Status{Version: "v1",
		GPUs: []status.Device{gpu(0, "Healthy"), fallen(3)}, Holders: []status.Holder{}}))
	for _, arguments := range [][]string{nil, {"list"}} {
		shown := pty.Shown(t, 80, func(out *os.File) { s.runAt(out, arguments...) })
		for line := range strings.Lines(shown) {
			if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > 80 {
				t.Errorf("%v: a line has more than 80 columns: %q", arguments, line)
			}
		}
		if arguments != nil && !strings.Contains(shown,
			"\n  remedy: reboot; reason: XID 79 (GPU fell off the bus): restart the node\n") {
			t.Errorf("no line for the reason:\n%s", shown)
		}
	}
	if shown := pty.Shown(t, 80, func(out *os.File) { s.runAt(out, "-o", "wide") }); !strings.Contains(shown, "RESOURCES") {
		t.Errorf("wide:\n%s", shown)
	}
}

// runAt runs kubectl gpu with its output at a file.
func (s *stage) runAt(out *os.File, arguments ...string) {
	command.Run(s.t.Context(), append([]string{"--kubeconfig", s.server.Kubeconfig()}, arguments...), nil, out, &strings.Builder{})
}

// TestReadyRights: the roles in deployments/kubectl-gpu permit every request of the commands.
func TestReadyRights(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../../deployments/kubectl-gpu/clusterrole.yaml")
	if err != nil {
		t.Fatal(err)
	}
	permitted := map[string][]string{} // verbs by resource
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var role rbacv1.ClusterRole
		if err := yaml.UnmarshalStrict([]byte(document), &role); err != nil {
			t.Fatal(err)
		}
		for _, rule := range role.Rules {
			for _, resource := range rule.Resources {
				permitted[resource] = append(permitted[resource], rule.Verbs...)
			}
		}
	}
	s := newStage(t)
	s.addNode("a", 7, func(n *corev1.Node) { n.Labels = nil })
	s.addDaemon("daemon-a", "a", answering(status.Status{GPUs: []status.Device{gpu(0, "Healthy")}}))
	s.addNode("b", 8, nil)
	s.addPod("p", "", 9, corev1.PodPending)
	s.add("leases", &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Name: "gpu-change-0", Namespace: "gpu", Labels: map[string]string{"gpu-device-plugin.github.io/slot": "true"},
			Annotations: map[string]string{"gpu-device-plugin.github.io/change.state": "failed"},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("b")},
	})
	var mu sync.Mutex
	requests := map[apiserver.Request]bool{}
	s.server.SetFault(apiserver.Fault{Only: func(r apiserver.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		requests[r] = true
		return false
	}})
	for _, arguments := range []string{"", "a", "list", "why p -n team", "status a", "reset a --gpu 0",
		"rollout status -n gpu", "rollout pause -n gpu", "rollout resume -n gpu", "rollout retry b -n gpu"} {
		s.run(strings.Fields(arguments)...)
	}
	mu.Lock()
	defer mu.Unlock()
	for r := range requests {
		if !slices.Contains(permitted[r.Resource], r.Verb) {
			t.Errorf("%s %s is not permitted", r.Verb, r.Resource)
		}
	}
	if len(s.server.Leases("gpu")) > 0 {
		t.Error("retry has not freed the slot")
	}
	if len(requests) < 6 || !slices.Contains(permitted["pods/exec"], "create") {
		t.Errorf("requests: %v; permitted: %v", requests, permitted)
	}
}
