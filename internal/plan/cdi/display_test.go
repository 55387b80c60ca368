package cdi_test

import (
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// MIG devices are given the nodes of the display engine if their profile has graphics.
func TestGraphicsOfMIGDevices(t *testing.T) {
	t.Parallel()
	for profile, want := range map[string]string{
		"1g.24gb+gfx": "/dev/nvidia2 /dev/nvidia-caps/nvidia-cap30 /dev/nvidia-caps/nvidia-cap31 /dev/dri/card2",
		"1g.24gb":     "/dev/nvidia2 /dev/nvidia-caps/nvidia-cap30 /dev/nvidia-caps/nvidia-cap31",
	} {
		for _, disabled := range []string{"", "create-symlinks", "all"} {
			h := newHost(t, driverFiles("sys/bus/pci/devices/0000:1c:00.0/drm/card2/x",
				"driver-root/usr/bin/nvidia-cdi-hook")...)
			w := wanted()
			w.Options.DisabledHooks = []string{disabled}
			w.Snapshot.GPUs[1].MIGDevices[0].Profile = profile
			other := inventory.MIGDevice{UUID: "MIG-b1", Index: 1, Profile: "1g.24gb",
				Health: w.Snapshot.GPUs[1].MIGDevices[0].Health}
			// whose profile says nothing of the first one's
			w.Snapshot.GPUs[1].MIGDevices = append(w.Snapshot.GPUs[1].MIGDevices, other)
			w.Plan = resource.New(w.Snapshot, resource.Options{MIG: resource.MIGMixed})
			h.apply(t, w)
			devices := h.spec(t, "gpu").Devices
			device := devices[slices.IndexFunc(devices, func(d specs.Device) bool { return d.Name == "MIG-b0" })]
			var paths []string
			for _, n := range device.ContainerEdits.DeviceNodes {
				paths = append(paths, n.Path)
			}
			if got := strings.Join(paths, " "); got != want {
				t.Errorf("%s: %s has %s, want %s", profile, device.Name, got, want)
			}
			links := strings.Contains(want, "dri") && disabled == ""
			if hooks := device.ContainerEdits.Hooks; (len(hooks) == 1) != links {
				t.Errorf("%s without hook %q: hooks %v", profile, disabled, hooks)
			}
		}
	}
}
