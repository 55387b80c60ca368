package cluster

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draslices"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

// TestDriverNeeded: in a mode with Dynamic Resource Allocation, and as long as anything is left of one.
func TestDriverNeeded(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		mode      config.DRAMode
		published map[string]bool
		owner     dra.Ownership // of one of eight GPUs
		want      bool
	}{
		"never":             {config.DRAOff, map[string]bool{}, dra.OwnedByPlugin, false},
		"all":               {config.DRAAll, map[string]bool{}, dra.OwnedByPlugin, true},
		"one leaves":        {config.DRAOff, map[string]bool{}, dra.LeavesDRA, true},
		"one is nobody's":   {config.DRAOff, map[string]bool{}, dra.OwnedByNobody, true},
		"one is published":  {config.DRAOff, map[string]bool{"GPU-0": true}, dra.OwnedByPlugin, true},
		"not known of whom": {config.DRAOff, map[string]bool{}, "", true},
	} {
		configs, snapshots := feed.New(config.Config{DRA: config.DRA{Mode: tt.mode}}), feed.New(snapshotOf(8))
		owners := dra.Owners{}
		for _, g := range snapshots.Value().GPUs {
			owners[g.UUID] = dra.OwnedByPlugin
		}
		owners["GPU-0"] = tt.owner
		d := daemon.View{Configs: configs, DRA: &daemon.DRA{
			Owners: feed.New(owners), Claims: claims.New(claims.Options{}),
			Devices: draslices.New(t.Context(), draslices.Options{Snapshots: snapshots, Configs: configs, Owners: feed.New(owners)}),
		}}
		if err := d.DRA.Devices.SetPublished(tt.published); err != nil {
			t.Fatal(err)
		}
		for range 20 { // in whatever order the GPUs are looked at
			if got, _ := driverNeeded(d); got != tt.want {
				t.Fatalf("%s: needed %v", name, got)
			}
		}
	}
}

// TestClaimReader: of a claim that several drivers have a part in, the driver gets its own, with all that the scheduler wrote.
func TestClaimReader(t *testing.T) {
	s := newStage(t)
	opaque := func(driver, text string) resourceapi.DeviceConfiguration {
		return resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(text)}},
		}
	}
	if err := s.server.ChangeClaim("ns", "a", func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "nic", Driver: "nic.example.com", Pool: "node-1", Device: "nic-0"},
				{
					Request: "gpus/aligned", Driver: dra.Driver, Pool: "node-1", Device: "gpu-1", AdminAccess: ptr.To(true),
					ShareID: ptr.To(types.UID("s")), ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi")},
					Tolerations: []resourceapi.DeviceToleration{{Key: "gpu.nvidia.com/xid", Operator: "Equal", Value: "48", Effect: "NoSchedule"}},
				},
				{Request: "gpus/aligned", Driver: dra.Driver, Pool: "node-1", Device: "gpu-0"},
			},
			Config: []resourceapi.DeviceAllocationConfiguration{
				{Source: resourceapi.AllocationConfigSourceClass, DeviceConfiguration: opaque(dra.Driver, `{"kind":"GpuConfig"}`)},
				{Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: opaque("nic.example.com", `{}`)},
				{Source: resourceapi.AllocationConfigSourceClaim, Requests: []string{"gpus"}, DeviceConfiguration: opaque(dra.Driver, `{"a":1}`)},
			},
		}}
	}); err != nil {
		t.Fatal(err)
	}
	object, err := s.server.Claim("ns", "a")
	if err != nil {
		t.Fatal(err)
	}
	want := dra.Claim{
		UID: string(object.UID), Namespace: "ns", Name: "a", Results: []dra.Result{
			{
				Request: "gpus/aligned", Pool: "node-1", Device: "gpu-1", ShareID: "s", ConsumedCapacity: map[string]string{"memory": "10Gi"},
				AdminAccess: true, Tolerations: []dra.Toleration{{Key: "gpu.nvidia.com/xid", Operator: "Equal", Value: "48", Effect: "NoSchedule"}},
			},
			{Request: "gpus/aligned", Pool: "node-1", Device: "gpu-0"},
		}, Configs: []dra.OpaqueConfig{
			{Source: dra.FromClass, Parameters: []byte(`{"kind":"GpuConfig"}`)},
			{Source: dra.FromClaim, Requests: []string{"gpus"}, Parameters: []byte(`{"a":1}`)},
		},
	}
	reader := claimReader{kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})}
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		s.server.SetResourceVersions(version)
		got, err := reader.Claim(t.Context(), "ns", "a")
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", version, err, diff)
		}
	}
}

// TestClaimExists: whether a claim is leaked is told by its UID; an API server that does not answer, or has no such API, tells nothing.
func TestClaimExists(t *testing.T) {
	s := newStage(t)
	if err := s.server.ChangeClaim("ns", "a", func(*resourceapi.ResourceClaim) {}); err != nil {
		t.Fatal(err)
	}
	object, err := s.server.Claim("ns", "a")
	if err != nil {
		t.Fatal(err)
	}
	c := &Cluster{client: kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})}
	for _, tt := range []struct {
		uid, name string
		want      bool
	}{{string(object.UID), "a", true}, {"another", "a", false}, {string(object.UID), "b", false}} {
		if got, err := c.claimExists(t.Context(), tt.uid, "ns", tt.name); err != nil || got != tt.want {
			t.Errorf("claim %s with UID %s: %v, %v, want %v", tt.name, tt.uid, got, err, tt.want)
		}
	}
	s.server.SetResourceVersions()
	if got, err := c.claimExists(t.Context(), string(object.UID), "ns", "a"); err == nil {
		t.Errorf("without the API: %v, want an error", got)
	}
}
