package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

const (
	pluginLabel = "nvidia.com/gpu.deploy.device-plugin"
	clientLabel = "nvidia.com/gpu.deploy.client"
)

// A driverManager makes the calls of NVIDIA's k8s-driver-manager v0.12.0 at the API server, in the
// order of its uninstallDriver: ADR 75 has the lines.
type driverManager struct {
	c   *claimable
	api *kubernetes.Clientset
}

func newDriverManager(c *claimable) driverManager {
	c.t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", c.api.Kubeconfig())
	if err != nil {
		c.t.Fatal(err)
	}
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		c.t.Fatal(err)
	}
	return driverManager{c, api}
}

// patch patches the Node as driver-manager does it.
func (m driverManager) patch(part string, value any) {
	m.c.t.Helper()
	text, err := json.Marshal(map[string]any{part: value})
	if err != nil {
		m.c.t.Fatal(err)
	}
	if _, err := m.api.CoreV1().Nodes().Patch(m.c.t.Context(), nodeName, types.StrategicMergePatchType, text,
		metav1.PatchOptions{}); err != nil {
		m.c.t.Fatal(err)
	}
}

func (m driverManager) label(value string) {
	m.c.t.Helper()
	m.patch("metadata", map[string]any{"labels": map[string]string{pluginLabel: value, clientLabel: value,
		"nvidia.com/gpu.deploy.dcgm": value}})
}

func (m driverManager) cordon(on bool) {
	m.c.t.Helper()
	m.patch("spec", map[string]any{"unschedulable": on})
}

func (m driverManager) pods() []corev1.Pod {
	m.c.t.Helper()
	list, err := m.api.CoreV1().Pods("").List(m.c.t.Context(),
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		m.c.t.Fatal(err)
	}
	return list.Items
}

// waits waits until the pods of the operator, and the DaemonSets with the label of its clients in
// their node selector, have ended. The daemon's own pod is none of them.
func (m driverManager) waits() {
	m.c.t.Helper()
	m.c.eventually("the operator's pods and clients have ended", func() bool {
		return !slices.ContainsFunc(m.pods(), func(p corev1.Pod) bool {
			_, client := p.Spec.NodeSelector[clientLabel]
			owner := metav1.GetControllerOf(&p)
			return client && owner != nil && owner.Kind == "DaemonSet" || p.Labels["app"] == "nvidia-device-plugin-daemonset"
		})
	})
}

// evictsClaims evicts the pods with claims of the driver, and waits until they have ended, which
// needs the daemon: kubelet gives the claims back first.
func (m driverManager) evictsClaims() {
	m.c.t.Helper()
	ctx, cancel := context.WithTimeout(m.c.t.Context(), patience)
	defer cancel()
	for _, p := range m.pods() {
		for _, claim := range p.Spec.ResourceClaims {
			held, err := m.api.ResourceV1().ResourceClaims(p.Namespace).Get(ctx, *claim.ResourceClaimName, metav1.GetOptions{})
			if err != nil {
				m.c.t.Fatal(err)
			}
			if held.Status.Allocation.Devices.Results[0].Driver != draDriver {
				continue
			}
			if err := m.api.PolicyV1().Evictions(p.Namespace).Evict(ctx,
				&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}}); err != nil {
				m.c.t.Fatal(err)
			}
			m.c.release(ctx, held.Name, string(held.UID)) // by kubelet
		}
	}
	if ctx.Err() != nil {
		m.c.t.Fatal("a pod with a claim stays Terminating")
	}
}

// unloads unloads the modules of the driver, as soon as nobody has it open.
func (m driverManager) unloads() {
	m.c.t.Helper()
	m.c.firstLine("quiesced: the driver is released since")
	m.c.inject(simulator.Fault{Kind: simulator.KindDriver, Driver: "missing"})
}

// answer is what the Node says of the release of the driver.
func (m driverManager) answer() string {
	n, err := m.c.api.Node(nodeName)
	if err != nil {
		m.c.t.Error(err)
		return ""
	}
	return n.Annotations[quiesceKey+"state"] + " " + n.Annotations[quiesceKey+"answer"]
}

// pod has a pod with a claim run on a GPU, and the daemon's own pod, which has no label of the
// operator in its node selector.
func (m driverManager) pod(name, device string) {
	m.c.t.Helper()
	m.c.prepared(name, m.c.claim(name, device))
	for _, p := range []*corev1.Pod{
		{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("pod-" + name)},
			Spec: corev1.PodSpec{NodeName: nodeName,
				ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "gpu-device-plugin", UID: "own",
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "gpu-device-plugin",
				UID: "o", Controller: new(true)}}},
			Spec: corev1.PodSpec{NodeName: nodeName, NodeSelector: map[string]string{"kubernetes.io/os": "linux"}}},
	} {
		if err := m.c.api.Add("pods", p); err != nil {
			m.c.t.Fatal(err)
		}
	}
}

// TestDriverManagerWithClaims: driver-manager changes the driver of a node whose GPUs are given by
// claims. The pod with a claim ends although the driver is released, also by a daemon that was
// killed meanwhile; no GPU is offered; and the new driver is used as soon as the label is true
// again. The first try of driver-manager fails and is cleaned up, as where another process has the
// driver open.
func TestDriverManagerWithClaims(t *testing.T) {
	t.Parallel()
	const paused = "paused-for-driver-upgrade"
	c := openClaimable(t, "dra", "--node-quiesce")
	m := newDriverManager(c)
	m.label("true")
	c.start()
	c.published(8)
	for round, killed := range []bool{false, true} {
		name := fmt.Sprintf("work-%d", round)
		m.pod(name, "gpu-3")
		began := time.Now()
		m.label(paused)
		m.waits()
		c.firstLine("quiesced: the driver is released since")
		t.Logf("the driver is released %v after the label", time.Since(began).Round(time.Millisecond))
		c.eventually("the Node says for whom", func() bool {
			return strings.HasPrefix(m.answer(), "done ") && strings.Contains(m.answer(), pluginLabel+"="+paused)
		})
		c.published(0)
		if round == 0 { // cleanupOnFailure, before the pods were evicted
			m.cordon(false)
			m.label("true")
			c.published(8) // a claim leaves its device in the slice
			m.label(paused)
			m.waits()
			c.published(0)
		}
		if killed {
			c.crash()
			c.firstLine("quiesced: the driver is released since")
		}
		m.cordon(true)
		m.evictsClaims()
		m.unloads()
		m.cordon(false)
		c.inject(simulator.Fault{Kind: simulator.KindDriver, Driver: "580.105.08"})
		m.label("true")
		c.eventually("the answer goes with the pause", func() bool { return m.answer() == " " })
		c.published(8)
		c.logs("Restarting with the replaced driver")
		c.says("the new driver is used", func(now status) bool { return now.Driver != "" && now.Stale == "" })
	}
	m.pod("after", "gpu-3")
}
