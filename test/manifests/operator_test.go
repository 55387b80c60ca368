package manifests

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestValuesOfClaimsBesideTheOperator: with these values of docs/migrate.md in place of the others'
// node selector, the pod stays when the operator changes its labels, and follows them.
func TestValuesOfClaimsBesideTheOperator(t *testing.T) {
	t.Parallel()
	values := documentedValues(t, "TestValuesBesideTheOperator")
	selector := regexp.MustCompile("(?m)^(nodeSelector|affinity):.*\n")
	values = selector.ReplaceAllString(values, "") + documentedValues(t, "TestValuesOfClaimsBesideTheOperator")
	pod := daemonSet(t, decode(t, "claims beside the operator", render(t, values)), "gpu-device-plugin").Spec.Template.Spec
	want := map[string]string{"kubernetes.io/os": "linux", "nvidia.com/gpu.present": "true"}
	if !maps.Equal(pod.NodeSelector, want) || pod.Affinity != nil {
		t.Errorf("the node selector is %v, and the affinity %v", pod.NodeSelector, pod.Affinity)
	}
	if !slices.ContainsFunc(pod.Containers[0].Env,
		func(e corev1.EnvVar) bool { return e.Name == "NODE_QUIESCE" && e.Value == "true" }) {
		t.Errorf("the labels of the operator are not followed: %v", pod.Containers[0].Env)
	}
}

// documentedValues returns the values of docs/migrate.md that a test holds.
func documentedValues(t *testing.T, test string) string {
	t.Helper()
	_, text, found := strings.Cut(string(read(t, "../../docs/migrate.md")),
		"<!-- values: held by test/manifests "+test+" -->\n```yaml\n")
	values, _, ended := strings.Cut(text, "\n```\n")
	if !found || !ended {
		t.Fatal("docs/migrate.md has no such values")
	}
	return values + "\n"
}

// TestValuesBesideTheOperator: with the values of docs/migrate.md the DaemonSet follows the labels
// of NVIDIA's GPU operator, and finds its driver.
func TestValuesBesideTheOperator(t *testing.T) {
	t.Parallel()
	values := documentedValues(t, "TestValuesBesideTheOperator")
	pod := daemonSet(t, decode(t, "beside the operator", render(t, values)), "gpu-device-plugin").Spec.Template.Spec
	if got := pod.NodeSelector["nvidia.com/gpu.deploy.device-plugin"]; got != "true" {
		t.Errorf("the node selector is %v", pod.NodeSelector)
	}
	if pod.Affinity != nil {
		t.Errorf("the pod asks for labels that the operator's node-feature-discovery may not have written yet: %+v",
			pod.Affinity)
	}
	if !slices.ContainsFunc(pod.Tolerations, func(t corev1.Toleration) bool { return t.Key == "nvidia.com/gpu" }) {
		t.Errorf("the pod does not tolerate the operator's taint: %+v", pod.Tolerations)
	}
	if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.HostPath != nil && v.HostPath.Path == "/run/nvidia/driver" }) {
		t.Errorf("the pod does not have the folder of the operator's driver container: %+v", pod.Volumes)
	}
	// The operator's runtime gives GPUs to pods of its class alone, and, as it may be set up, only to
	// containers with SYS_ADMIN.
	if class := pod.RuntimeClassName; class == nil || *class != "nvidia" || !slices.Contains(grants(t, pod), "SYS_ADMIN") {
		t.Errorf("the pod gets no GPU: RuntimeClass %v, grants %v", class, grants(t, pod))
	}
	environment := map[string]string{}
	for _, e := range pod.Containers[0].Env {
		environment[e.Name] = e.Value
	}
	for name, want := range map[string]string{
		"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver", "DEVICE_LIST_STRATEGY": "cdi-annotations,cdi-cri", "GPU_METRICS": "false",
		"NVIDIA_CDI_HOOK_PATH": "/usr/local/nvidia/toolkit/nvidia-cdi-hook", "NODE_LABELS": "off",
		"FAIL_ON_INIT_ERROR": "false", "MIG_STRATEGY": "single",
	} {
		if got := environment[name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}
