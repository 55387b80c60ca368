package kubeapi_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// TestResourceClaim: a claim is read in each version that an API server serves, also when the
// versions change, and one that is not there is told from an API that is not there.
func TestResourceClaim(t *testing.T) {
	t.Parallel()
	server, client := cluster(t)
	if err := server.ChangeClaim("ns", "a", func(c *resourceapi.ResourceClaim) {
		c.Annotations = map[string]string{"resource.kubernetes.io/pod-claim-name": "gpus"}
		yes := true
		c.OwnerReferences = []metav1.OwnerReference{{Kind: "Job", UID: "job"}, {Kind: "Pod", UID: "pod", Controller: &yes}}
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: "node-1",
				Device: "gpu-0"}},
		}}
	}); err != nil {
		t.Fatal(err)
	}
	if err := server.ChangeClaim("ns", "waits", func(*resourceapi.ResourceClaim) {}); err != nil {
		t.Fatal(err)
	}
	object, err := server.Claim("ns", "a")
	if err != nil {
		t.Fatal(err)
	}
	want := kubeapi.ResourceClaim{UID: string(object.UID), Namespace: "ns", Name: "a", PodClaim: "gpus", OwnerPod: "pod",
		Allocation: &kubeapi.DeviceAllocation{
			Results: []kubeapi.DeviceResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: "node-1", Device: "gpu-0"}},
		}}
	for _, versions := range [][]string{{"v1"}, {"v1beta1"}, {"v1beta2", "v1beta1"}, {"v1", "v1beta2", "v1beta1"}} {
		server.SetResourceVersions(versions...)
		got, err := client.ResourceClaim(t.Context(), "ns", "a")
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("in %q: %v (-want +got):\n%s", versions, err, diff)
		}
		if got, err := client.ResourceClaim(t.Context(), "ns", "waits"); err != nil || got.Allocation != nil {
			t.Errorf("in %q: %+v %v, want a claim without allocation", versions, got, err)
		}
		if _, err := client.ResourceClaim(t.Context(), "ns", "b"); err == nil ||
			!strings.Contains(err.Error(), `"b" not found`) {
			t.Errorf("in %q: %v, want that there is no such claim", versions, err)
		}
	}
	server.SetResourceVersions()
	if _, err := client.ResourceClaim(t.Context(), "ns", "a"); err == nil ||
		!strings.Contains(err.Error(), "serves resource.k8s.io in none of") {
		t.Errorf("without the API: %v", err)
	}
	server.Stop()
	if _, err := client.ResourceClaim(t.Context(), "ns", "a"); err == nil ||
		!strings.Contains(err.Error(), "read ResourceClaim ns/a: ask the API server") {
		t.Errorf("without API server: %v", err)
	}
}

// TestResourceClaimVersion: the version that was served last is asked for first.
func TestResourceClaimVersion(t *testing.T) {
	t.Parallel()
	const path = "/namespaces/ns/resourceclaims/a"
	client, asked := scripted(t, map[string]string{"GET /apis/resource.k8s.io/v1beta2" +
		path: `200 {"metadata": {"uid": "1"}}`})
	for range 2 {
		if got, err := client.ResourceClaim(t.Context(), "ns", "a"); err != nil || got.UID != "1" {
			t.Fatal(got, err)
		}
	}
	want := []string{"GET /apis/resource.k8s.io/v1" + path, "GET /apis/resource.k8s.io/v1beta2" + path,
		"GET /apis/resource.k8s.io/v1beta2" + path}
	if got := asked(); !slices.Equal(got, want) {
		t.Errorf("asked %q, want %q", got, want)
	}
}
