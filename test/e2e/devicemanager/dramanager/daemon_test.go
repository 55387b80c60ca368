//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// daemon builds the daemon once, into a folder that TestMain removes.
var daemon = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "gpu-node-agent")
	build := exec.Command("go", "build", "-o", path, "./cmd/gpu-node-agent")
	build.Dir = "../../../.."
	if text, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, text)
	}
	return path, nil
})

// startDaemon starts the daemon on a machine with eight GPUs, all for claims unless the flags say
// otherwise, and returns what ends it with a signal.
func (n *node) startDaemon(flags ...string) (end func(syscall.Signal)) {
	n.t.Helper()
	path, err := daemon()
	if err != nil {
		n.t.Fatal(err)
	}
	process := exec.Command(path, append([]string{"--simulate", "dgx-h100", "--dra-mode", "dra", "--kubelet-root",
		n.path(""),
		"--kubelet-socket", n.path("devices/kubelet.sock"), "--pod-resources-socket", n.path("resources.sock"),
		"--control-socket", n.path("control.sock"), "--state-dir", n.path("state"), "--cdi-dir", n.path("cdi"),
		"--kubeconfig", n.api.Kubeconfig(), "--node-name", nodeName}, flags...)...)
	log, err := os.OpenFile(n.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		n.t.Fatal(err)
	}
	process.Stderr, process.SysProcAttr = log, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := process.Start(); err != nil {
		n.t.Fatal(err)
	}
	end = func(s syscall.Signal) {
		_ = process.Process.Signal(s)
		_ = process.Wait()
	}
	n.t.Cleanup(func() {
		end(syscall.SIGKILL)
		if n.t.Failed() {
			text, _ := os.ReadFile(n.path("log"))
			n.t.Logf("the daemon says:\n%s", text[max(0, len(text)-4000):])
		}
		_ = log.Close()
	})
	return end
}

// published returns the UIDs of the slices, and an error unless all eight GPUs are in them.
func (n *node) published() ([]types.UID, error) {
	var uids []types.UID
	devices := 0
	for _, s := range n.api.Slices() {
		uids = append(uids, s.UID)
		devices += len(s.Spec.Devices)
	}
	if devices != 8 {
		return nil, fmt.Errorf("there are %d devices in %d slices", devices, len(uids))
	}
	return uids, nil
}

func (n *node) awaitPublished() (uids []types.UID) {
	n.t.Helper()
	n.eventually("eight GPUs are published", func() (err error) {
		uids, err = n.published()
		return err
	})
	return uids
}

// startDeviceManager starts a stand-in for kubelet's device manager. Without one nothing shows that
// no pod holds the GPUs in another way.
func (n *node) startDeviceManager() *standin.Kubelet {
	n.t.Helper()
	if err := os.Mkdir(n.path("devices"), 0o750); err != nil {
		n.t.Fatal(err)
	}
	devices, err := standin.Start(standin.Options{Dir: n.path("devices"), PodResourcesSocket: n.path("resources.sock"),
		Version: standin.V137})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(devices.Stop)
	return devices
}

// TestDaemon: the daemon as it is shipped, with kubelet's own managers: it publishes its GPUs and
// prepares claims, through restarts of kubelet, a kill, a roll-out, and without API server.
func TestDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet()
	n.startDeviceManager()
	end := n.startDaemon()
	before := n.awaitPublished()
	pod := n.pod("gpu-2")
	if got := n.runs(pod); !slices.Equal(got, []string{"/dev/nvidia2"}) {
		t.Errorf("the container gets %q", got)
	}
	n.awaitHealth(pod, "Healthy")

	// Kubelet deletes the slices when it starts.
	var took []time.Duration
	for range 5 {
		n.stopKubelet()
		began := time.Now()
		n.startKubelet()
		n.eventually("the slices are others, and complete", func() error {
			now, err := n.published()
			if err == nil && slices.ContainsFunc(now, func(uid types.UID) bool { return slices.Contains(before, uid) }) {
				err = errors.New("they are those of before")
			}
			if err == nil {
				before = now
			}
			return err
		})
		took = append(took, time.Since(began).Round(time.Millisecond))
		n.runs(pod)
	}
	t.Logf("kubelet starts, and deletes the slices → all devices published again: %v", took)

	// The next version comes, and the last one is killed.
	n.startDaemon()
	n.eventually("two drivers serve", func() error {
		if now := n.sockets(); len(now) != 2 {
			return fmt.Errorf("the sockets are %q", now)
		}
		return nil
	})
	beside := n.pod("gpu-3")
	n.runs(beside)
	end(syscall.SIGKILL)
	n.eventually("the socket of the last one is removed", func() error {
		if now := n.sockets(); len(now) != 1 {
			return fmt.Errorf("the sockets are %q", now)
		}
		return nil
	})
	n.runs(n.pod("gpu-4"))
	if now, err := n.published(); err != nil || !slices.Equal(now, before) {
		t.Errorf("in the roll-out slices were deleted: %v %v", now, err)
	}

	// A GPU that a claim has is not given to another one.
	if err := n.prepare(n.pod("gpu-2")); err == nil || !strings.Contains(err.Error(), pod.Name) {
		t.Errorf("a second claim for the GPU: %v", err)
	} else {
		t.Log(err)
	}
	n.api.Stop()
	n.ends(pod)
	n.ends(beside)
	if err := n.api.Resume(); err != nil {
		t.Fatal(err)
	}
	if n.recorded(pod) || n.recorded(beside) {
		t.Error("records are left")
	}
	n.runs(n.pod("gpu-2"))
}
