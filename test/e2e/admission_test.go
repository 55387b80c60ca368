package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// unitsValues have policies of the chart for pods that ask for units, here with names of the
// configuration's own.
const unitsValues = `
fullnameOverride: policies # beside the DaemonSet that is there
config:
  map:
    default: |
      version: v1
      selectors: [{indices: [0], units: true}]
      units: {name: example.com/mem, size: 256Mi, percentage: example.com/cores}
units: {hami: true, hamiNamespaces: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-public]}]}}
`

// asking is a pod, and what the API server makes of it.
type asking struct {
	name              string
	containers, inits []string // the limits of each, in YAML
	sidecars          []string // as well, of init containers that run on
	requests, ofPod   string   // the requests of the first container beside its limits, and the limits of the whole pod
	notes             map[string]string
	scheduler         string
	namespace         string // default if empty

	refused string // in the error; empty where the pod is admitted
	limits  string // those of all containers afterwards, with the requests the same
	note    string
}

// asksForUnits are pods with unitsValues.
var asksForUnits = []asking{
	{name: "no GPU", containers: []string{"cpu: 1"}, limits: "cpu=1"},
	{name: "memory alone", containers: []string{"example.com/mem.256Mi: 4"}, limits: "example.com/mem.256Mi=4"},
	{name: "both", containers: []string{"example.com/mem.256Mi: 4, example.com/cores.percentage: 25"},
		limits: "example.com/cores.percentage=25 example.com/mem.256Mi=4"},
	{name: "both in an init container", containers: []string{""},
		inits:  []string{"example.com/mem.256Mi: 4, example.com/cores.percentage: 25"},
		limits: "| example.com/cores.percentage=25 example.com/mem.256Mi=4"},
	{name: "no percentage", containers: []string{"example.com/cores.percentage: 0"},
		limits: "example.com/cores.percentage=0"},
	{name: "names of others", containers: []string{"volcano.sh/gpu-core.percentage: 25"},
		refused: "volcano.sh/gpu-core.percentage is served by no node here"},
	{name: "percentage alone", containers: []string{"example.com/cores.percentage: 25"},
		refused: "container c0 asks for a percentage"},
	{name: "memory of another container", containers: []string{"example.com/mem.256Mi: 4",
		"example.com/cores.percentage: 25"}, refused: "container c1 asks"},
	{name: "an init container's percentage", containers: []string{"example.com/mem.256Mi: 4"},
		inits:   []string{"example.com/cores.percentage: 5"},
		refused: "container i0 asks for a percentage"},
	{name: "memory of another name", containers: []string{"volcano.sh/gpu-mem.128Mi: 4, example.com/cores.percentage: 25"},
		refused: "example.com/mem.256Mi"},
	{name: "no memory", containers: []string{"example.com/mem.256Mi: 0, example.com/cores.percentage: 25"},
		refused: "container c0 asks"},
	{name: "both in a sidecar", containers: []string{""}, sidecars: []string{"example.com/mem.256Mi: 4, example.com/cores.percentage: 25"},
		limits: "| example.com/cores.percentage=25 example.com/mem.256Mi=4"},
	{name: "a sidecar's percentage", containers: []string{"example.com/mem.256Mi: 4"},
		sidecars: []string{"example.com/cores.percentage: 5"},
		refused:  "container s0 asks for a percentage"},
	{name: "a percentage with an exponent", containers: []string{"example.com/cores.percentage: 1e1"},
		refused: "container c0 asks"},
	// What the API server itself refuses, so that no policy has to.
	{name: "a part of a unit", containers: []string{"example.com/mem.256Mi: 0.5"}, refused: "must be an integer"},
	{name: "a percentage below 0", containers: []string{"example.com/cores.percentage: -5"},
		refused: "must be greater than or equal to 0"},
	{name: "a request without a limit", containers: []string{""}, requests: "example.com/cores.percentage: 5",
		refused: "Limit must be set"},
	{name: "a request of less", containers: []string{"example.com/mem.256Mi: 4, example.com/cores.percentage: 25"},
		requests: "example.com/mem.256Mi: 1",
		refused:  "must be equal to"},
	{name: "a limit of the whole pod", containers: []string{""}, ofPod: "example.com/cores.percentage: 5",
		refused: "spec.resources"},
}

