package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// commandsOfDocuments runs, word by word, the commands of the documents that ask the cluster: those
// of kubectl that change nothing. Those that change something are in the table of
// docs/dev/testing.md with the stories that do the same.
func commandsOfDocuments(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	commands, err := documents.Commands(*source)
	if err != nil {
		t.Fatal(err)
	}
	place := strings.NewReplacer("$POD", "$POD", "POD=", "POD=", "POD", theDaemonPod(ctx, t, n).Name, "NODE:", "NODE:",
		"NODE", node.Name)
	ran := map[string]bool{}
	pod := "" // the command that finds the pod which later ones name as $POD
	for _, c := range commands {
		words := strings.Fields(c.Text)
		asks := slices.ContainsFunc(words, func(w string) bool {
			return slices.Contains([]string{"get", "events", "status", "list"}, w)
		}) || c.Text == "kubectl gpu"
		finds := strings.HasPrefix(c.Text, "POD=")
		removed := strings.Contains(c.Text, "gpu-device-plugin-cleanup") // it runs once the release is gone
		operator := strings.Contains(c.Text, "-n gpu-operator")          // NVIDIA's, which this node does not have
		if !finds && words[0] != "kubectl" || !asks || removed || operator || strings.Contains(c.Text, "|") || ran[c.Text] {
			continue
		}
		ran[c.Text] = true
		if finds {
			pod = c.Text + ` && test -n "$POD" && `
			c.Text += ` && test -n "$POD"`
		} else if strings.Contains(c.Text, "$POD") {
			c.Text = pod + c.Text
		}
		cmd := exec.CommandContext(ctx, "sh", "-c", place.Replace(c.Text))
		cmd.Env = append(os.Environ(), "KUBECONFIG="+n.Kubeconfig(),
			"PATH="+n.Programs()+":"+filepath.Dir(kubectlGPU())+":"+os.Getenv("PATH"))
		cmd.Dir = *source
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %s: %v: %s", c.File, c.Text, err, out)
		}
	}
	t.Logf("%d commands ran", len(ran))
	if len(ran) < 8 {
		t.Error("the documents have fewer commands of kubectl than they had")
	}
}
