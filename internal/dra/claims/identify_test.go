package claims_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// TestIdentify: what kubelet tells of the devices of claims is joined with what was prepared.
func TestIdentify(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	r.pools.Publish(r.pools.Value().Shared(4))
	admin := claim("admin", gpuC)
	admin.Results[0].AdminAccess = true
	share, mig := part("share", 20, gpuA), claim("mig", migB0)
	mig.OwnerPod = "pod-1"
	r.prepare(c, mig)
	r.prepare(c, share)
	r.prepare(c, admin)

	by := func(claim, device, share string) kubelet.ContainerDevice {
		return kubelet.ContainerDevice{Namespace: "default", Pod: "p", Container: "main", Claim: kubelet.ClaimResource{
			Namespace: "default", Name: claim, Driver: "gpu.nvidia.com", Pool: "node", Device: device, ShareID: share,
		}}
	}
	with := func(d kubelet.ContainerDevice, id string) kubelet.ContainerDevice {
		d.ID = id
		return d
	}
	other := by("claim-mig", migB0, "")
	other.Claim.Driver = "example.com"
	plugin := kubelet.ContainerDevice{ID: "GPU-x", Pod: "q"}
	got := claims.Identify([]kubelet.ContainerDevice{
		plugin, by("claim-mig", migB0, ""), by("claim-share", gpuA, share.Results[0].ShareID), by("claim-admin", gpuC, ""),
		by("claim-gone", gpuA, ""), other,
	}, c.Status().Value())
	want := []kubelet.ContainerDevice{
		plugin, with(by("claim-mig", migB0, ""), "MIG-b0"), with(by("claim-share", gpuA, share.Results[0].ShareID), "GPU-a"),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var uids []string
	for _, d := range claims.WithPodUIDs(append(want, kubelet.ContainerDevice{PodUID: "known"}), c.Status().Value()) {
		uids = append(uids, d.PodUID)
	}
	if diff := cmp.Diff([]string{"", "pod-1", "", "known"}, uids); diff != "" {
		t.Errorf("UIDs of pods (-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		devices []string
		want    int
	}{{[]string{"GPU-b"}, 1}, {[]string{"MIG-b0"}, 1}, {[]string{"MIG-b1"}, 0}, {[]string{"GPU-a", "GPU-b"},
		2}, {[]string{"GPU-c"}, 0}} {
		if of := claims.Of(c.Status().Value(), tt.devices); len(of) != tt.want {
			t.Errorf("%v: %d claims, want %d", tt.devices, len(of), tt.want)
		}
	}
}
