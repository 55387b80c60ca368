//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"fmt"

	v1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// sharesDevices has pods with shares of one GPU, one of them with two, start and end in either
// order. Kubelet started again ends what is left.
func (n *node) sharesDevices() {
	n.t.Helper()
	n.startKubelet()
	n.startRegistered()
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		pods := []*v1.Pod{n.pod("gpu-0/one"), n.pod("gpu-0/two", "gpu-0/three")}
		whole := n.pod("gpu-0")
		for i, want := range []string{"[/dev/nvidia0]", "[/dev/nvidia0 /dev/nvidia0]"} {
			if got := fmt.Sprint(n.runs(pods[i])); got != want {
				n.t.Errorf("pod %d with shares has the device nodes %s, want %s", i, got, want)
			}
		}
		n.restartKubelet()
		for _, i := range order {
			if err := n.prepare(whole); err == nil {
				n.t.Error("a GPU of which pods have shares was given whole")
			}
			n.runs(pods[i]) // again
			n.ends(pods[i])
			if n.recorded(pods[i]) {
				n.t.Errorf("the record of pod %d is left", i)
			}
		}
		n.runs(whole)
		n.ends(whole)
		for _, pod := range append(pods, whole) {
			n.remove(pod)
		}
	}
}

// reflectsHealth has the first GPU, of which each of some pods has this, become ill.
func (n *node) reflectsHealth(devices ...string) {
	n.t.Helper()
	n.startKubelet()
	n.startRegistered()
	var pods []*v1.Pod
	for _, device := range devices {
		pods = append(pods, n.pod(device))
		n.runs(pods[len(pods)-1])
	}
	await := func(want string) {
		n.t.Helper()
		for _, pod := range pods {
			n.awaitHealth(pod, want)
		}
	}
	beside := n.pod("gpu-1")
	n.runs(beside)
	await("Healthy")
	n.setHealth(inventory.Health{State: inventory.Unhealthy, Reason: "XID 79: GPU has fallen off the bus", XID: 79,
		Remedy: inventory.RemedyReboot})
	await("Unhealthy XID 79: GPU has fallen off the bus; remedy: reboot")
	n.awaitHealth(beside, "Healthy")
	n.setHealth(inventory.Health{State: inventory.Unknown, Reason: "the driver does not answer"})
	await("Unknown the driver does not answer")
	n.setHealth(inventory.Health{State: inventory.Healthy})
	await("Healthy")
}
