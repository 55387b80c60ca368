package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// dividedMachine are the values of a release that makes MIG devices for claims, on two GPUs in MIG
// mode without MIG devices.
const dividedMachine = agentValues + `
simulate: /config/machine.yaml
dra: {enabled: true, dynamicMIG: true}
config:
  default: daemon.yaml
  map:
    daemon.yaml: "version: v1"
    machine.yaml: |
      description: two A100 in MIG mode
      driver: 580.95.05
      cuda: "13.0"
      model: a100-sxm4-40gb
      gpus:
      - {bdf: "0000:1b:00.0", pcie: 0/0/0, mig: []}
      - {bdf: "0000:43:00.0", pcie: 0/1/0, mig: []}
`

// partitions is how many MIG devices can be made of each of them.
const partitions = 25

// madeForClaims: an API server without counters has no device that is made for a claim; with them,
// pods with claims on MIG devices come and go, each has device nodes of its own, and no slice is
// written for them. A daemon that is killed goes on with their claims.
func madeForClaims(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	installDriver(ctx, t)
	restart := func(ctx context.Context, args ...string) {
		t.Helper()
		n.StopAPIServer()
		if err := n.StartAPIServer(ctx, args...); err != nil {
			t.Error(err)
		}
	}
	restart(ctx, "--feature-gates=DRAPartitionableDevices=false")
	t.Cleanup(func() { restart(context.Background()) })
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, dividedMachine)...)...)
	t.Cleanup(func() { explainClaims(t, n) })
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	wait(ctx, t, func(context.Context) error {
		if logs := kubectl(ctx, t, n, "--namespace", namespace, "logs", "daemonset/"+daemonSet); !strings.Contains(logs,
			"drops counters") {
			return errors.New("the daemon does not know that the API server keeps no counters")
		}
		return nil
	})
	waitDevices(ctx, t, n, 0)
	if found := devicesOf(ctx, t, n); len(found) > 0 {
		t.Errorf("without counters %d devices are in slices", len(found))
	}

	restart(ctx)
	killDaemon(ctx, t, n) // which asks the API server again
	start := time.Now()
	waitDevices(ctx, t, n, 2*partitions)
	phase("the MIG devices that can be made are in slices", start)
	makeNodes(t, driverRoot, capabilitiesOf(simulatedGPUs(ctx, t, n)))
	for name, profile := range map[string]string{"small": "1g.5gb", "third": "3g.20gb"} {
		makeMIGTemplate(ctx, t, n, name, profile)
	}

	before := versions(slicesOf(ctx, t, n))
	pods := []string{"small-0", "small-1", "small-2", "third-0"}
	run := func(name string) {
		t.Helper()
		start := time.Now()
		startPod(ctx, t, n, podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(strings.Split(name,
			"-")[0])}))
		waitPod(ctx, t, n, name, isRunning)
		phase("a pod with a MIG device that is made runs", start)
	}
	made := func(want int) {
		t.Helper()
		wait(ctx, t, func(ctx context.Context) error {
			found := 0
			for _, g := range simulatedGPUs(ctx, t, n) {
				found += len(g.MIG)
			}
			if found != want {
				return fmt.Errorf("the GPUs have %d MIG devices, want %d", found, want)
			}
			return prepared(want)
		})
	}
	for _, name := range pods {
		run(name)
	}
	made(len(pods))
	for _, name := range []string{"small-1", "third-0"} {
		deletePod(ctx, t, n, name)
		made(len(pods) - 1)
		run(name)
		made(len(pods))
	}
	users := map[string]string{} // of capability nodes
	running := map[string]*corev1.Pod{}
	for _, name := range pods {
		running[name] = getPod(ctx, t, n, name)
		seen := strings.Fields(shell(ctx, t, n, name, "cd /dev; for f in nvidia-caps/*; do [ -c $f ] && echo $f; done; true"))
		if gpus := nodesIn(ctx, t, n, name); len(gpus) != 1 || len(seen) != 2 {
			t.Errorf("pod %s has the GPUs %v and the capabilities %v, want one and two", name, gpus, seen)
		}
		for _, path := range seen {
			if users[path] != "" {
				t.Errorf("the pods %s and %s have %s", users[path], name, path)
			}
			users[path] = name
		}
	}
	explainsCounters(ctx, t, n)
	if after := versions(slicesOf(ctx, t, n)); !maps.Equal(before, after) {
		t.Errorf("slices were written for claims: %v, then %v", before, after)
	}

	// The simulated machine is a new one with each daemon: what was made is gone, and the claims are
	// there still.
	killDaemon(ctx, t, n)
	waitDevices(ctx, t, n, 2*partitions)
	if out := daemonExec(ctx, t, n, "status"); strings.Count(out, "claim: default/") != len(pods) {
		t.Errorf("status does not show the claims:\n%s", out)
	}
	for _, name := range slices.Sorted(maps.Keys(running)) {
		if err := isSame(running[name])(getPod(ctx, t, n, name)); err != nil {
			t.Error(err)
		}
		deletePod(ctx, t, n, name)
	}
	wait(ctx, t, func(context.Context) error { return prepared(0) })
	run("third-1")
	made(1)
	deletePod(ctx, t, n, "third-1")
	made(0)
}

