package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// kubectlGPU is the path of the plugin of kubectl.
func kubectlGPU() string { return filepath.Join(filepath.Dir(*imageRoot), "kubectl-gpu") }

// explains asks kubectl gpu why a pod has no GPU or lost it, and wants a sentence with each of
// these parts.
func explains(ctx context.Context, t *testing.T, n *node.Node, pod string, parts ...string) {
	t.Helper()
	out, err := exec.CommandContext(ctx, kubectlGPU(), "--kubeconfig", n.Kubeconfig(), "why", pod).CombinedOutput()
	if err != nil {
		t.Errorf("kubectl gpu why %s: %v: %s", pod, err, out)
		return
	}
	has(t, pod, string(out), parts)
}

// has wants each of these parts in what kubectl gpu why says.
func has(t *testing.T, name, says string, parts []string) {
	t.Helper()
	t.Logf("kubectl gpu why %s: %s", name, strings.TrimSpace(says))
	for _, part := range parts {
		if !strings.Contains(says, part) {
			t.Errorf("kubectl gpu why %s says %q, want %q in it", name, says, part)
		}
	}
}

// waitUnschedulable waits until the scheduler has found no node for a pod.
func waitUnschedulable(ctx context.Context, t *testing.T, n *node.Node, name string) {
	t.Helper()
	waitPod(ctx, t, n, name, func(pod *corev1.Pod) error {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				return nil
			}
		}
		return fmt.Errorf("the scheduler has not refused the pod: %v", pod.Status.Conditions)
	})
}

// explainsTaint: a taint of the Node keeps a pod away, which runs when the taint has gone.
func explainsTaint(ctx context.Context, t *testing.T, n *node.Node) {
	const taint = "e2e.example.com/team"
	kubectl(ctx, t, n, "taint", "node", node.Name, taint+"=x:NoSchedule")
	removed := false
	remove := func(ctx context.Context) {
		if _, err := n.Kubectl(ctx, "taint", "node", node.Name, taint+"-"); err != nil && !removed {
			t.Error(err)
		}
		removed = true
	}
	t.Cleanup(func() { remove(context.Background()) })
	createPod(ctx, t, n, "kept-away", gpu, 1)
	waitUnschedulable(ctx, t, n, "kept-away")
	explains(ctx, t, n, "kept-away", "Node "+node.Name+" has",
		"the pod does not tolerate its taint "+taint+"=x:NoSchedule: add a toleration to the pod, or remove the taint")
	remove(ctx)
	waitPod(ctx, t, n, "kept-away", isRunning)
	explains(ctx, t, n, "kept-away", "It runs on node "+node.Name, " has GPU-")
	deletePod(ctx, t, n, "kept-away")
}

// explainsQuota: a quota of a namespace keeps a controller from making its pod.
func explainsQuota(ctx context.Context, t *testing.T, n *node.Node) {
	const name = "limited"
	none := corev1.ResourceList{"requests." + gpu: apiresource.MustParse("0")}
	persist(ctx, t, "make a namespace with a quota", func(ctx context.Context) error {
		if _, err := n.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
			metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		quotas := n.Client.CoreV1().ResourceQuotas(name)
		quota, err := quotas.Create(ctx, &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ResourceQuotaSpec{Hard: none}}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			quota, err = quotas.Get(ctx, name, metav1.GetOptions{})
		}
		if err != nil {
			return err
		}
		// The node has no controller of quotas.
		quota.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none}
		_, err = quotas.UpdateStatus(ctx, quota, metav1.UpdateOptions{})
		return err
	})
	wait(ctx, t, func(ctx context.Context) error { // the API server has to see the quota
		_, err := n.Client.CoreV1().Pods(name).Create(ctx, podOf("tried", gpu, 1),
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || !strings.Contains(err.Error(), "exceeded quota") {
			return fmt.Errorf("a pod is not refused for the quota: %w", err)
		}
		return nil
	})
	template := podOf("", gpu, 1)
	template.Labels, template.Spec.RestartPolicy = map[string]string{"app": name}, corev1.RestartPolicyAlways
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: template.Labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: template.ObjectMeta, Spec: template.Spec},
	}}
	persist(ctx, t, "make a DaemonSet", func(ctx context.Context) error {
		if _, err := n.Client.AppsV1().DaemonSets(name).Create(ctx, set,
			metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	})
	t.Cleanup(func() {
		ctx := context.Background()
		if err := errors.Join(n.Client.AppsV1().DaemonSets(name).Delete(ctx, name, metav1.DeleteOptions{}),
			n.Client.CoreV1().ResourceQuotas(name).Delete(ctx, name, metav1.DeleteOptions{})); err != nil {
			t.Error(err)
		}
	})
	var says string
	wait(ctx, t, func(ctx context.Context) error {
		out, err := exec.CommandContext(ctx, kubectlGPU(), "--kubeconfig", n.Kubeconfig(), "--namespace", name, "why",
			name).CombinedOutput()
		if says = string(out); err == nil || !strings.Contains(says, "could not make one") {
			return fmt.Errorf("kubectl gpu why %s: %w: %s", name, err, out)
		}
		return nil
	})
	has(t, name, says, []string{"DaemonSet limited could not make one",
		"exceeded quota: limited, requested: requests." + gpu + "=1, used: requests." + gpu + "=0, limited: requests." + gpu +
			"=0"})
}

