package manifests

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

// Of kubelet's folders, its --root-dir does not move device-plugins. Containers see all of them
// where the daemon expects them.
func TestChartValuesOfKubelet(t *testing.T) {
	t.Parallel()
	const devicePlugins, podResources = "/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"
	for _, tt := range []struct {
		values string
		want   map[string]string // in the container → on the node
	}{
		{"", map[string]string{devicePlugins: devicePlugins, podResources: podResources}},
		{"{kubeletRoot: /data/kubelet/}", map[string]string{devicePlugins: devicePlugins,
			"/data/kubelet/pod-resources": "/data/kubelet/pod-resources"}},
		{"{kubeletRoot: /data/kubelet, dra: {enabled: true}}", map[string]string{devicePlugins: devicePlugins,
			"/data/kubelet/pod-resources": "/data/kubelet/pod-resources", "/data/kubelet/plugins/gpu.nvidia.com": "/data/kubelet/plugins/gpu.nvidia.com",
			"/data/kubelet/plugins_registry": "/data/kubelet/plugins_registry"}},
		{"{kubeletDevicePlugins: /opt/x/device-plugins}", map[string]string{devicePlugins: "/opt/x/device-plugins",
			podResources: podResources}},
	} {
		t.Run(tt.values, func(t *testing.T) {
			t.Parallel()
			pod := daemonSet(t, decode(t, "chart", render(t, tt.values)), "gpu-device-plugin").Spec.Template.Spec
			got, root := map[string]string{}, ""
			for _, m := range pod.Containers[0].VolumeMounts {
				i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
				if strings.Contains(m.MountPath, "/kubelet/") && i >= 0 {
					got[m.MountPath] = pod.Volumes[i].HostPath.Path
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("kubelet's folders (-want +got):\n%s", diff)
			}
			for _, e := range pod.Containers[0].Env {
				if e.Name == "KUBELET_ROOT" {
					root = e.Value
				}
			}
			if moved := strings.Contains(tt.values, "/data/kubelet"); moved != (root == "/data/kubelet") {
				t.Errorf("KUBELET_ROOT is %q", root)
			}
		})
	}
}