// asksByHAMi are pods with HAMi's words.
var asksByHAMi = []asking{
	{name: "whole GPUs", containers: []string{"nvidia.com/gpu: 2"}, limits: "nvidia.com/gpu=2",
		scheduler: "hami-scheduler"},
	{name: "a size that is no multiple", containers: []string{"nvidia.com/gpu: 1, nvidia.com/gpumem: 3000, cpu: 1"},
		scheduler: "hami-scheduler",
		limits:    "cpu=1 example.com/mem.256Mi=12", note: "c0: nvidia.com/gpu=1 nvidia.com/gpumem=3000"},
	{name: "a multiple", containers: []string{"nvidia.com/gpu: 1, nvidia.com/gpumem: 3Ki, nvidia.com/gpucores: 31"},
		limits: "example.com/cores.percentage=35 example.com/mem.256Mi=12", note: "c0: nvidia.com/gpu=1 nvidia.com/gpumem=3072 nvidia.com/gpucores=31"},
	{name: "without a count", containers: []string{"nvidia.com/gpumem: 1, nvidia.com/gpucores: 0"},
		limits: "example.com/mem.256Mi=1", note: "c0: nvidia.com/gpumem=1 nvidia.com/gpucores=0"},
	{name: "several containers", containers: []string{"cpu: 1", "nvidia.com/gpumem: 256, nvidia.com/gpucores: 100"},
		inits: []string{"nvidia.com/gpumem: 257"}, notes: map[string]string{"a": "b"}, scheduler: "other",
		limits: "cpu=1 | example.com/cores.percentage=100 example.com/mem.256Mi=1 | example.com/mem.256Mi=2",
		note:   "c1: nvidia.com/gpumem=256 nvidia.com/gpucores=100; i0: nvidia.com/gpumem=257"},
	{name: "in a namespace that is left out", namespace: "kube-public", containers: []string{"nvidia.com/gpumem: 256"},
		limits: "nvidia.com/gpumem=256"},
	{name: "two GPUs", containers: []string{"nvidia.com/gpu: 2, nvidia.com/gpumem: 3000"},
		refused: "nvidia.com/gpu must be 1"},
	{name: "one that can be and one that cannot", containers: []string{"nvidia.com/gpumem: 1",
		"nvidia.com/gpu: 2, nvidia.com/gpumem: 3000"},
		refused: "nvidia.com/gpu must be 1"},
	{name: "no GPU and memory", containers: []string{"nvidia.com/gpu: 0, nvidia.com/gpumem: 3000"},
		refused: "nvidia.com/gpu must be 1"},
	{name: "a percentage of memory", containers: []string{"nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 50"},
		refused: "ask for MiB"},
	{name: "both", containers: []string{"nvidia.com/gpumem: 1, nvidia.com/gpumem-percentage: 50"}, refused: "ask for MiB"},
	{name: "priority", containers: []string{"nvidia.com/gpumem: 1, nvidia.com/priority: 0"}, refused: "priorityClassName"},
	{name: "a mode", containers: []string{"nvidia.com/gpumem: 1"}, notes: map[string]string{"nvidia.com/vgpu-mode": "mig"},
		refused: "vgpu-mode"},
	{name: "a type", containers: []string{"nvidia.com/gpu: 1"}, notes: map[string]string{"nvidia.com/use-gputype": "A100"},
		refused: "nvidia.com/gpu.product"},
	{name: "a GPU", containers: []string{"nvidia.com/gpu: 1"},
		notes: map[string]string{"nvidia.com/nouse-gpuuuid": "GPU-0"}, refused: "does not choose"},
	{name: "compute alone", containers: []string{"nvidia.com/gpu: 1, nvidia.com/gpucores: 50"}, refused: "ask for both"},
	{name: "no memory", containers: []string{"nvidia.com/gpumem: 0"}, refused: "from 1 to 16777216"},
	{name: "too much memory", containers: []string{"nvidia.com/gpumem: 9223372036854775807"},
		refused: "from 1 to 16777216"},
	{name: "too much compute", containers: []string{"nvidia.com/gpumem: 1, nvidia.com/gpucores: 101"},
		refused: "from 0 to 100"},
	{name: "an exponent", containers: []string{"nvidia.com/gpumem: 1e3"}, limits: "example.com/mem.256Mi=4",
		note: "c0: nvidia.com/gpumem=1000"},
	{name: "thousandths", containers: []string{"nvidia.com/gpu: 1000m, nvidia.com/gpumem: 256000m"},
		limits: "example.com/mem.256Mi=1", note: "c0: nvidia.com/gpu=1 nvidia.com/gpumem=256"},
	{name: "a fraction", containers: []string{"nvidia.com/gpumem: 0.5"}, refused: "must be an integer"},
	{name: "below 0", containers: []string{"nvidia.com/gpumem: -256"}, refused: "must be greater than or equal to 0"},
	{name: "compute below 0", containers: []string{"nvidia.com/gpumem: 256, nvidia.com/gpucores: -5"},
		refused: "must be greater than or equal to 0"},
	{name: "10^18", containers: []string{"nvidia.com/gpumem: 1E"}, refused: "from 1 to 16777216"},
	{name: "10^18 GPUs", containers: []string{"nvidia.com/gpu: 1E, nvidia.com/gpumem: 256"},
		refused: "nvidia.com/gpu must be 1"},
	{name: "10^18 percent", containers: []string{"nvidia.com/gpumem: 256, nvidia.com/gpucores: 1E"},
		refused: "from 0 to 100"},
	{name: "more than an int64", containers: []string{"nvidia.com/gpumem: 1e30"}, refused: "nvidia.com/gpumem"},
	{name: "a sidecar", containers: []string{""}, sidecars: []string{"nvidia.com/gpumem: 256, nvidia.com/gpucores: 5"},
		limits: "| example.com/cores.percentage=5 example.com/mem.256Mi=1", note: "s0: nvidia.com/gpumem=256 nvidia.com/gpucores=5"},
	{name: "a request alone", containers: []string{""}, requests: "nvidia.com/gpumem: 256", refused: "Limit must be set"},
	{name: "a limit of the whole pod", containers: []string{""}, ofPod: "nvidia.com/gpumem: 256",
		refused: "spec.resources"},
	{name: "units, too", containers: []string{"nvidia.com/gpumem: 1, example.com/mem.256Mi: 1"},
		refused: "ask for one of them"},
	{name: "a hundred containers", containers: slices.Repeat([]string{"nvidia.com/gpumem: 256, nvidia.com/gpucores: 5"},
		50),
		inits: slices.Repeat([]string{"nvidia.com/gpumem: 256, nvidia.com/gpucores: 5"}, 50),
		limits: strings.TrimPrefix(strings.Repeat(" | example.com/cores.percentage=5 example.com/mem.256Mi=1", 100),
			" | "), note: "*"},
}

