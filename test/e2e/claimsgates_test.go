package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubewatch "k8s.io/apimachinery/pkg/watch"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// noMutatingPolicies says why pods in HAMi's words are not changed.
const noMutatingPolicies = "MutatingAdmissionPolicies of admissionregistration.k8s.io/v1 are not served before Kubernetes 1.36"

// gateOff says that a feature is off by default.
func gateOff(gate string) string {
	return "the gate " + gate + " is off by default before Kubernetes 1.36"
}

// claimsWithGatesOff: the API server drops taints and shares of devices. A GPU that fails, free or
// in use, leaves the slice, no claim gets it, and its pod runs on; a restarted kubelet does not bring
// it back before the repair. A daemon that is killed goes on with its claim. Claims for a part of a
// GPU get a whole one.
func claimsWithGatesOff(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	startProxy(t)
	held := changeToClaims(ctx, t, n)
	makeTemplate(ctx, t, n, template, oneGPU)
	startPod(ctx, t, n, podWith("gates-runs", corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(template)}))
	running := waitPod(ctx, t, n, "gates-runs", isRunning)
	claimed := nodesIn(ctx, t, n, "gates-runs")
	if len(claimed) != 1 || slices.Contains(held, claimed[0]) {
		t.Fatalf("the pod with a claim has %v, another one has %v", claimed, held)
	}
	all := simulatedGPUs(ctx, t, n)
	free := slices.IndexFunc(all, func(g simulated) bool {
		return !slices.Contains(slices.Concat(held, claimed), filepath.Base(g.node()))
	})
	killDaemon(ctx, t, n)
	wait(ctx, t, func(context.Context) error {
		return contains(statusText(ctx, t, n), "claim: "+corev1.NamespaceDefault+"/"+running.Name+"-gpu-")
	})

	for _, ill := range []struct{ name, uuid string }{
		{"free", all[free].UUID}, {"in-use", uuidOfNode(all, claimed[0])},
	} {
		start := time.Now()
		simulate(ctx, t, "xid", "--gpu", ill.uuid, "--xid", "48")
		wait(ctx, t, func(ctx context.Context) error { return publishes(ctx, t, n, gpus-3, ill.uuid) })
		phase("a GPU that is "+ill.name+" has left the slice", start)
		status := statusText(ctx, t, n)
		for _, says := range []string{
			"the API server drops taints of devices: a GPU that is not healthy leaves its slice",
			": owned by claims, but in no ResourceSlice: the API server drops its taint gpu.nvidia.com/xid",
		} {
			if err := contains(status, says); err != nil {
				t.Error(err)
			}
		}
		waits := "gates-" + ill.name
		spec := *oneGPU.DeepCopy()
		spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: "device.attributes['gpu.nvidia.com'].uuid == '" + ill.uuid + "'"}}}
		makeTemplate(ctx, t, n, waits, spec)
		startPod(ctx, t, n, podWith(waits, corev1.PodResourceClaim{ResourceClaimTemplateName: &waits}))
		waitUnschedulable(ctx, t, n, waits)

		end := neverPublished(ctx, t, n, ill.uuid)
		restartKubelet(ctx, t, n)
		end()
		wait(ctx, t, func(ctx context.Context) error {
			return errors.Join(publishes(ctx, t, n, gpus-3, ill.uuid), seesPods(ctx, kubelet, running.Name))
		})
		if err := isSame(running)(getPod(ctx, t, n, running.Name)); err != nil {
			t.Error(err)
		}
		if ill.name == "in-use" {
			deletePod(ctx, t, n, running.Name)
			wait(ctx, t, func(context.Context) error { return prepared(0) })
			waitUnschedulable(ctx, t, n, waits)
		}
		start = time.Now()
		simulate(ctx, t, "restore", "--gpu", ill.uuid)
		waitPod(ctx, t, n, waits, isRunning)
		phase("a pod has the GPU after the repair", start)
		if got := nodesIn(ctx, t, n, waits); len(got) != 1 || uuidOfNode(all, got[0]) != ill.uuid {
			t.Errorf("pod %s has %v, want %s", waits, got, ill.uuid)
		}
		waitDevices(ctx, t, n, gpus-2)
		deletePod(ctx, t, n, waits)
	}
	givenWhole(ctx, t, n, held)
}

// givenWhole: claims for a part of the memory of a GPU get GPUs of their own.
func givenWhole(ctx context.Context, t *testing.T, n *node.Node, held []string) {
	t.Helper()
	setEnv(ctx, t, n, "DRA_SHARES=4")
	t.Cleanup(func() { setEnv(context.Background(), t, n, "DRA_SHARES-") })
	wait(ctx, t, func(ctx context.Context) error {
		return contains(statusText(ctx, t, n), "the API server knows no shares of devices: GPUs are given whole")
	})
	waitDevices(ctx, t, n, gpus-2)
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename",
		filepath.Join(*source, "test/e2e/testdata/claim-share.yaml"))
	t.Cleanup(func() { _, _ = n.Kubectl(context.Background(), "delete", "resourceclaimtemplate", "part-of-gpu") })
	taken := slices.Clone(held)
	for _, name := range []string{"part-one", "part-two"} {
		startPod(ctx, t, n, podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To("part-of-gpu")}))
		waitPod(ctx, t, n, name, isRunning)
		got := nodesIn(ctx, t, n, name)
		if len(got) != 1 || slices.Contains(taken, got[0]) {
			t.Errorf("pod %s has %v, want one GPU, and not of %v", name, got, taken)
		}
		taken = append(taken, got...)
	}
	deletePod(ctx, t, n, "part-one")
	deletePod(ctx, t, n, "part-two")
	wait(ctx, t, func(context.Context) error { return prepared(0) })
}

