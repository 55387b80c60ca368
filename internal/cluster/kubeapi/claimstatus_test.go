package kubeapi_test

import (
	"bytes"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// TestWriteClaimDevices: Kubernetes' own types read what is written of a device. What the claim has
// else stays as it was, the text of its parameters too, and so do devices of another driver or
// pool; what it said of this pool before goes.
func TestWriteClaimDevices(t *testing.T) {
	t.Parallel()
	server, client := cluster(t)
	since := time.Date(2026, 1, 1, 10, 0, 0, 0, time.UTC)
	said := func(driver, pool, device string) resourceapi.AllocatedDeviceStatus {
		return resourceapi.AllocatedDeviceStatus{Driver: driver, Pool: pool, Device: device}
	}
	parameters := runtime.RawExtension{Raw: []byte("{\"kind\": \"GpuConfig\",\n\t\"apiVersion\": \"resource.nvidia.com/v1beta1\"}")}
	if err := server.ChangeClaim("ns", "a", func(c *resourceapi.ResourceClaim) {
		c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu"}}
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: "u"}}
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Config: []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "gpu.nvidia.com", Parameters: parameters},
			},
		}}}}
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{
			said("gpu.nvidia.com", "node-1", "gpu-7"), said("gpu.nvidia.com", "node-2", "gpu-7"), said("example.com", "node-1",
				"gpu-7"),
		}
	}); err != nil {
		t.Fatal(err)
	}
	want, err := server.Claim("ns", "a")
	if err != nil {
		t.Fatal(err)
	}
	full := said("gpu.nvidia.com", "node-1", "gpu-0")
	full.ShareID = ptr.To("a1b2")
	full.Data = &runtime.RawExtension{Raw: []byte(`{"uuid":"GPU-a"}`)}
	full.Conditions = []metav1.Condition{
		{Type: "Ready", Status: "False", Reason: "NotUsable", Message: "é\x00\uFFFD",
			LastTransitionTime: metav1.NewTime(since)},
		{Type: "Healthy", Status: "True", Reason: "Healthy", LastTransitionTime: metav1.NewTime(since.Add(time.Second))},
	}
	want.Status.Devices = append(slices.Clone(want.Status.Devices[1:]), full)
	if err := client.WriteClaimDevices(t.Context(), "ns", "a", string(want.UID), []kubeapi.ClaimDeviceStatus{{
		Driver: "gpu.nvidia.com", Pool: "node-1", Device: "gpu-0", ShareID: "a1b2", Data: map[string]string{"uuid": "GPU-a"},
		Conditions: []kubeapi.ClaimCondition{
			{Type: "Ready", Status: "False", Reason: "NotUsable", Message: "é\x00\xff", LastTransitionTime: since},
			{Type: "Healthy", Status: "True", Reason: "Healthy", LastTransitionTime: since.Add(time.Second)},
		},
	}}); err != nil {
		t.Fatal(err)
	}
	got, err := server.Claim("ns", "a")
	if err != nil {
		t.Fatal(err)
	}
	for i := range got.Status.Devices {
		for j, c := range got.Status.Devices[i].Conditions {
			got.Status.Devices[i].Conditions[j].LastTransitionTime = metav1.NewTime(c.LastTransitionTime.UTC())
		}
	}
	if !reflect.DeepEqual(got.Status, want.Status) || !reflect.DeepEqual(got.Spec, want.Spec) {
		t.Errorf("the claim is %+v, want %+v", got, want)
	}
	if err := client.WriteClaimDevices(t.Context(), "ns", "a", "another", nil); !kubeapi.IsNotFound(err) ||
		!strings.Contains(err.Error(), string(want.UID)) {
		t.Errorf("a claim that was created again: %v", err)
	}
	if err := client.WriteClaimDevices(t.Context(), "ns", "gone", "u", nil); !kubeapi.IsNotFound(err) {
		t.Errorf("a claim that is gone: %v", err)
	}
}

// TestUnreadableClaim: an answer that is damaged is an error or a claim that is written, and
// never more.
func TestUnreadableClaim(t *testing.T) {
	t.Parallel()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: types.UID("u")}}
	claim.APIVersion, claim.Kind = "resource.k8s.io/v1", "ResourceClaim"
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: "gpu.nvidia.com", Pool: "p", Device: "d"}}
	var whole bytes.Buffer
	if err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(claim, &whole); err != nil {
		t.Fatal(err)
	}
	var answer []byte
	client := answering(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = w.Write(answer)
		}
	})
	write := func(a []byte) error {
		answer = a
		return client.WriteClaimDevices(t.Context(), "ns", "a", "u",
			[]kubeapi.ClaimDeviceStatus{{Driver: "gpu.nvidia.com", Pool: "p", Device: "d"}})
	}
	if err := write(whole.Bytes()); err != nil {
		t.Fatal(err)
	}
	for n := 0; n < whole.Len(); n += 13 { // the client waits between requests
		if err := write(whole.Bytes()[:n]); n < 4 && err == nil {
			t.Errorf("an answer of %d bytes is written", n)
		}
		damaged := bytes.Clone(whole.Bytes())
		damaged[n] ^= 0xff
		_ = write(damaged)
	}
	if err := write([]byte(`{"kind": "ResourceClaim"}`)); err == nil ||
		!strings.Contains(err.Error(), "it is not protobuf") {
		t.Errorf("an answer in JSON: %v", err)
	}
}
