package daemon_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// TestPodsOfClaims: the pods to evict for a GPU with claims. A shared claim has several pods, and a
// pod several devices.
func TestPodsOfClaims(t *testing.T) {
	t.Parallel()
	device := func(pod, claim string) kubelet.ContainerDevice {
		return kubelet.ContainerDevice{Namespace: "a", Pod: pod, Claim: kubelet.ClaimResource{Namespace: "a", Name: claim}}
	}
	devices := []kubelet.ContainerDevice{
		device("p", "c1"), device("p", "c1"), device("q", "c1"), device("r", "c2"), device("other", "c9"),
		{Namespace: "b", Pod: "plugin", Resource: "nvidia.com/gpu", ID: "GPU-0"},
	}
	pod := func(names ...string) (pods []repair.Pod) {
		for _, name := range names {
			pods = append(pods, repair.Pod{Namespace: "a", Name: name})
		}
		return pods
	}
	for name, test := range map[string]struct {
		claims []string
		want   []repair.Pod
	}{
		"no claim":                     {nil, nil},
		"one claim of two pods":        {[]string{"c1"}, pod("p", "q")},
		"two claims":                   {[]string{"c1", "c2"}, pod("p", "q", "r")},
		"one of them is without a pod": {[]string{"c1", "c3"}, nil},
	} {
		var claims []dra.Claim
		for _, c := range test.claims {
			claims = append(claims, dra.Claim{Namespace: "a", Name: c})
		}
		if diff := cmp.Diff(test.want, daemon.PodsOfClaims(devices, claims)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
