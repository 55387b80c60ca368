// Package e2e runs the daemon on a real single-node Kubernetes. The script named run makes what
// these tests need and starts them; docs/dev/testing-e2e.md explains.
package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/hack/image"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

var (
	kubeletVersion = flag.String("kubelet", "", "version of the kubelet, such as 1.37.0")
	controlPlane   = flag.String("control-plane", "", "version of the control plane, such as 1.37.0")
	cache          = flag.String("cache", "", "folder that build.sh filled")
	state          = flag.String("state", "", "empty folder for the node's files")
	cgroup         = flag.String("cgroup", "", "cgroup for the node's pods")
	source         = flag.String("source", "", "root of the repository")
	long           = flag.Bool("long", false, "have the stories take as long as what they are about may take on a node")
	pairs          = flag.Int("pairs", 20, "how many pods of each kind start where it is compared how long that takes")
	chart          = flag.String("chart", "", "package of the Helm chart, as a release delivers it")
	imageRoot      = flag.String("image-root", "", "folder that stands for the build stage's /layers/")
)

// What the files in testdata name: the image, and the one for NVIDIA's GPU operator.
const (
	daemonImage = "docker.io/library/gpu-device-plugin:e2e"
	compatImage = "docker.io/library/gpu-device-plugin:e2e-compat"
)

// phase prints how long something took, in the form that the script uses.
func phase(name string, start time.Time) {
	fmt.Printf("e2e: %-38s %6.1f s\n", name, time.Since(start).Seconds())
}

// startNode brings up a node that ends with the test, also when the test program is interrupted.
func startNode(t *testing.T) (context.Context, *node.Node) {
	t.Helper()
	ctx, cancel := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	t.Cleanup(cancel)

	start := time.Now()
	busybox := filepath.Join(*state, "busybox.tar")
	if err := image.FromBusybox("/bin/busybox", node.SandboxImage, busybox); err != nil {
		t.Fatal(err)
	}
	daemon := filepath.Join(*state, "daemon.tar")
	compat := filepath.Join(*state, "compat.tar")
	layers := map[string]string{runtime.GOARCH: *imageRoot}
	for _, i := range []struct{ target, reference, archive string }{{"", daemonImage, daemon},
		{"compat", compatImage, compat}} {
		if err := image.FromDockerfile(filepath.Join(*source, "Dockerfile"), i.target, layers, i.reference,
			i.archive); err != nil {
			t.Fatal(err)
		}
	}
	phase("images assembled", start)

	start = time.Now()
	n, err := node.Start(ctx, node.Options{
		Cache:          *cache,
		State:          *state,
		KubeletVersion: *kubeletVersion,
		ControlPlane:   *controlPlane,
		Cgroup:         *cgroup,
		Images:         []string{busybox, daemon, compat},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	t.Cleanup(func() {
		if t.Failed() {
			explain(t, n)
		}
	})
	phase("node Ready, kubelet "+*kubeletVersion+" and API server "+*controlPlane, start)
	return ctx, n
}
