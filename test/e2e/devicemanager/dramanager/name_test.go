//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"fmt"
	"slices"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"

	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// newName is the name that the driver gets in place of policy.Driver.
const newName = "gpu.example.com"

// awaitSlicesOf waits until all eight GPUs are in slices of a driver.
func (n *node) awaitSlicesOf(driver string) {
	n.t.Helper()
	n.awaitPublished()
	for _, s := range n.api.Slices() {
		if s.Spec.Driver != driver {
			n.t.Errorf("a slice is of %s, want %s", s.Spec.Driver, driver)
		}
	}
}

// gets holds a pod that starts, or starts again, to one GPU.
func (n *node) gets(pod *v1.Pod, gpu string) {
	n.t.Helper()
	// Kubelet 1.36 names a device once more when it has a claim prepared again after its own restart.
	if got := slices.Compact(n.runs(pod)); !slices.Equal(got, []string{gpu}) {
		n.t.Errorf("pod %s gets %q, want %s", pod.Name, got, gpu)
	}
}

// gone ends pods, and removes their claims from the API server.
func (n *node) gone(pods ...*v1.Pod) {
	n.t.Helper()
	for _, pod := range pods {
		n.ends(pod)
		if n.recorded(pod) {
			n.t.Errorf("the record of pod %s is left", pod.Name)
		}
		n.remove(pod)
	}
}

// TestAnotherName: the daemon starts again with another name of the driver while kubelet has
// prepared claims. The name stays, so that kubelet can have them prepared again and ended, over a
// kill and its own restart. It changes when nothing is left under it, and changes back in the same
// way.
func TestAnotherName(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet()
	devices := n.startDeviceManager()
	end := n.startDaemon()
	for _, change := range [][2]string{{policy.Driver, newName}, {newName, policy.Driver}} {
		now, next := change[0], change[1]
		n.awaitSlicesOf(now)
		before := n.pod(now + ":gpu-2")
		n.gets(before, "/dev/nvidia2")
		end(syscall.SIGKILL)
		end = n.startDaemon("--dra-driver-name", next)
		n.gets(before, "/dev/nvidia2")
		later, early := n.pod(now+":gpu-3"), n.pod(next+":gpu-4")
		n.gets(later, "/dev/nvidia3")
		if err := n.prepare(early); err == nil {
			t.Errorf("a claim of %s is prepared while claims of %s are", next, now)
		}
		n.restartKubelet()
		n.gets(before, "/dev/nvidia2")
		n.gone(before, later)
		n.remove(early)

		end(syscall.SIGTERM)
		end = n.startDaemon("--dra-driver-name", next, "--dra-mode", "plugin")
		// Kubelet, too, has removed the slices, when it started: the device plugin serves the GPUs only
		// when this process has.
		n.eventually("the device plugin has all GPUs, and no slice has one", func() error {
			if all, served := n.api.Slices(), devices.Allocatable("nvidia.com/gpu"); len(all) > 0 || served != 8 {
				return fmt.Errorf("there are %d slices, and the device plugin has %d GPUs", len(all), served)
			}
			return nil
		})
		end(syscall.SIGTERM)
		end = n.startDaemon("--dra-driver-name", next)
	}
	n.awaitSlicesOf(policy.Driver)
	pod := n.pod("gpu-2")
	n.gets(pod, "/dev/nvidia2")
	n.gone(pod)
}
