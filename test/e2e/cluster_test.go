package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	// told is how long the daemon may take to tell the cluster of a fact.
	told = 2 * time.Second
	// lasting is how long a GPU has to be healthy until the condition says so.
	lasting     = 30 * time.Second
	healthLabel = "gpu-device-plugin.github.io/gpu.health"
	configLabel = "nvidia.com/device-plugin.config"
)

// inTheCluster: gpu-node-agent takes the place of gpu-device-plugin, labels the node, and tells of
// a GPU that fails by Event, condition and label; its account can write no other node and nothing
// else of its own; a label of the node switches sharing; and all of that comes late, but once,
// where the API server is slow, away and back, while kubelet sees no difference.
func inTheCluster(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	// Earlier stories may have set 0, with which a pod is available at once. What node-agent applies
	// has 5, and the DaemonSet controller never ends a roll-out that begins while the old pod has not
	// been Ready for so long.
	kubectl(ctx, t, n, "-n", namespace, "patch", "daemonset", daemonSet, "--type", "merge", "--patch",
		`{"spec":{"minReadySeconds":5}}`)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	proxy := startProxy(t)
	publishCA(ctx, t, n, namespace)
	// What earlier stories set would stay, as the manifest does not name it. The label of the node
	// chooses the configuration file.
	setEnv(ctx, t, n, "SIMULATE=dgx-h100", "CONFIG_FILE-", "DEVICE_LIST_STRATEGY-", "MIG_STRATEGY-", "PASS_DEVICE_SPECS-")
	start := time.Now()
	apply(ctx, t, n, "node-agent")
	t.Cleanup(func() { leaveTheCluster(t, n) })
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	waitNodeSays(ctx, t, n, "the labels", time.Now(), promptly, func(object *corev1.Node) bool {
		l := object.Labels
		return l["nvidia.com/gpu.count"] == "8" && l["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3" &&
			l[healthLabel] == "healthy"
	})
	phase("gpu-node-agent rolled out, node labelled", start)

	recovered := failAndRecover(ctx, t, n, kubelet)
	writesOwnNodeOnly(ctx, t, n)
	chosenByLabel(ctx, t, n, kubelet)
	// It is the last to tell that a GPU is healthy again, and the checks before take as long as that.
	waitNodeSays(ctx, t, n, "the condition of before", recovered, lasting+far*told, hasCondition(corev1.ConditionTrue, ""))
	apiServerFails(ctx, t, n, kubelet, proxy)
}

// failAndRecover has a GPU that a pod holds fail and recover, and measures how soon the cluster
// knows it. It returns when it was repaired. The condition says so later.
func failAndRecover(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) time.Time {
	uuid := heldDevices(ctx, t, kubelet, holder)[0]
	began := time.Now()
	simulate(ctx, t, "xid", "--gpu", uuid, "--xid", "48")
	start := time.Now()
	t.Logf("the XID took %v to be injected", start.Sub(began).Round(time.Millisecond))
	waitNodeSays(ctx, t, n, "the condition", start, far*told, hasCondition(corev1.ConditionFalse, uuid))
	waitNodeSays(ctx, t, n, "the label", start, far*told, hasLabel(healthLabel, "degraded"))
	waitEvents(ctx, t, n, uuid, start, far*told, map[string]int{"GPUUnhealthy": 1})
	waitEventsOf(ctx, t, n, "Pod "+holder, uuid, start, far*told, map[string]int{"GPUUnhealthy": 1})
	waitAllocatable(ctx, t, kubelet, gpu, gpus-1, promptly)

	simulate(ctx, t, "restore", "--gpu", uuid)
	waitAllocatable(ctx, t, kubelet, gpu, gpus, far*recoveryTime)
	start = time.Now()
	waitNodeSays(ctx, t, n, "the label of before", start, far*told, hasLabel(healthLabel, "healthy"))
	waitEvents(ctx, t, n, uuid, start, far*told, map[string]int{"GPUUnhealthy": 1, "GPURecovered": 1})
	return start
}

// writesOwnNodeOnly: the daemon's account is refused what it does not need, by its rights or by the
// admission policy.
func writesOwnNodeOnly(ctx context.Context, t *testing.T, n *node.Node) {
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	if _, err := n.Client.CoreV1().Nodes().Create(ctx, other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Client.CoreV1().Nodes().Delete(context.Background(), "other", metav1.DeleteOptions{}) })
	account := []string{"--namespace", namespace, "create", "token", "gpu-device-plugin"}
	bound := clientWith(t, kubectl(ctx, t, n, append(account, "--bound-object-kind", "Pod", "--bound-object-name",
		theDaemonPod(ctx, t, n).Name)...))
	loose := clientWith(t, kubectl(ctx, t, n, account...))

	const health = `{"metadata":{"labels":{"` + healthLabel + `":"healthy"}}}`
	for _, write := range []struct {
		client          kubernetes.Interface
		name, sub, body string
		refused         string // in the error; empty where the write is made
		kind            types.PatchType
	}{
		{client: bound, name: node.Name, body: health},
		{client: bound, name: "other", body: health, refused: "no other node"},
		{client: loose, name: node.Name, body: health, refused: "no other node"},
		{client: bound, name: node.Name, body: `{"metadata":{"labels":{"nvidia.com/mig.config":"all-1g.10gb"}}}`,
			refused: "no other labels"},
		{client: bound, name: node.Name, body: `{"metadata":{"labels":{"kubernetes.io/hostname":"x"}}}`,
			refused: "no other labels"},
		{client: bound, name: node.Name, body: `{"metadata":{"annotations":{"x":"y"}}}`, refused: "annotations"},
		{client: bound, name: node.Name, body: `{"spec":{"unschedulable":true}}`, refused: "the spec"},
		{client: bound, name: node.Name, body: `{"spec":{"taints":null}}`, refused: "no other taint"},
		{client: bound, name: "other", sub: "status", body: `{"status":{"phase":"Running"}}`, refused: "no other node"},
		{client: bound, name: node.Name, sub: "status", body: `{"status":{"capacity":{"nvidia.com/gpu":"9"}}}`,
			refused: "the status"},
		{client: bound, name: node.Name, sub: "status", body: `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`,
			refused: "no other condition", kind: types.StrategicMergePatchType},
		{client: bound, name: node.Name, sub: "status", body: health[:len(health)-4] + `x"}}}`, refused: "no other labels"},
	} {
		if write.kind == "" {
			write.kind = types.MergePatchType
		}
		var subresources []string
		if write.sub != "" {
			subresources = []string{write.sub}
		}
		_, err := write.client.CoreV1().Nodes().Patch(ctx, write.name, write.kind, []byte(write.body), metav1.PatchOptions{},
			subresources...)
		switch {
		case write.refused == "" && err != nil:
			t.Errorf("%s of %s: %v", write.body, write.name, err)
		case write.refused != "" && (err == nil || !strings.Contains(err.Error(), write.refused)):
			t.Errorf("%s of %s/%s: %v, want it refused with %q", write.body, write.name, write.sub, err, write.refused)
		}
	}
	event := eventOf("other")
	if _, err := bound.EventsV1().Events("default").Create(ctx, event, metav1.CreateOptions{}); err == nil ||
		!strings.Contains(err.Error(), "another node") {
		t.Errorf("an Event of another node: %v, want it refused", err)
	}
	if _, err := bound.CoreV1().Pods("").List(ctx, metav1.ListOptions{}); err == nil {
		t.Error("the account may list all pods")
	}
	if err := bound.CoreV1().Nodes().Delete(ctx, "other", metav1.DeleteOptions{}); err == nil {
		t.Error("the account may delete a node")
	}
}

