package kubeapi_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A pod is evicted once its disruption budget allows it. One that is gone, or is another one, is no
// error and is left alone.
func TestEvict(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	if err := s.AddPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "1"}}); err != nil {
		t.Fatal(err)
	}
	s.SetDisruptionBudget(true)
	err := c.Evict(t.Context(), kubeapi.Pod{Namespace: "ns", Name: "p", UID: "1"})
	if !kubeapi.IsCode(err, http.StatusTooManyRequests) || !strings.Contains(err.Error(), "disruption budget") ||
		len(s.Pods()) != 1 {
		t.Errorf("against a budget: %v, pods %v", err, s.Pods())
	}
	s.SetDisruptionBudget(false)
	for _, pod := range []kubeapi.Pod{{Namespace: "ns", Name: "p", UID: "2"}, {Namespace: "ns", Name: "gone", UID: "1"}} {
		if err := c.Evict(t.Context(), pod); err != nil || len(s.Pods()) != 1 {
			t.Errorf("%v: %v, pods %v", pod, err, s.Pods())
		}
	}
	if err := c.Evict(t.Context(), kubeapi.Pod{Namespace: "ns", Name: "p", UID: "1"}); err != nil || len(s.Pods()) != 0 {
		t.Errorf("%v, pods %v", err, s.Pods())
	}
	s.SetFault(apiserver.Fault{Status: http.StatusForbidden})
	if err := c.Evict(t.Context(), kubeapi.Pod{Namespace: "ns", Name: "p", UID: "1"}); !kubeapi.IsCode(err,
		http.StatusForbidden) {
		t.Errorf("without the right: %v", err)
	}
}

// The state of the layout is taken over from another program, stands beside the labels of others,
// and can be taken away.
func TestMIGStatePatch(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	const state, reason = "nvidia.com/mig.config.state", "gpu-device-plugin.github.io/mig.config.reason"
	change(t, s, func(n *corev1.Node) { n.Labels[state] = "failed" })
	ours := kubeapi.Node{UID: string(get(t, s).UID)}
	if _, err := c.PatchNode(t.Context(), ours, kubeapi.LabelsPatch{"nvidia.com/gpu.count": "8"}); err != nil {
		t.Fatal(err)
	}
	n, err := c.PatchNode(t.Context(), ours, kubeapi.MIGStatePatch{
		Labels: map[string]string{state: "pending"}, Annotations: map[string]string{reason: "because"},
	})
	if err != nil || n.Annotations[reason] != "because" {
		t.Errorf("%v, annotations %v", err, n.Annotations)
	}
	want := map[string]string{"zone": "a", "nvidia.com/gpu.count": "8", state: "pending"}
	if diff := cmp.Diff(want, n.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	n, err = c.PatchNode(t.Context(), ours, kubeapi.MIGStatePatch{})
	delete(want, state)
	if diff := cmp.Diff(want, n.Labels); diff != "" || err != nil || len(n.Annotations) != 0 {
		t.Errorf("%v, annotations %v, labels (-want +got):\n%s", err, n.Annotations, diff)
	}
	if _, err := c.PatchNode(t.Context(), kubeapi.Node{UID: "another"}, kubeapi.MIGStatePatch{}); err == nil {
		t.Error("written to another node")
	}
}