// explainsImage: the node does not have the image of a pod that was given its GPU.
func explainsImage(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	pod := podOf("without-image", gpu, 1)
	pod.Spec.Containers[0].Image = "docker.io/library/none:e2e"
	startPod(ctx, t, n, pod)
	waitPod(ctx, t, n, pod.Name, func(pod *corev1.Pod) error {
		for _, s := range pod.Status.ContainerStatuses {
			if w := s.State.Waiting; w != nil && w.Reason == "ErrImageNeverPull" {
				return nil
			}
		}
		return fmt.Errorf("the container does not wait for its image: %+v", pod.Status)
	})
	explains(ctx, t, n, pod.Name, "Container main does not start on node "+node.Name+" (ErrImageNeverPull): ")
	deletePod(ctx, t, n, pod.Name)
}

// explainsClaims: a selector, another claim, a taint and a constraint each keep a pod with a claim
// from running. The pod named claims has a claim on a GPU.
func explainsClaims(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	free, taken := "", ""
	for _, d := range devicesOf(ctx, t, n) {
		if uuid := ptr.Deref(d.Attributes["uuid"].StringValue, ""); heldByClaim(ctx, t, n, d.Name) {
			taken = uuid
		} else {
			free = uuid
		}
	}
	simulate(ctx, t, "xid", "--gpu", free, "--xid", "48")
	waitDevices(ctx, t, n, gpus-3)
	ill := "the taint gpu.nvidia.com/xid=48:NoSchedule excludes gpu-"
	if isOld() {
		ill = "is in no ResourceSlice: the API server drops its taint gpu.nvidia.com/xid"
	}
	uuid := func(u string) string { return "device.attributes['gpu.nvidia.com'].uuid == '" + u + "'" }
	match := resourceapi.FullyQualifiedName("gpu.nvidia.com/uuid")
	for name, tt := range map[string]struct {
		selector string
		count    int64
		match    *resourceapi.FullyQualifiedName
		says     []string
	}{
		"why-selector": {"device.attributes['gpu.nvidia.com'].productName == 'Tesla T4'", 1, nil,
			[]string{"No node has devices for request gpu of claim why-selector-gpu-",
				"'Tesla T4'\" of the request excludes gpu-"}},
		"why-taken": {uuid(taken), 1, nil, []string{"another claim excludes gpu-",
			" (" + corev1.NamespaceDefault + "/claims-gpu-", " of pod claims)"}},
		"why-taint":      {uuid(free), 1, nil, []string{ill}},
		"why-many":       {"", gpus, nil, []string{"; it has 4 of 8 devices"}},
		"why-constraint": {"", 2, &match, []string{"the constraint matchAttribute gpu.nvidia.com/uuid of claim why-constraint-gpu-", "node " + node.Name + " has enough without"}},
	} {
		spec := *oneGPU.DeepCopy()
		spec.Devices.Requests[0].Exactly.Count = tt.count
		if tt.selector != "" {
			spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: tt.selector}}}
		}
		if tt.match != nil {
			spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: tt.match}}
		}
		makeTemplate(ctx, t, n, name, spec)
		startPod(ctx, t, n, podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(name)}))
		waitUnschedulable(ctx, t, n, name)
		explains(ctx, t, n, name, tt.says...)
		deletePod(ctx, t, n, name)
	}
	simulate(ctx, t, "restore", "--gpu", free)
	waitDevices(ctx, t, n, gpus-2)
}

// explainsCounters: a pod wants two whole GPUs as MIG devices, and pods with claims have some of
// the counters of one GPU at least.
func explainsCounters(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	const name = "why-counter"
	spec := *oneGPU.DeepCopy()
	r := spec.Devices.Requests[0].Exactly
	r.DeviceClassName, r.Count = "mig.nvidia.com", 2
	r.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: "device.attributes['gpu.nvidia.com'].profile == '7g.40gb'",
	}}}
	makeTemplate(ctx, t, n, name, spec)
	startPod(ctx, t, n, podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(name)}))
	waitUnschedulable(ctx, t, n, name)
	explains(ctx, t, n, name, "the counter ", ", of which 0 is left ("+corev1.NamespaceDefault+"/", " of pod ",
		"), excludes gpu-", "of 2 devices")
	deletePod(ctx, t, n, name)
}

// heldByClaim reports whether a claim has a device.
func heldByClaim(ctx context.Context, t *testing.T, n *node.Node, device string) bool {
	t.Helper()
	claims, err := n.Client.ResourceV1().ResourceClaims(corev1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range claims.Items {
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if r.Device == device {
				return true
			}
		}
	}
	return false
}
