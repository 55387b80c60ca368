package apiserver_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	resourcev1beta1 "k8s.io/api/resource/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

func slice(name, node string, devices ...resourceapi.Device) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceSliceSpec{
		Driver: "d", NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1,
			ResourceSliceCount: 1}, Devices: devices,
	}}
}

// TestSlices holds what a driver sees of its ResourceSlices: by its node alone, with a time for
// each taint, wiped by a kubelet, and without the fields of a gate that is off.
func TestSlices(t *testing.T) {
	t.Parallel()
	s := start(t)
	all := client(t, s).ResourceV1().ResourceSlices()
	mine := metav1.ListOptions{FieldSelector: "spec.nodeName=n,spec.driver=d"}
	w, err := all.Watch(t.Context(), mine)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	tainted := resourceapi.Device{Name: "gpu-0", Taints: []resourceapi.DeviceTaint{{Key: "k", Effect: "NoSchedule"}}}
	for _, made := range []*resourceapi.ResourceSlice{slice("other", "m"), slice("a", "n", tainted)} {
		if _, err := all.Create(t.Context(), made, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	there, err := all.List(t.Context(), mine)
	if err != nil || len(there.Items) != 1 || there.Items[0].Spec.Devices[0].Taints[0].TimeAdded == nil {
		t.Fatalf("slices %+v, error %v, want one with a time for its taint", there, err)
	}
	s.SetDroppedFields("taints")
	changed := there.Items[0].DeepCopy()
	changed.Spec.Pool.Generation = 2
	updated, err := all.Update(t.Context(), changed, metav1.UpdateOptions{})
	if err != nil || updated.UID != changed.UID || updated.Spec.Devices[0].Taints != nil {
		t.Errorf("the update gave %+v, error %v, want the same UID and no taints", updated, err)
	}
	if _, err := all.Update(t.Context(), changed, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("an update of an old version gave %v, want a conflict", err)
	}
	twice := slice("b", "n", resourceapi.Device{Name: "gpu-0"}, resourceapi.Device{Name: "gpu-0"})
	if _, err := all.Create(t.Context(), twice, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("two devices of one name gave %v, want that it is invalid", err)
	}
	if err := s.WipeSlices("n"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted} {
		select {
		case e := <-w.ResultChan():
			if got := e.Object.(*resourceapi.ResourceSlice); e.Type != want || got.Name != "a" {
				t.Errorf("the watch sent %s %s, want %s a", e.Type, got.Name, want)
			}
		case <-time.After(limit):
			t.Fatalf("the watch did not send %s", want)
		}
	}
	if err := all.DeleteCollection(t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{FieldSelector: "spec.nodeName=m"}); err != nil {
		t.Error(err)
	}
	if left := s.Slices(); len(left) != 0 {
		t.Errorf("%d slices are left", len(left))
	}
	if err := all.Delete(t.Context(), "a", metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the deletion of a slice that is not there gave %v", err)
	}
	if n := s.Requests()[apiserver.Request{Verb: "delete", Resource: "resourceslices"}]; n != 2 {
		t.Errorf("%d deletions are counted", n)
	}
}

// TestVersions holds that slices and claims are the same in each version that is served.
func TestVersions(t *testing.T) {
	t.Parallel()
	s := start(t)
	c := client(t, s)
	old := c.ResourceV1beta1()
	if _, err := old.ResourceSlices().List(t.Context(), metav1.ListOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a version that is not served gave %v, want 404", err)
	}
	s.SetResourceVersions("v1", "v1beta1")
	made := &resourcev1beta1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec: resourcev1beta1.ResourceSliceSpec{
			Driver: "d", NodeName: "n", Pool: resourcev1beta1.ResourcePool{Name: "n", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourcev1beta1.Device{{Name: "gpu-0", Basic: &resourcev1beta1.BasicDevice{
				Attributes: map[resourcev1beta1.QualifiedName]resourcev1beta1.DeviceAttribute{"type": {StringValue: ptr.To("gpu")}},
			}}},
		}}
	created, err := old.ResourceSlices().Create(t.Context(), made, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(made.Spec, created.Spec); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	now, err := c.ResourceV1().ResourceSlices().Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil || ptr.Deref(now.Spec.Devices[0].Attributes["type"].StringValue, "") != "gpu" {
		t.Errorf("in v1 it is %+v, error %v", now, err)
	}
	err = s.ChangeClaim("ns", "c", func(claim *resourceapi.ResourceClaim) {
		claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{
			{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}},
		}
		claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "d", Pool: "n", Device: "gpu-0"}},
		}}
	})
	if err != nil {
		t.Fatal(err)
	}
	claim, err := old.ResourceClaims("ns").Get(t.Context(), "c", metav1.GetOptions{})
	if err != nil || claim.Spec.Devices.Requests[0].DeviceClassName != "gpu.nvidia.com" ||
		claim.Status.Allocation.Devices.Results[0].Device != "gpu-0" {
		t.Errorf("in v1beta1 it is %+v, error %v", claim, err)
	}
	claim.Status.ReservedFor = []resourcev1beta1.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: "u"}}
	claim.Spec.Devices.Requests[0].DeviceClassName = "other"
	if _, err := old.ResourceClaims("ns").UpdateStatus(t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := s.Claim("ns", "c")
	if err != nil || len(got.Status.ReservedFor) != 1 || got.Spec.Devices.Requests[0].Exactly.DeviceClassName != "gpu.nvidia.com" {
		t.Errorf("after a write of the status it is %+v, error %v", got, err)
	}
	if err := s.DeleteClaim("ns", "c"); err != nil {
		t.Error(err)
	}
}
