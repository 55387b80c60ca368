package cluster

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// Of a claim that several drivers have a part in, the driver gets its own, with all that the
// scheduler wrote. This is a test inside the package: the driver shows of a claim what containers
// get, and not what it read.
func TestClaimReader(t *testing.T) {
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	opaque := func(driver, text string) (c resourceapi.DeviceConfiguration) {
		c.Opaque = &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(text)}}
		return c
	}
	if err := server.ChangeClaim("ns", "a", func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "nic", Driver: "nic.example.com", Pool: "node-1", Device: "nic-0"},
				{
					Request: "gpus/aligned", Driver: dra.Driver, Pool: "node-1", Device: "gpu-1", AdminAccess: ptr.To(true),
					ShareID:          ptr.To(types.UID("s")),
					ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi")},
					Tolerations: []resourceapi.DeviceToleration{{Key: "gpu.nvidia.com/xid", Operator: "Equal", Value: "48",
						Effect: "NoSchedule"}},
				},
				{Request: "gpus/aligned", Driver: dra.Driver, Pool: "node-1", Device: "gpu-0"},
			},
			Config: []resourceapi.DeviceAllocationConfiguration{
				{Source: resourceapi.AllocationConfigSourceClass, DeviceConfiguration: opaque(dra.Driver, `{"kind":"GpuConfig"}`)},
				{Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: opaque("nic.example.com", `{}`)},
				{Source: resourceapi.AllocationConfigSourceClaim, Requests: []string{"gpus"},
					DeviceConfiguration: opaque(dra.Driver, `{"a":1}`)},
			},
		}}
	}); err != nil {
		t.Fatal(err)
	}
	object, err := server.Claim("ns", "a")
	if err != nil {
		t.Fatal(err)
	}
	want := dra.Claim{
		UID: string(object.UID), Namespace: "ns", Name: "a", Results: []dra.Result{
			{
				Request: "gpus/aligned", Pool: "node-1", Device: "gpu-1", ShareID: "s",
				ConsumedCapacity: map[string]string{"memory": "10Gi"},
				AdminAccess:      true, Tolerations: []dra.Toleration{{Key: "gpu.nvidia.com/xid", Operator: "Equal", Value: "48",
					Effect: "NoSchedule"}},
			},
			{Request: "gpus/aligned", Pool: "node-1", Device: "gpu-0"},
		}, Configs: []dra.OpaqueConfig{
			{Source: dra.FromClass, Parameters: []byte(`{"kind":"GpuConfig"}`)},
			{Source: dra.FromClaim, Requests: []string{"gpus"}, Parameters: []byte(`{"a":1}`)},
		},
	}
	reader := claimReader{client: kubeapi.New(kubeapi.Options{Kubeconfig: server.Kubeconfig(), Node: "node-1",
		Version: "v1"})}
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		server.SetResourceVersions(version)
		got, err := reader.Claim(t.Context(), "ns", "a")
		// without the device that it only looks at
		if diff := cmp.Diff(want, got); err != nil || diff != "" || len(reader.lastByDevice) != 1 {
			t.Errorf("%s: %v, read last: %v (-want +got):\n%s", version, err, reader.lastByDevice, diff)
		}
	}
}