func eventOf(name string) *eventsv1.Event {
	return &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "e2e-" + name, Namespace: "default"}, EventTime: metav1.NowMicro(),
		ReportingController: "e2e", ReportingInstance: node.Name, Action: "Test", Reason: "Test", Type: corev1.EventTypeNormal,
		Regarding: corev1.ObjectReference{Kind: "Node", Name: name},
	}
}

// clientWith returns a client of the API server with a token.
func clientWith(t *testing.T, token string) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: "https://" + apiServerAddress, BearerToken: strings.TrimSpace(token), TLSClientConfig: rest.TLSClientConfig{Insecure: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// chosenByLabel: a label of the node switches sharing on and off, and no registration ends.
func chosenByLabel(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	registered := registrations(ctx, t, n)
	kubectl(ctx, t, n, "label", "node", node.Name, configLabel+"=shared")
	took := waitAllocatable(ctx, t, kubelet, gpu, 2*(gpus-2)+2, stepLimit) // a pod holds two GPUs whole
	t.Logf("GPUs are shared %v after the label of the node asked for it", took.Round(time.Millisecond))
	if took > far*told {
		t.Errorf("GPUs are shared %v after the label of the node asked for it, want %v", took, told)
	}
	// A name that no file has changes nothing, and is told.
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, configLabel+"=unknown")
	waitEvents(ctx, t, n, configLabel+"=unknown", time.Now(), far*told, map[string]int{"ConfigRejected": 1})
	waitAllocatable(ctx, t, kubelet, gpu, 2*(gpus-2)+2, stepLimit)
	kubectl(ctx, t, n, "label", "node", node.Name, configLabel+"-")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	if now := registrations(ctx, t, n); now[gpu] != registered[gpu] {
		t.Errorf("the daemon registered %d times, want %d", now[gpu], registered[gpu])
	}
}