// partlyDividedMachine are the values of a release on a machine with two whole GPUs beside those in
// MIG mode. One of the two, number 3, fails as soon as a daemon starts.
var partlyDividedMachine = dividedMachine + `      - {bdf: "0000:61:00.0", pcie: 0/2/0}
      - {bdf: "0000:9d:00.0", pcie: 1/0/0}
      faults: [{kind: xid, gpu: "3", xid: 48}]
`

// noPartitionsWithGatesOff: where the API server drops taints and counters, neither a MIG device that
// could be made for a claim is offered nor a GPU that was not healthy when the daemon started, and
// status says so. A new process, which publishes all slices again, does not offer it either. With the
// gate for counters on, 1.34 rejects the slices, with the same end; 1.35 has the MIG devices.
func noPartitionsWithGatesOff(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	installDriver(ctx, t)
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, partlyDividedMachine)...)...)
	t.Cleanup(func() { explainClaims(t, n) })
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	ill := simulatedGPUs(ctx, t, n)[3].UUID
	without := func(word string) {
		t.Helper()
		wait(ctx, t, func(ctx context.Context) error {
			return errors.Join(
				contains(kubectl(ctx, t, n, "--namespace", namespace, "logs", "daemonset/"+daemonSet), "The API server "+word+" counters"),
				contains(statusText(ctx, t, n), "the API server drops counters of devices: no MIG devices are created for claims"),
				publishes(ctx, t, n, 1, ill))
		})
	}
	without("drops")
	end := neverPublished(ctx, t, n, ill)
	killDaemon(ctx, t, n)
	restartKubelet(ctx, t, n)
	end()
	without("drops")

	n.StopAPIServer()
	if err := n.StartAPIServer(ctx, "--feature-gates=DRAPartitionableDevices=true"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.StopAPIServer()
		if err := n.StartAPIServer(context.Background()); err != nil {
			t.Error(err)
		}
	})
	killDaemon(ctx, t, n) // which asks the API server again
	if isKubelet("1.34") {
		without("rejects")
		return
	}
	wait(ctx, t, func(ctx context.Context) error { return publishes(ctx, t, n, 2*partitions+1, ill) })
}

// statusText returns what status prints, on one line, because its sentences are wrapped.
func statusText(ctx context.Context, t *testing.T, n *node.Node) string {
	t.Helper()
	return strings.Join(strings.Fields(daemonExec(ctx, t, n, "status")), " ")
}

// publishes asks whether slices have so many devices, and not that GPU.
func publishes(ctx context.Context, t *testing.T, n *node.Node, want int, without string) error {
	t.Helper()
	devices := devicesOf(ctx, t, n)
	if hasUUID(devices, without) || len(devices) != want {
		return fmt.Errorf("%d devices in slices, want %d; %s is one of them: %t", len(devices), want, without,
			hasUUID(devices, without))
	}
	return nil
}

// hasUUID says whether a GPU is among devices.
func hasUUID(devices []resourceapi.Device, uuid string) bool {
	return slices.ContainsFunc(devices, func(d resourceapi.Device) bool {
		return ptr.Deref(d.Attributes["uuid"].StringValue, "") == uuid
	})
}

// neverPublished watches the slices: no version of them may have that GPU. The function that it
// returns ends that when the slices, which a starting kubelet deletes, have been published again.
func neverPublished(ctx context.Context, t *testing.T, n *node.Node, uuid string) (end func()) {
	t.Helper()
	watch, err := n.Client.ResourceV1().ResourceSlices().Watch(ctx,
		metav1.ListOptions{FieldSelector: "spec.driver=gpu.nvidia.com"})
	if err != nil {
		t.Fatal(err)
	}
	again := make(chan error, 1)
	var running sync.WaitGroup
	running.Go(func() {
		deleted := false
		for event := range watch.ResultChan() {
			slice, is := event.Object.(*resourceapi.ResourceSlice)
			if !is {
				again <- fmt.Errorf("watch slices: %v", event.Object)
				return
			}
			if hasUUID(slice.Spec.Devices, uuid) {
				again <- fmt.Errorf("a slice was %s with %s, which is not healthy", strings.ToLower(string(event.Type)), uuid)
				return
			}
			if deleted = deleted || event.Type == kubewatch.Deleted; deleted && event.Type != kubewatch.Deleted {
				again <- nil
				return
			}
		}
	})
	return func() {
		t.Helper()
		select {
		case err = <-again:
		case <-time.After(stepLimit):
			err = errors.New("the slices are not published again")
		}
		watch.Stop()
		running.Wait()
		if err != nil {
			t.Error(err)
		}
	}
}