// pod returns the pod.
func (a asking) pod(t *testing.T) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "asking", Annotations: a.notes},
		Spec: corev1.PodSpec{SchedulerName: a.scheduler}}
	add := func(prefix string, all []string) (made []corev1.Container) {
		for i, text := range all {
			c := corev1.Container{Name: fmt.Sprint(prefix, i), Image: "none"}
			c.Resources.Limits = quantities(t, text)
			made = append(made, c)
		}
		return made
	}
	pod.Spec.Containers, pod.Spec.InitContainers = add("c", a.containers), add("i", a.inits)
	for _, c := range add("s", a.sidecars) {
		c.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, c)
	}
	if a.ofPod != "" {
		pod.Spec.Resources = &corev1.ResourceRequirements{Limits: quantities(t, a.ofPod)}
	}
	if a.requests != "" {
		pod.Spec.Containers[0].Resources.Requests = quantities(t, a.requests)
	}
	return pod
}

// quantities reads resources in YAML.
func quantities(t *testing.T, text string) (list corev1.ResourceList) {
	t.Helper()
	if err := yaml.Unmarshal([]byte("{"+text+"}"), &list); err != nil {
		t.Fatal(err)
	}
	return list
}

// hold asks the API server what it would make of the pod, and says how that differs from what it
// should.
func (a asking) hold(ctx context.Context, t *testing.T, client kubernetes.Interface) error {
	t.Helper()
	namespace := a.namespace
	if namespace == "" {
		namespace = corev1.NamespaceDefault
	}
	pod, err := client.CoreV1().Pods(namespace).Create(ctx, a.pod(t),
		metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if a.refused != "" {
		if text := fmt.Sprint(err); !strings.Contains(text, a.refused) {
			return fmt.Errorf("%s: error %s, want it refused with %q", a.name, text, a.refused)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", a.name, err)
	}
	var all []string
	for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		limits, requests := amounts(c.Resources.Limits), amounts(c.Resources.Requests)
		if limits != requests {
			t.Errorf("%s: container %s has limits %s and requests %s", a.name, c.Name, limits, requests)
		}
		all = append(all, limits)
	}
	if got := strings.TrimSpace(strings.Join(all, " | ")); got != a.limits {
		return fmt.Errorf("%s: limits %s, want %s", a.name, got, a.limits)
	}
	scheduler := a.scheduler
	if scheduler == "" || a.note != "" && scheduler == "hami-scheduler" {
		scheduler = corev1.DefaultSchedulerName
	}
	note := pod.Annotations["gpu-device-plugin.github.io/hami"]
	delete(pod.Annotations, "gpu-device-plugin.github.io/hami")
	if pod.Spec.SchedulerName != scheduler || !maps.Equal(pod.Annotations, a.notes) ||
		note != a.note && (a.note != "*" || note == "") {
		return fmt.Errorf("%s: scheduler %s, annotations %v, note %q; want %s, %v, %q", a.name, pod.Spec.SchedulerName,
			pod.Annotations, note, scheduler, a.notes, a.note)
	}
	return nil
}

// amounts returns a list of resources in one line.
func amounts(list corev1.ResourceList) string {
	var all []string
	for name, quantity := range list {
		all = append(all, fmt.Sprintf("%s=%s", name, quantity.String()))
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// asksAreHeld holds what the API server makes of pods, once it has the policies.
func asksAreHeld(ctx context.Context, t *testing.T, client kubernetes.Interface) {
	t.Helper()
	first := asking{name: "policies", containers: []string{"nvidia.com/gpumem: 1, example.com/mem.256Mi: 5"},
		refused: "ask for one of them"}
	changed := asking{name: "policies", containers: []string{"nvidia.com/gpumem: 1"}, limits: "example.com/mem.256Mi=1",
		note: "c0: nvidia.com/gpumem=1"}
	alone := asking{name: "policies", containers: []string{"example.com/cores.percentage: 5"}, refused: "container c0"}
	for _, a := range []asking{first, changed, alone} {
		wait(ctx, t, func(ctx context.Context) error { return a.hold(ctx, t, client) })
	}
	for _, a := range slices.Concat(asksForUnits, asksByHAMi) {
		if err := a.hold(ctx, t, client); err != nil {
			t.Error(err)
		}
	}
	ephemeralHasNone(ctx, t, client)
}

// ephemeralHasNone: the API server itself lets no ephemeral container ask for a resource.
func ephemeralHasNone(ctx context.Context, t *testing.T, client kubernetes.Interface) {
	t.Helper()
	pods := client.CoreV1().Pods(corev1.NamespaceDefault)
	pod, err := pods.Create(ctx, asking{containers: []string{"cpu: 1"}, scheduler: "none"}.pod(t), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pods.Delete(context.WithoutCancel(ctx), pod.Name, metav1.DeleteOptions{}) }()
	more := asking{containers: []string{"example.com/cores.percentage: 5"}}.pod(t).Spec.Containers[0]
	pod.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name: "e", Image: more.Image, Resources: more.Resources, ImagePullPolicy: corev1.PullNever, TerminationMessagePolicy: "File",
	}}}
	_, err = pods.UpdateEphemeralContainers(ctx, pod.Name, pod, metav1.UpdateOptions{})
	if err == nil || !strings.Contains(err.Error(), "ephemeralContainers[0].resources: Forbidden") {
		t.Errorf("an ephemeral container with a percentage: %v, want it refused", err)
	}
}

// policiesOfUnits: the API server refuses percentages without memory, and changes or refuses pods
// with HAMi's words. On a node of 1.36 it is asked as the one of 1.36, which is the first with
// MutatingAdmissionPolicies.
func policiesOfUnits(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	if strings.HasPrefix(*kubeletVersion, "1.36.") {
		restart := func(ctx context.Context, args ...string) {
			n.StopAPIServer()
			if err := n.StartAPIServer(ctx, args...); err != nil {
				t.Fatal(err)
			}
		}
		restart(ctx, "--emulated-version=1.36")
		t.Cleanup(func() { restart(context.Background()) })
	}
	start := time.Now()
	text := helm(ctx, t, n, append([]string{"template", "--dry-run=server", "--show-only", "templates/units-policy.yaml"},
		chartWith(t, unitsValues)...)...)
	policies := filepath.Join(t.TempDir(), "policies.yaml")
	if err := os.WriteFile(policies, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = n.Kubectl(context.Background(), "delete", "--ignore-not-found", "--filename", policies) })
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename", policies)
	asksAreHeld(ctx, t, n.Client)
	phase("policies for pods", start)
}