// apiServerFails: a GPU fails while the API server takes ten seconds for an answer, and recovers
// while it is away. Pods come and go as long as it can be asked for them.
func apiServerFails(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient,
	proxy *proxy) {
	uuid := simulatedGPUs(ctx, t, n)[6].UUID
	endChurn := startChurn(ctx, t, n)
	proxy.setDelay(10 * time.Second)
	start := time.Now()
	simulate(ctx, t, "xid", "--gpu", uuid, "--xid", "48")
	waitAllocatable(ctx, t, kubelet, gpu, gpus-1, promptly)
	t.Logf("kubelet knows of a bad GPU after %v while the API server is slow", time.Since(start).Round(time.Millisecond))
	proxy.setDelay(0)
	waitEvents(ctx, t, n, uuid, time.Now(), stepLimit, map[string]int{"GPUUnhealthy": 1})
	waitNodeSays(ctx, t, n, "the condition", time.Now(), stepLimit, hasCondition(corev1.ConditionFalse, uuid))

	other := simulatedGPUs(ctx, t, n)[5].UUID
	n.StopAPIServer()
	simulate(ctx, t, "restore", "--gpu", uuid)
	took := waitAllocatable(ctx, t, kubelet, gpu, gpus, far*recoveryTime)
	t.Logf("kubelet has all GPUs %v after the repair, while the API server is away", took.Round(time.Millisecond))
	start = time.Now()
	simulate(ctx, t, "xid", "--gpu", other, "--xid", "48")
	waitAllocatable(ctx, t, kubelet, gpu, gpus-1, promptly)
	t.Logf("kubelet knows of a bad GPU after %v while the API server is away", time.Since(start).Round(time.Millisecond))
	if err := n.StartAPIServer(ctx); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	waitNodeSays(ctx, t, n, "the condition after the API server came back", start, stepLimit,
		hasCondition(corev1.ConditionFalse, other))
	waitEvents(ctx, t, n, uuid, start, stepLimit, map[string]int{"GPUUnhealthy": 1, "GPURecovered": 1})
	waitEvents(ctx, t, n, other, start, stepLimit, map[string]int{"GPUUnhealthy": 1})
	waitNodeSays(ctx, t, n, "the label after the API server came back", start, stepLimit,
		hasLabel(healthLabel, "degraded"))
	simulate(ctx, t, "restore", "--gpu", other)
	waitNodeSays(ctx, t, n, "the condition after the repair", time.Now(), stepLimit,
		hasCondition(corev1.ConditionTrue, ""))
	waitEvents(ctx, t, n, other, start, stepLimit, map[string]int{"GPUUnhealthy": 1, "GPURecovered": 1})
	waitAllocatable(ctx, t, kubelet, gpu, gpus, far*recoveryTime)
	endChurn()
	if processes := daemonProcesses(t); len(processes) != 1 {
		t.Errorf("the daemon's processes are %v, want one", processes)
	}
	if restarts := theDaemonPod(ctx, t, n).Status.ContainerStatuses[0].RestartCount; restarts != 0 {
		t.Errorf("the daemon's container was restarted %d times", restarts)
	}
}