// switchedMachine are the values of a release that gives one Hopper GPU as a whole or in parts.
const switchedMachine = agentValues + `
simulate: /config/machine.yaml
dra: {enabled: true, dynamicMIG: true, switchMIG: true}
config:
  default: daemon.yaml
  map:
    daemon.yaml: "version: v1"
    machine.yaml: |
      description: one H100
      driver: 580.95.05
      cuda: "13.0"
      model: h100-sxm5-80gb
      gpus:
      - {bdf: "0000:1b:00.0", pcie: 0/0/0}
`

// explainClaims logs what the node and the API server say about claims, where the test has failed.
func explainClaims(t *testing.T, n *node.Node) {
	t.Helper()
	if t.Failed() {
		explain(t, n)
		out, err := n.Kubectl(context.Background(), "get", "pods,resourceclaims,resourceslices", "--output", "yaml")
		t.Logf("error %v:\n%s", err, out)
	}
}

// wholeOrInParts: pods with a claim on the whole GPU and pods with claims on MIG devices of it come
// and go. They never have it at the same time, no slice is written for it, and a daemon that is
// killed goes on with the claims.
func wholeOrInParts(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	installDriver(ctx, t)
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, switchedMachine)...)...)
	t.Cleanup(func() { explainClaims(t, n) })
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitDevices(ctx, t, n, 1+partitions)
	makeNodes(t, driverRoot, capabilitiesOf(simulatedGPUs(ctx, t, n)))
	makeTemplate(ctx, t, n, "whole", oneGPU)
	makeMIGTemplate(ctx, t, n, "small", "1g.10gb")
	before := versions(slicesOf(ctx, t, n))

	create := func(name string) {
		t.Helper()
		startPod(ctx, t, n, podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(strings.Split(name,
			"-")[0])}))
	}
	gets := func(name string, capabilities int) {
		t.Helper()
		start := time.Now()
		waitPod(ctx, t, n, name, isRunning)
		phase("pod "+name+" runs", start)
		seen := strings.Fields(shell(ctx, t, n, name, "cd /dev; for f in nvidia-caps/*; do [ -c $f ] && echo $f; done; true"))
		if gpus := nodesIn(ctx, t, n, name); len(gpus) != 1 || len(seen) != capabilities {
			t.Errorf("pod %s has the GPUs %v and the capabilities %v, want one and %d", name, gpus, seen, capabilities)
		}
	}
	create("whole-0")
	gets("whole-0", 0)
	create("small-0")
	waitUnschedulable(ctx, t, n, "small-0")
	deletePod(ctx, t, n, "whole-0")
	gets("small-0", 2)
	create("small-1")
	gets("small-1", 2)
	create("whole-1")
	waitUnschedulable(ctx, t, n, "whole-1")
	deletePod(ctx, t, n, "small-0")
	wait(ctx, t, func(context.Context) error { return prepared(1) })
	waitUnschedulable(ctx, t, n, "whole-1")
	if after := versions(slicesOf(ctx, t, n)); !maps.Equal(before, after) {
		t.Errorf("slices were written for claims: %v, then %v", before, after)
	}

	// The simulated machine is a new one with each daemon: MIG mode is off, and the MIG device is
	// gone. The claim is there still.
	running := getPod(ctx, t, n, "small-1")
	killDaemon(ctx, t, n)
	// a call that kubelet cannot make comes again after a minute
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitDevices(ctx, t, n, 1+partitions)
	if err := isSame(running)(getPod(ctx, t, n, "small-1")); err != nil {
		t.Error(err)
	}
	deletePod(ctx, t, n, "small-1")
	gets("whole-1", 0)
	deletePod(ctx, t, n, "whole-1")
	wait(ctx, t, func(context.Context) error { return prepared(0) })
}

// killDaemon kills the daemon, and waits until its container has been started again.
func killDaemon(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	restarts := theDaemonPod(ctx, t, n).Status.ContainerStatuses[0].RestartCount
	if err := syscall.Kill(daemonProcess(t), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait(ctx, t, func(ctx context.Context) error {
		pod, err := daemonPod(ctx, n)
		if err == nil && pod.Status.ContainerStatuses[0].RestartCount == restarts {
			err = errors.New("the daemon's container has not been restarted")
		}
		return err
	})
}

// capabilitiesOf returns GPUs with all MIG devices that they can have, by their places at the
// driver.
func capabilitiesOf(gpus []simulated) []simulated {
	for i := range gpus {
		gpus[i].MIG = nil
		for gi := range 15 {
			gpus[i].MIG = append(gpus[i].MIG, simulatedMIG{GI: gi})
		}
	}
	return gpus
}

// makeMIGTemplate makes a ResourceClaimTemplate with one MIG device of a profile until the test
// ends.
func makeMIGTemplate(ctx context.Context, t *testing.T, n *node.Node, name, profile string) {
	t.Helper()
	templates := n.Client.ResourceV1().ResourceClaimTemplates(corev1.NamespaceDefault)
	object := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: name}}
	object.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "mig.nvidia.com", Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes[%q].profile == %q", "gpu.nvidia.com", profile),
		}}},
	}}}
	if _, err := templates.Create(ctx, object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = templates.Delete(context.Background(), name, metav1.DeleteOptions{}) })
}
