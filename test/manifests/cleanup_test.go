package manifests

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestCleanupHooks: with cleanup.enabled the chart has hooks that clean the nodes after the release
// is deleted, and without it none. The pods are those of the static manifest.
func TestCleanupHooks(t *testing.T) {
	t.Parallel()
	hooks := func(values string) (all []runtime.Object) {
		for _, o := range decode(t, "chart", render(t, values)) {
			m, err := meta.Accessor(o)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(m.GetName(), "-cleanup") {
				if got := m.GetAnnotations()["helm.sh/hook"]; got != "post-delete" {
					t.Errorf("%T %s: hook %q, want post-delete", o, m.GetName(), got)
				}
				all = append(all, o)
			}
		}
		return all
	}
	for _, values := range []string{"{}", "{cleanup: {enabled: null}}"} {
		if got := hooks(values); len(got) > 0 {
			t.Errorf("%s: %d hooks", values, len(got))
		}
	}
	all := hooks("{cleanup: {enabled: true}, mps: {enabled: true}}")
	set, job := only[*appsv1.DaemonSet](t, all), only[*batchv1.Job](t, all)
	statics := decode(t, "static", read(t, cleanupFolder+"/cleanup.yaml"))
	want := only[*appsv1.DaemonSet](t, statics).Spec.Template.Spec
	got := set.Spec.Template.Spec
	if len(got.InitContainers) != len(want.InitContainers) ||
		!slices.Equal(got.InitContainers[0].Command, want.InitContainers[0].Command) ||
		!slices.Equal(got.InitContainers[1].Command, want.InitContainers[1].Command) ||
		!slices.Equal(got.Containers[0].Command, want.Containers[0].Command) {
		t.Errorf("containers of the chart %v and %v, of the manifest %v and %v", got.InitContainers, got.Containers,
			want.InitContainers,
			want.Containers)
	}
	for _, diff := range []string{
		cmp.Diff(want.Volumes, got.Volumes), cmp.Diff(want.Tolerations, got.Tolerations),
		cmp.Diff(want.InitContainers[0].VolumeMounts, got.InitContainers[0].VolumeMounts),
		cmp.Diff(only[*rbacv1.ClusterRole](t, statics).Rules, only[*rbacv1.ClusterRole](t, all).Rules),
	} {
		if diff != "" {
			t.Errorf("the chart differs from the manifest (-manifest +chart):\n%s", diff)
		}
	}
	if c := job.Spec.Template.Spec.Containers[0].Command; !slices.Contains(c, "--await="+set.Namespace+"/"+set.Name) {
		t.Errorf("the Job waits for %v, and not for the DaemonSet %s", c, set.Name)
	}
	plain := only[*appsv1.DaemonSet](t, hooks("{cleanup: {enabled: true}, kubeletRoot: /data/kubelet}")).Spec.Template.Spec.InitContainers[0]
	if i := slices.IndexFunc(plain.Env, func(e corev1.EnvVar) bool { return e.Name == "KUBELET_ROOT" && e.Value == "/data/kubelet" }); i < 0 {
		t.Errorf("variables %v", plain.Env)
	}
}
