package cli_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// A fakeCluster is an API server without commands and tasks. It chooses a configuration file, if it
// has one, and records the labels that are written once.
type fakeCluster struct {
	daemon.Cluster
	file   string
	labels map[string]string
}

func (*fakeCluster) Commands() []*cobra.Command { return nil }

func (f *fakeCluster) Choose(context.Context, config.Startup) *feed.Feed[config.Chosen] {
	if f.file == "" {
		return nil
	}
	return feed.New(config.Chosen{File: f.file})
}

func (f *fakeCluster) LabelOnce(_ context.Context, _ config.Startup, labels map[string]string) error {
	f.labels = labels
	return nil
}

// runAgent executes a command line of gpu-node-agent and returns its output.
func runAgent(t *testing.T, cluster *fakeCluster, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	if err := cli.NodeAgent(cluster).Execute(t.Context(), "gpu-node-agent", args, &out); err != nil {
		t.Errorf("%v: %v", args, err)
	}
	return out.String()
}

// TestNamesInExamples: each program's examples have its own name, in every line.
func TestNamesInExamples(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]string{
		"doctor": "\n  gpu-node-agent doctor\n  kubectl -n kube-system exec POD -- gpu-node-agent doctor -o json\n" +
			"  gpu-node-agent doctor --simulate dgx-h100\n",
		"health clear": "\n  gpu-node-agent health clear --gpu 3\n",
	} {
		if help := runAgent(t, &fakeCluster{}, append(strings.Fields(command), "--help")...); !strings.Contains(help,
			"\nExamples:"+want) {
			t.Errorf("%s --help: %s, want %s", command, help, want)
		}
	}
}

// TestFileChosenByALabel: the file chosen by a label of the node counts.
func TestFileChosenByALabel(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("flags: {migStrategy: mixed}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"gpu-feature-discovery", "--oneshot", "--output-file=", "--use-node-feature-api=false",
		"--simulate=a100-mig-mixed"}
	for _, cluster := range []*fakeCluster{{}, {file: file}} {
		if text := runAgent(t, cluster, args...); strings.Contains(text, "mig.strategy=mixed") != (cluster.file != "") {
			t.Errorf("with the file %q:\n%s", cluster.file, text)
		}
	}
}

// TestLabelsOnce: with the API server, labels are written to an object, and a timestamp is optional.
func TestLabelsOnce(t *testing.T) {
	for _, timestamp := range []bool{false, true} {
		cluster := &fakeCluster{}
		args := []string{"gpu-feature-discovery", "--oneshot", "--simulate=t4", "--node-name=a", "--use-node-feature-api"}
		if !timestamp {
			args = append(args, "--no-timestamp")
		}
		text := runAgent(t, cluster, args...)
		if stamp := cluster.labels["nvidia.com/gfd.timestamp"]; text != "" || cluster.labels["nvidia.com/gpu.count"] != "1" ||
			(stamp != "") != timestamp {
			t.Errorf("with a timestamp, %v: it prints %q and writes %v", timestamp, text, cluster.labels)
		}
	}
}
