package cdi_test

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// TestDevicesThatAreNotOfferedHaveNames: a configuration that excludes a GPU may also be the first that uses CDI. A pod may hold the GPU
// then, and kubelet gives it to further pods until the GPU was free for a moment.
func TestDevicesThatAreNotOfferedHaveNames(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed, Selectors: []resource.Selector{
		{Devices: []resource.Ref{"GPU-a"}, Exclude: true},
	}})
	if _, offered := w.Plan.Resource("nvidia.com/gpu"); offered {
		t.Fatal("the GPU is not excluded")
	}
	h.apply(t, w)
	var names []string
	for _, d := range h.spec(t, "gpu").Devices {
		names = append(names, d.Name)
	}
	if want := []string{"GPU-a", "MIG-b0"}; !slices.Equal(names, want) {
		t.Errorf("names %q, want %q", names, want)
	}
}

func TestNamesStayWhenDevicesGo(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	h.apply(t, wanted())
	w := wanted()
	w.Snapshot.GPUs = w.Snapshot.GPUs[:1]
	w.Plan = resource.New(w.Snapshot, resource.Options{})
	h.writer = cdi.NewWriter(h.specs, os.DirFS(h.root)) // a new process
	h.apply(t, w)
	var names []string
	for _, d := range h.spec(t, "gpu").Devices {
		names = append(names, d.Name)
	}
	if want := []string{"GPU-a", "MIG-b0"}; !slices.Equal(names, want) {
		t.Errorf("names %q, want %q", names, want)
	}
	w.Plan = resource.Plan{}
	h.apply(t, w)
	if n := len(h.spec(t, "gpu").Devices); n != 2 {
		t.Errorf("%d names after all devices have gone", n)
	}
}

func TestRetiredNamesAreNotKeptForEver(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	for i := range 150 {
		w.Snapshot.GPUs[1].MIGDevices[0].UUID = fmt.Sprintf("MIG-%d", i)
		w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed})
		h.apply(t, w)
	}
	devices := h.spec(t, "gpu").Devices
	if len(devices) != 2+128 || devices[2].Name != "MIG-148" || devices[129].Name != "MIG-21" {
		t.Errorf("%d devices, of which the retired are %s … %s", len(devices), devices[2].Name, devices[len(devices)-1].Name)
	}
}
