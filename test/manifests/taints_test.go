package manifests

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// TestOwnTaintsAreTolerated: a taint of this program stays on a Node when its writer is
// uninstalled. Whatever is installed next must come to that Node, with or without a client of the
// API server: both programs, and the MPS control daemon.
func TestOwnTaintsAreTolerated(t *testing.T) {
	t.Parallel()
	manifests := deployedDaemonSets(t)
	for _, values := range goldens {
		manifests["chart "+values] = decode(t, "chart", render(t, values))
	}
	for _, values := range []string{
		"{mps: {enabled: true}}", "{tolerations: [], mps: {enabled: true}}", "{tolerations: null}", "{tolerations: [{key: gpu, operator: Exists}]}",
		"{features: {taint: true, changeTaint: true}}", "{dra: {enabled: true}}", "{dra: {enabled: true}, mps: {enabled: true}}",
	} {
		manifests["chart "+values] = decode(t, "chart", render(t, values))
	}
	found := 0
	for name, objects := range manifests {
		for _, object := range objects {
			set, is := object.(*appsv1.DaemonSet)
			if !is {
				continue
			}
			found++
			for _, taint := range kubeapi.OwnTaints() {
				if !slices.ContainsFunc(set.Spec.Template.Spec.Tolerations, func(o corev1.Toleration) bool {
					return (o.Key == taint.String() || o.Key == "") && o.Operator == corev1.TolerationOpExists && o.Effect == ""
				}) {
					t.Errorf("%s: the DaemonSet %s does not tolerate the taint %s", name, set.Name, taint)
				}
			}
		}
	}
	if found < len(manifests) {
		t.Errorf("%d DaemonSets in %d manifests", found, len(manifests))
	}
}

// deployedDaemonSets returns the objects of each folder of manifests, by its name.
func deployedDaemonSets(t *testing.T) map[string][]runtime.Object {
	t.Helper()
	plugin := []runtime.Object{only[*appsv1.DaemonSet](t, decode(t, "static", read(t, static+"/gpu-device-plugin.yaml")))}
	mps := decode(t, "mps", read(t, mpsFolder+"/mps-control-daemon.yaml"))
	const root = "../../deployments/"
	withRights := slices.Concat(plugin, decode(t, "rights", read(t, root+"node-agent/rights.yaml")))
	agent := kustomize(t, root+"node-agent", []string{"../static", "rights.yaml"}, withRights)
	dra := kustomize(t, root+"node-agent-dra", []string{"../node-agent", "classes.yaml", "rights.yaml"}, agent)
	return map[string][]runtime.Object{
		"static": plugin, "mps-control-daemon": mps, "node-agent": agent, "node-agent-dra": dra,
		"host-dev":       kustomize(t, root+"host-dev", []string{"../static"}, plugin),
		"node-agent-mig": kustomize(t, root+"node-agent-mig", []string{"../node-agent"}, agent),
		"node-agent-dra-mps": kustomize(t, root+"node-agent-dra-mps", []string{"../node-agent-dra", "../mps-control-daemon"},
			slices.Concat(dra, mps)),
	}
}