// publishCA makes the ConfigMap that kubelet puts beside a token.
func publishCA(ctx context.Context, t *testing.T, n *node.Node, namespace string) {
	t.Helper()
	certificates, err := os.ReadFile("/run/kube-apiserver/apiserver.crt")
	if err != nil {
		t.Fatal(err)
	}
	ca := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kube-root-ca.crt"},
		Data: map[string]string{"ca.crt": string(certificates)}}
	_, err = n.Client.CoreV1().ConfigMaps(namespace).Create(ctx, ca, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

// leaveTheCluster removes what the other stories do not have.
func leaveTheCluster(t *testing.T, n *node.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	if t.Failed() { // what explains it goes with the pod
		out, err := n.Kubectl(ctx, "--namespace", namespace, "logs", "--selector", "app.kubernetes.io/name="+daemonSet,
			"--tail", "-1")
		// of short pods
		lines := slices.DeleteFunc(strings.Split(out, "\n"), func(l string) bool { return strings.Contains(l, "service.go") })
		t.Logf("the log of gpu-node-agent, error %v:\n%s", err, strings.Join(lines, "\n"))
	}
	apply(ctx, t, n, "overlay")
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	// The account stays, without rights.
	_, err := n.Kubectl(ctx, "delete", "--all-namespaces", "--selector", "app.kubernetes.io/name="+daemonSet,
		"clusterroles,clusterrolebindings,roles,rolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings")
	if err != nil {
		t.Error(err)
	}
}

// simulate runs the daemon's simulate command in the daemon's own mount namespace, for which no API
// server is needed.
func simulate(ctx context.Context, t *testing.T, args ...string) {
	t.Helper()
	root := fmt.Sprintf("/proc/%d/root", daemonProcess(t))
	args = append([]string{"simulate"}, append(args, "--control-socket", root+"/run/gpu-device-plugin/control.sock")...)
	if out, err := exec.CommandContext(ctx, filepath.Join(*imageRoot, "plugin/usr/bin/gpu-device-plugin"),
		args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", args, err, out)
	}
}

// waitNodeSays waits until the Node is as it should be, and logs how long that took since start.
func waitNodeSays(
	ctx context.Context, t *testing.T, n *node.Node, what string, start time.Time, limit time.Duration, is func(*corev1.Node) bool,
) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s is not there within %v", what, limit))
	defer cancel()
	err := node.Wait(ctx, 20*time.Millisecond, func(ctx context.Context) error {
		object, err := n.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err == nil && !is(object) {
			err = fmt.Errorf("labels %v, conditions %+v", object.Labels, object.Status.Conditions)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %v after the fact", what, time.Since(start).Round(time.Millisecond))
}

func hasLabel(key, value string) func(*corev1.Node) bool {
	return func(object *corev1.Node) bool { return object.Labels[key] == value }
}

// hasCondition asks whether the condition of the GPUs has a status, and a message with a text.
func hasCondition(status corev1.ConditionStatus, text string) func(*corev1.Node) bool {
	return func(object *corev1.Node) bool {
		for _, c := range object.Status.Conditions {
			if c.Type == "GPUHealthy" {
				return c.Status == status && strings.Contains(c.Message, text)
			}
		}
		return false
	}
}

// waitEvents waits until Events of the node with a text, such as a UUID, are so many, by reason,
// and logs how long that took since start.
func waitEvents(
	ctx context.Context, t *testing.T, n *node.Node, text string, start time.Time, limit time.Duration, want map[string]int,
) {
	t.Helper()
	waitEventsOf(ctx, t, n, "Node "+node.Name, text, start, limit, want)
}

// waitEventsOf does that for Events of an object, such as "Pod a".
func waitEventsOf(
	ctx context.Context, t *testing.T, n *node.Node, object, text string, start time.Time, limit time.Duration, want map[string]int,
) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("the Events are not there"))
	defer cancel()
	err := node.Wait(ctx, 20*time.Millisecond, func(ctx context.Context) error {
		list, err := n.Client.EventsV1().Events("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		got := map[string]int{}
		for _, e := range list.Items {
			is := e.Regarding.Kind + " " + e.Regarding.Name
			if e.ReportingController == "gpu-node-agent" && is == object && strings.Contains(e.Note, text) {
				got[e.Reason]++
				if e.Series != nil {
					got[e.Reason] += int(e.Series.Count) - 1
				}
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("Events of %s about %s: %v, want %v", object, text, got, want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("Events of %s %v: %v after the fact", object, want, time.Since(start).Round(time.Millisecond))
}
