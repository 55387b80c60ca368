package manifests

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// TestFirstContact: the default installation runs on the nodes with GPUs, with the labels of any tool
// (kdp#1213, gop#78, nvkind#4). Nodes that nobody has labelled get the static manifests, and the
// chart with affinity: null.
func TestFirstContact(t *testing.T) {
	t.Parallel()
	byChart := daemonSet(t, decode(t, "chart", render(t, "{}")), "gpu-device-plugin").Spec.Template.Spec
	everywhere := daemonSet(t, decode(t, "chart", render(t, "{affinity: null}")), "gpu-device-plugin").Spec.Template.Spec
	pods := map[string]corev1.PodSpec{"chart": byChart, "chart, affinity: null": everywhere}
	cleanup := decode(t, "cleanup", read(t, cleanupFolder+"/cleanup.yaml"))
	pods["cleanup"] = daemonSet(t, cleanup, "gpu-device-plugin-cleanup").Spec.Template.Spec
	for folder, objects := range deployedDaemonSets(t) {
		for _, object := range objects {
			if set, is := object.(*appsv1.DaemonSet); is && set.Name == "gpu-device-plugin" {
				pods[folder] = set.Spec.Template.Spec
			}
		}
	}
	for name, tt := range map[string]struct {
		labels      map[string]string
		chart, rest bool // whether the default of the chart, and all others, run there
	}{
		"node-feature-discovery": {map[string]string{"feature.node.kubernetes.io/pci-0302_10de.present": "true"}, true, true},
		"node-feature-discovery, a GPU with a display": {
			map[string]string{"feature.node.kubernetes.io/pci-0300_10de.present": "true"}, true, true},
		"node-feature-discovery of the GPU operator": {map[string]string{"feature.node.kubernetes.io/pci-10de.present": "true"}, true, true},
		"node-feature-discovery, Grace":              {map[string]string{"feature.node.kubernetes.io/cpu-model.vendor_id": "NVIDIA"}, true, true},
		"gpu-feature-discovery, or by hand":          {map[string]string{"nvidia.com/gpu.present": "true"}, true, true},
		"this program": {map[string]string{"gpu-device-plugin.github.io/gpu.health": "good"},
			true, true},
		"GKE": {map[string]string{"cloud.google.com/gke-accelerator": "nvidia-l4"},
			true, true},
		"AKS": {map[string]string{"kubernetes.azure.com/accelerator": "nvidia"}, true,
			true},
		"AKS with Karpenter": {map[string]string{"karpenter.azure.com/sku-gpu-manufacturer": "nvidia"}, true, true},
		"eksctl": {map[string]string{"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"},
			true, true},
		"EKS with Karpenter": {map[string]string{"karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia"}, true, true},
		"EKS in auto mode":   {map[string]string{"eks.amazonaws.com/instance-gpu-manufacturer": "nvidia"}, true, true},
		"DOKS": {map[string]string{"doks.digitalocean.com/gpu-brand": "nvidia"}, true,
			true},
		"nobody":                     {nil, false, true},
		"AMD":                        {map[string]string{"karpenter.k8s.aws/instance-gpu-manufacturer": "amd"}, false, true},
		"a network card of NVIDIA's": {map[string]string{"feature.node.kubernetes.io/pci-15b3.present": "true"}, false, true},
		"Windows": {map[string]string{"kubernetes.azure.com/accelerator": "nvidia",
			"kubernetes.io/os": "windows"}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			of := labels.Set{"kubernetes.io/os": "linux"}
			for key, value := range tt.labels {
				of[key] = value
			}
			for from, pod := range pods {
				want := tt.rest
				if from == "chart" {
					want = tt.chart
				}
				if got := runsOn(t, pod, of); got != want {
					t.Errorf("%s: runs on a node with %v: %t, want %t", from, of, got, want)
				}
			}
		})
	}
}

// runsOn reports whether the nodeSelector and the required node affinity of a pod allow a node with
// these labels.
func runsOn(t *testing.T, pod corev1.PodSpec, of labels.Set) bool {
	t.Helper()
	if !labels.SelectorFromSet(pod.NodeSelector).Matches(of) {
		return false
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil ||
		pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	operators := map[corev1.NodeSelectorOperator]selection.Operator{
		corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpExists: selection.Exists,
	}
	terms := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	return slices.ContainsFunc(terms, func(term corev1.NodeSelectorTerm) bool {
		for _, e := range term.MatchExpressions {
			r, err := labels.NewRequirement(e.Key, operators[e.Operator], e.Values)
			if err != nil {
				t.Fatal(err)
			}
			if !r.Matches(of) {
				return false
			}
		}
		return true
	})
}
