package command_test

import (
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestRollout: status shows each slot and who waits; pause, resume and retry change what the agents
// read, and say what they did. A node that is changing loses its slot by force alone.
func TestRollout(t *testing.T) {
	s := newStage(t)
	s.add("daemonsets", &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu", Namespace: "gpu-system"},
		Spec: appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{
			Labels: map[string]string{"app.kubernetes.io/name": "gpu-device-plugin"}}}},
	})
	for name, state := range map[string]string{"a": "pending", "b": "failed", "c": "pending", "d": "success", "e": ""} {
		if err := s.server.ChangeNode(name, func(n *corev1.Node) {
			n.Labels = map[string]string{"nvidia.com/mig.config.state": state}
		}); err != nil {
			t.Fatal(err)
		}
	}
	hold := func(name, node, state, reason string, renewed time.Duration, owners ...metav1.OwnerReference) {
		at := metav1.NewMicroTime(time.Now().Add(-renewed))
		acquired := metav1.NewMicroTime(time.Now().Add(-longAgo))
		s.add("leases", &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{
				Name: name, Namespace: "gpu-system", Labels: map[string]string{"gpu-device-plugin.github.io/slot": "true"},
				OwnerReferences: owners,
				Annotations: map[string]string{
					"gpu-device-plugin.github.io/change":        "MIG layout all-balanced",
					"gpu-device-plugin.github.io/change.state":  state,
					"gpu-device-plugin.github.io/change.reason": reason,
				},
			},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &node, AcquireTime: &acquired, RenewTime: &at},
		})
	}
	hold("gpu-change-0", "a", "working", "", 30*time.Second)
	hold("gpu-change-1", "b", "failed", "GPU 3 needs a reset\x1b[2J", time.Minute)
	hold("gpu-change-2", "d", "working", "", time.Hour)
	hold("gpu-change-10", "none", "working", "", time.Minute)
	hold("gpu-change-11", "", "", "", time.Minute)
	hold("gpu-change-12", "e", "working", "", time.Minute, metav1.OwnerReference{Kind: "Node", Name: "e", UID: "earlier"})
	out, problems, code := s.run("rollout", "status")
	want := strings.Join([]string{
		"SLOT            NODE   STATE      SINCE   CHANGE                    REASON",
		"gpu-change-0    a      changing   5h      MIG layout all-balanced   -",
		"gpu-change-1    b      failed     5h      MIG layout all-balanced   GPU 3 needs a reset^[[2J",
		"gpu-change-2    d      silent     5h      MIG layout all-balanced   -",
		"gpu-change-10   none   gone       5h      MIG layout all-balanced   -",
		"gpu-change-11   -      silent     5h      MIG layout all-balanced   the Lease names no node; delete it if nobody needs it",
		"gpu-change-12   e      gone       5h      MIG layout all-balanced   -\n",
	}, "\n")
	if said := "1 changing, 1 failed, 1 waiting, 2 silent, 2 gone: c.\n"; out != want || problems != said || code != 0 {
		t.Errorf("exit status %d\n%s%s\nwant\n%s%s", code, out, problems, want, said)
	}

	for _, test := range []struct {
		arguments []string
		out       string // of the command
		problem   string
	}{
		{[]string{"pause", "--reason", "holidays"}, "Changes are paused. Nodes that are changing finish.\n", ""},
		{[]string{"pause"}, "Changes are paused already.\n", ""},
		{[]string{"resume"}, "Nodes begin changes again within a minute.\n", ""},
		{[]string{"resume"}, "Changes are not paused.\n", ""},
		{[]string{"retry"}, "", "retry needs a node"},
		{[]string{"retry", "c"}, "", "node c has no slot"},
		{[]string{"retry", "a"}, "", "node a is changing"},
		{[]string{"retry", "a", "--force"}, "Slot gpu-change-0 is free. Node a tries again when it gets a slot.\n", ""},
		{[]string{"retry", "b"}, "Slot gpu-change-1 is free. Node b tries again when it gets a slot.\n", ""},
		{[]string{"retry", "b"}, "", "node b has no slot"},
		{[]string{"retry", "d"}, "", "the agent of node d has not renewed its slot"},
		{[]string{"retry", "d", "--force"}, "Slot gpu-change-2 is free. Node d tries again when it gets a slot.\n", ""},
		{[]string{"status", "-n", "other"}, "SLOT   NODE   STATE   SINCE   CHANGE   REASON\n", ""},
	} {
		out, problems, code := s.run(append([]string{"rollout"}, test.arguments...)...)
		if out != test.out || !strings.Contains(problems, test.problem) || (code != 0) != (test.problem != "") {
			t.Errorf("%v: exit status %d, %q, %q; want %q, %q", test.arguments, code, out, problems, test.out, test.problem)
		}
		if test.arguments[0] == "pause" {
			_, said, _ := s.run("rollout", "status")
			if !strings.Contains(said, "Paused (holidays): continue with kubectl gpu rollout resume.") {
				t.Errorf("status while paused: %s", said)
			}
		}
	}
	if left := s.server.Leases("gpu-system"); len(left) != 3 || left[0].Name != "gpu-change-10" {
		t.Errorf("left: %v", left)
	}
}
