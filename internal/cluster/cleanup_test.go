package cluster_test

import (
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// TestCleanNode: nothing of this program stays on the Node, and all that is of others does. A dry
// run removes nothing.
func TestCleanNode(t *testing.T) {
	onStage(t, func(s *stage) {
		settings := config.Startup{NodeName: nodeName, Kubeconfig: s.server.Kubeconfig()}
		client := kubeapi.New(kubeapi.Options{Kubeconfig: settings.Kubeconfig, Node: nodeName, Dial: s.server.Dial})
		s.change(func(n *corev1.Node) {
			n.Labels = map[string]string{"theirs": "a", "nvidia.com/gpu.deploy.dcgm": "paused-for-mig-change"}
			n.Annotations = map[string]string{"theirs": "b"}
			for _, taint := range kubeapi.OwnTaints() {
				n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: taint.String(), Effect: corev1.TaintEffectNoSchedule})
			}
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: "GPUHealthy",
				Status: corev1.ConditionFalse})
		})
		for _, apply := range []func(kubeapi.Node) (kubeapi.Node, error){
			func(n kubeapi.Node) (kubeapi.Node, error) {
				return client.PatchNode(s.Context(), n, kubeapi.LabelsPatch{"nvidia.com/gpu.count": "8"})
			},
			func(n kubeapi.Node) (kubeapi.Node, error) {
				return client.PatchNode(s.Context(), n, kubeapi.MIGStatePatch{
					Labels:      map[string]string{"nvidia.com/mig.config.state": "failed"},
					Annotations: map[string]string{"gpu-device-plugin.github.io/mig.config.reason": "a"},
				})
			},
			func(n kubeapi.Node) (kubeapi.Node, error) {
				return client.PatchNode(s.Context(), n, kubeapi.ReleaseAnswerPatch{"release": "c"})
			},
		} {
			now, err := client.Get(s.Context())
			if err == nil {
				_, err = apply(now)
			}
			if err != nil {
				s.Fatal(err)
			}
		}
		clean := func(dry bool, want int) {
			s.Helper()
			if done, err := cluster.CleanNode(s.Context(), cluster.Options{Dial: s.server.Dial}, settings, dry); err != nil ||
				len(done) != want {
				s.Errorf("dry %t: it removes %v, want %d parts; %v", dry, done, want, err)
			}
		}
		if writes := s.writes(func() { clean(true, 6) }); writes > 0 {
			s.Errorf("a dry run makes %d writes", writes)
		}
		clean(false, 6)
		n := s.node()
		if want := map[string]string{"theirs": "a", "nvidia.com/gpu.deploy.dcgm": "true"}; !maps.Equal(n.Labels, want) {
			s.Errorf("labels %v, want %v", n.Labels, want)
		}
		if want := map[string]string{"theirs": "b"}; !maps.Equal(n.Annotations, want) {
			s.Errorf("annotations %v, want %v", n.Annotations, want)
		}
		if len(n.Spec.Taints) != 1 || n.Spec.Taints[0].Key != theirTaint || len(n.Status.Conditions) != 1 {
			s.Errorf("taints %v, conditions %v, want those of others", n.Spec.Taints, n.Status.Conditions)
		}
		if writes := s.writes(func() { clean(false, 0) }); writes > 0 {
			s.Errorf("with nothing left it makes %d writes", writes)
		}
	})
}

// TestAwaitCleanup: the Job of the chart waits until the controller has seen the DaemonSet, and all
// of its pods are Ready.
func TestAwaitCleanup(t *testing.T) {
	t.Parallel()
	answers := []string{
		`{"metadata":{"generation":1},"status":{}}`,
		`{"metadata":{"generation":1},"status":{"observedGeneration":1,"desiredNumberScheduled":2,"numberReady":1}}`,
		`{"metadata":{"generation":1},"status":{"observedGeneration":1,"desiredNumberScheduled":2,"numberReady":2}}`,
	}
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/apis/apps/v1/namespaces/ns/daemonsets/d" || asked == len(answers) {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(answers[asked])) // the client says if that fails
		asked++
	}))
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte("{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: c, cluster: {server: '"+
		server.URL+"'}}], contexts: [{name: c, context: {cluster: c}}]}"), 0o600); err != nil {
		t.Fatal(err)
	}
	commands := cluster.New(cluster.Options{}).Commands()
	cmd := commands[slices.IndexFunc(commands, func(c *cobra.Command) bool { return c.Name() == "cleanup-node" })]
	cmd.SetArgs([]string{"--kubeconfig", file, "--await", "ns/d"})
	if err := cmd.ExecuteContext(t.Context()); err != nil || asked != len(answers) {
		t.Errorf("it has asked %d times, want %d: %v", asked, len(answers), err)
	}
}
