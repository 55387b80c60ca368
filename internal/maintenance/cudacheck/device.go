package cudacheck

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Device is a unit for CUDA: a GPU without multi-instance mode, or a MIG device.
type Device struct {
	// Index is the GPU's index "i" or the MIG device's "i:j".
	Index string
	UUID  string
	// GPU is the UUID of the physical GPU, and GI the GPU instance of a MIG device; 0 for a GPU.
	GPU string
	GI  int
	// Model is the GPU's, with the profile of a MIG device.
	Model string
}

// Devices returns the devices of a Snapshot, by ascending Index.
func Devices(s inventory.Snapshot) []Device {
	var all []Device
	for _, g := range s.GPUs {
		if g.MIG != inventory.MIGEnabled {
			all = append(all, Device{Index: fmt.Sprint(g.Index), UUID: g.UUID, GPU: g.UUID, Model: g.Model})
		}
		for _, m := range g.MIGDevices {
			all = append(all, Device{
				Index: fmt.Sprintf("%d:%d", g.Index, m.Index), UUID: m.UUID, GPU: g.UUID, GI: m.GI,
				Model: g.Model + " " + m.Profile,
			})
		}
	}
	return all
}

// Select returns the devices with the given indexes or UUIDs, and the MIG devices of GPUs with
// them; all if none is given.
func Select(all []Device, names []string) ([]Device, error) {
	is := func(d Device, name string) bool {
		gpu, _, _ := strings.Cut(d.Index, ":")
		return name == d.Index || name == d.UUID || name == d.GPU || name == gpu
	}
	for _, name := range names {
		if !slices.ContainsFunc(all, func(d Device) bool { return is(d, name) }) {
			return nil, fmt.Errorf("%q is the index or UUID of no MIG device, and of no GPU that is not in MIG mode",
				name)
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(d Device) bool {
		return len(names) > 0 && !slices.ContainsFunc(names, func(name string) bool { return is(d, name) })
	}), nil
}

// Computes returns the processes that compute on the device, among the processes on its GPU. A
// process whose device the driver does not report may be on any device of the GPU.
func (d Device) Computes(processes []inventory.Process) []inventory.Process {
	return slices.DeleteFunc(slices.Clone(processes), func(p inventory.Process) bool {
		return d.UUID != d.GPU && p.GI.Known && p.GI.Value != d.GI
	})
}
