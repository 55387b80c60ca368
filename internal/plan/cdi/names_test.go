package cdi_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestDevicesThatAreNotOfferedHaveNames: a configuration that excludes a GPU may also be the first
// that uses CDI. A pod may hold the GPU then, and kubelet gives it to further pods until the GPU
// was free for a moment.
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
	if want := []string{"0", "1:0", "GPU-a", "MIG-b0", "all"}; !slices.Equal(names, want) {
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
	if want := []string{"0", "GPU-a", "all", "MIG-b0"}; !slices.Equal(names, want) {
		t.Errorf("names %q, want %q", names, want)
	}
	w.Plan = resource.Plan{}
	h.apply(t, w)
	if n := len(h.spec(t, "gpu").Devices); n != 4 {
		t.Errorf("%d names after all devices have gone", n)
	}
}

func TestNumberOfRetiredNames(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	for i := range 150 {
		w.Snapshot.GPUs[1].MIGDevices[0].UUID = fmt.Sprintf("MIG-%d", i)
		w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed})
		h.apply(t, w)
	}
	devices := h.spec(t, "gpu").Devices
	if len(devices) != 5+128 || devices[5].Name != "MIG-148" || devices[132].Name != "MIG-21" {
		t.Errorf("%d devices, of which the retired are %s … %s", len(devices), devices[5].Name,
			devices[len(devices)-1].Name)
	}
}

// TestAllAndIndices: all is each GPU and MIG device, and an index is what has that index now.
func TestAllAndIndices(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	w.Snapshot.Majors = inventory.Majors{GPU: 195, UVM: 510, Caps: 234}
	h.apply(t, w)
	for name, want := range map[string][]string{
		"0": {"/dev/nvidia3"}, "1:0": {"/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap30",
			"/dev/nvidia-caps/nvidia-cap31"},
		"all": {"/dev/nvidia3", "/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"},
	} {
		want = append(want, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
		var got []string
		for _, d := range inject(t, h, "k8s.device-plugin.nvidia.com/gpu="+name).Linux.Devices {
			got = append(got, d.Path)
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	w.Edits.IDs = containeredits.ByIndex
	w.Snapshot.GPUs = w.Snapshot.GPUs[:1]
	w.Plan = resource.New(w.Snapshot, resource.Options{})
	h.apply(t, w)
	if !slices.ContainsFunc(h.spec(t, "gpu").Devices, func(d specs.Device) bool { return d.Name == "1:0" }) {
		t.Error("a container that was given a device by index cannot be started again")
	}
}

// TestAFileThatNoRuntimeReads: what another program made of a spec file does not keep devices from
// containers.
func TestAFileThatNoRuntimeReads(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(*specs.Spec){
		"a name that is none": func(s *specs.Spec) { s.Devices[0].Name = "no name" },
		"a variable without value": func(s *specs.Spec) {
			s.Devices[0].Name, s.Devices[0].ContainerEdits.Env = "another", []string{"none"}
		},
		"a name that is there twice": func(s *specs.Spec) {
			s.Devices = append(s.Devices, specs.Device{Name: "another"}, specs.Device{Name: "another"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, driverFiles()...)
			h.apply(t, wanted())
			spec := h.spec(t, "gpu")
			damage(spec)
			text, err := json.Marshal(spec)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(h.specs, "k8s.device-plugin.nvidia.com-gpu.json"), text,
				0o600); err != nil {
				t.Fatal(err)
			}
			h.apply(t, wanted())
		})
	}
}
