package manifests

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	resourcev1 "k8s.io/api/resource/v1"
)

// TestChartGivesTheStaticDRA: deployments/node-agent-dra is what the chart gives with Dynamic Resource Allocation.
func TestChartGivesTheStaticDRA(t *testing.T) {
	t.Parallel()
	const values = "{cdi: {enabled: true}, failOnInitError: false, nvidiaDriverRoot: /, dra: {enabled: true}, " +
		"features: {labels: node, events: true, condition: true, taint: true}}"
	agent := append(decode(t, "rights.yaml", read(t, "../../deployments/node-agent/rights.yaml")),
		only[*appsv1.DaemonSet](t, decode(t, "static", read(t, filepath.Join(static, "gpu-device-plugin.yaml")))))
	agent = kustomize(t, "../../deployments/node-agent", []string{"../static", "rights.yaml"}, agent)
	for _, file := range []string{"classes.yaml", "rights.yaml"} {
		agent = append(agent, decode(t, file, read(t, filepath.Join("../../deployments/node-agent-dra", file)))...)
	}
	agent = kustomize(t, "../../deployments/node-agent-dra", []string{"../node-agent", "classes.yaml", "rights.yaml"}, agent)
	givesTheSame(t, values, agent)
}

// TestDRAValues: the mode is that of the value, else that of the file, else dra; the account has rights only where it is enabled.
func TestDRAValues(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"{dra: {enabled: true}}": "DRA_MODE=dra",
		"{dra: {enabled: true, mode: split}, config: {map: {a: \"version: v1\"}}}": "DRA_MODE=split",
		"{dra: {enabled: true}, config: {map: {a: \"dra: {mode: plugin}\"}}}":      "",
		"{dra: {enabled: true}, config: {map: {a: \"version: v1\"}}}":              "DRA_MODE=dra",
		"{dra: {enabled: true}, config: {name: a, default: b}}":                    "",
		"{dra: {enabled: true, mode: plugin}, kubeletRoot: /data/kubelet/}":        "DRA_MODE=plugin DRA_REGISTRY_DIR=/data/kubelet/plugins_registry",
		"{dra: {enabled: true, deviceClasses: false, extendedResourceName: \"\"}}": "DRA_MODE=dra",
	} {
		objects := decode(t, "chart", render(t, values))
		pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec
		var got []string
		for _, e := range pod.Containers[0].Env {
			if strings.HasPrefix(e.Name, "DRA_") {
				got = append(got, e.Name+"="+e.Value)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", values, got, want)
		}
		classes := 0
		for _, o := range objects {
			if _, is := o.(*resourcev1.DeviceClass); is {
				classes++
			}
		}
		if none := strings.Contains(values, "deviceClasses: false"); none != (classes == 0) {
			t.Errorf("%s: %d DeviceClasses", values, classes)
		}
		wanted := append([]string{"cluster: resource.k8s.io resourceclaims get,list", "policy gpu-device-plugin-slices",
			"cluster: resource.k8s.io resourceslices get,list,watch,create,update,delete"}, anyRights...)
		if slices.Sort(wanted); !slices.Equal(rights(t, objects), wanted) {
			t.Errorf("%s: rights %q, want %q", values, rights(t, objects), wanted)
		}
	}
}
