package fleet

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

const namespace = "default"

// TestSlices has a real API server take the slices of all simulated machines with its default
// gates, and a real scheduler give GPUs of one to pods with the claims of docs/dra.md.
func TestSlices(t *testing.T) {
	if *kubernetesDir == "" {
		t.Skip("needs -kubernetes: see make fleet")
	}
	admin, _ := startAPIServer(t)
	for _, name := range simulator.Names() {
		s := scanned(t, name)
		for _, slice := range published(t, name, s) {
			created, err := admin.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{})
			if err != nil {
				t.Errorf("%s: %v", slice.Name, err)
				continue
			}
			same(t, "created", slice, created)
		}
		for i := range s.GPUs {
			s.GPUs[i].Health = inventory.Health{State: inventory.Unhealthy, XID: 48,
				Since: time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)}
		}
		if name == "dgx-h100" { // pods are to get these
			s.GPUs = slices.Clone(s.GPUs)
			for i := range s.GPUs[:7] {
				s.GPUs[i].Health = inventory.Health{State: inventory.Healthy}
			}
		}
		for _, slice := range published(t, name, s) {
			before, err := admin.ResourceV1().ResourceSlices().Get(t.Context(), slice.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			slice.ResourceVersion = before.ResourceVersion
			updated, err := admin.ResourceV1().ResourceSlices().Update(t.Context(), slice, metav1.UpdateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			same(t, "updated", slice, updated)
		}
	}
	schedule(t, admin)
}

// same checks that the API server keeps all that it was sent.
func same(t *testing.T, what string, sent, kept *resourceapi.ResourceSlice) {
	t.Helper()
	if diff := cmp.Diff(sent.Spec, kept.Spec); diff != "" {
		t.Errorf("%s %s (-sent +kept):\n%s", what, sent.Name, diff)
	}
}

// scanned returns what a simulated machine has, all of it Healthy.
func scanned(t *testing.T, name string) inventory.Snapshot {
	t.Helper()
	_, session := simulated.Open(t, name)
	s, err := session.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return simulated.Healthy(s)
}

// published returns the slices of a node.
func published(t *testing.T, node string, s inventory.Snapshot) []*resourceapi.ResourceSlice {
	t.Helper()
	text, err := json.Marshal(dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil).List())
	if err != nil {
		t.Fatal(err)
	}
	var list resourceapi.ResourceSliceList
	if err := yaml.UnmarshalStrict(text, &list); err != nil {
		t.Fatal(err)
	}
	all := make([]*resourceapi.ResourceSlice, len(list.Items))
	for i := range list.Items {
		all[i] = &list.Items[i]
	}
	return all
}

// schedule has a scheduler place pods on the simulated dgx-h100, whose GPU 7 has a fault.
func schedule(t *testing.T, admin *kubernetes.Clientset) {
	t.Helper()
	ctx := t.Context()
	createReadyNode(t, admin, "dgx-h100")
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu.nvidia.com"},
		Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'",
			}}},
		}}
	if _, err := admin.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	run(t, filepath.Join(*kubernetesDir, "kube-scheduler"), "--kubeconfig="+writeKubeconfig(t, adminToken, "scheduler"),
		"--leader-elect=false", "--secure-port=0")

	// place makes a claim of docs/dra.md and a pod with it. It returns the devices; none if the pod is
	// to stay Pending.
	place := func(name string, pending bool) string {
		t.Helper()
		claim := documentedClaim(t, name)
		claim.Namespace = namespace
		if _, err := admin.ResourceV1().ResourceClaims(namespace).Create(ctx, claim, metav1.CreateOptions{}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: claim.Name}, Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false),
			ResourceClaims:               []corev1.PodResourceClaim{{Name: "gpus", ResourceClaimName: &claim.Name}},
			Containers: []corev1.Container{{
				Name: "c", Image: "none", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpus"}}},
			}},
		}}
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
		_, _ = admin.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{}) // once is enough
		if _, err := admin.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		return devicesOf(t, admin, claim.Name, pending)
	}
	if got := place("aligned or Pending", false); got != "gpu-0 gpu-1 gpu-2 gpu-3" {
		t.Errorf("the first pod has %q", got)
	}
	if got := place("aligned if possible", true); got != "" {
		t.Errorf("a GPU with a fault was given away: %q", got)
	}
	// The fault is repaired: the pod that waits gets the second group.
	for _, slice := range published(t, "dgx-h100", scanned(t, "dgx-h100")) {
		before, err := admin.ResourceV1().ResourceSlices().Get(ctx, slice.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		slice.ResourceVersion = before.ResourceVersion
		if _, err := admin.ResourceV1().ResourceSlices().Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if got := devicesOf(t, admin, "aligned-if-possible", false); got != "gpu-4 gpu-5 gpu-6 gpu-7" {
		t.Errorf("after the repair the pod that waited has %q", got)
	}
}

// createReadyNode creates a node that takes pods.
func createReadyNode(t *testing.T, admin *kubernetes.Clientset, name string) {
	t.Helper()
	ctx := t.Context()
	node, err := admin.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Spec.Taints = nil // the API server's: the node is not ready yet
	if node, err = admin.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	node.Status.Allocatable = corev1.ResourceList{"cpu": apiresource.MustParse("100"),
		"memory": apiresource.MustParse("1Ti"), "pods": apiresource.MustParse("100")}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if _, err = admin.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// devicesOf waits until the pod and the claim of a name have a node, and returns the devices. With
// pending it waits until the scheduler says that there is none, and returns nothing.
func devicesOf(t *testing.T, admin *kubernetes.Clientset, name string, pending bool) string {
	t.Helper()
	for late := time.After(2 * time.Minute); ; {
		pod, err := admin.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		claim, err := admin.ResourceV1().ResourceClaims(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if pod.Spec.NodeName != "" && claim.Status.Allocation != nil {
			var devices []string
			for _, r := range claim.Status.Allocation.Devices.Results {
				devices = append(devices, r.Device)
			}
			slices.Sort(devices)
			return strings.Join(devices, " ")
		}
		if pending && slices.ContainsFunc(pod.Status.Conditions,
			func(c corev1.PodCondition) bool { return c.Reason == corev1.PodReasonUnschedulable }) {
			return ""
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-late:
			t.Fatalf("the pod %s is not as it is to be: %+v", name, pod.Status)
		}
	}
}

// documentedClaim returns a claim of docs/dra.md.
func documentedClaim(t *testing.T, name string) *resourceapi.ResourceClaim {
	t.Helper()
	var claim resourceapi.ResourceClaim
	if err := yaml.UnmarshalStrict([]byte(documented(t, "claim: "+name)), &claim); err != nil {
		t.Fatalf("the claim %q of docs/dra.md: %v", name, err)
	}
	return &claim
}

// documented returns the example of docs/dra.md with a mark.
func documented(t *testing.T, mark string) string {
	t.Helper()
	docs, err := os.ReadFile("../../docs/dra.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(docs), "<!-- "+mark+" -->\n```yaml\n")
	text, _, closed := strings.Cut(text, "```\n")
	if !found || !closed {
		t.Fatalf("docs/dra.md has no example with the mark %q", mark)
	}
	return text
}
