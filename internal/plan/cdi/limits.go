package cdi

import (
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	memoryStep = 128 // MiB; all sizes of units are multiples
	threadStep = 5   // percent
)

// isToken reports whether a device is neither a GPU nor a part of a GPU.
func isToken(d resource.Device) bool { return d.Sharing == resource.Percentage }

// limits returns the specs of the limits for containers with units of memory: one device for each
// size below the memory of a GPU of the node. The sizes do not depend on the configuration, because
// a restarted container needs the old name.
func (w Wanted) limits() map[containeredits.CDIClass]*specs.Spec {
	has := func(mode resource.SharingMode) bool {
		given := func(d resource.Device) bool { return d.Sharing == mode }
		return slices.ContainsFunc(w.Plan.Resources,
			func(r resource.Resource) bool { return slices.ContainsFunc(r.Devices, given) })
	}
	byMPS, byDriver := has(resource.InMPSUnits), has(resource.InDriverUnits)
	all, most := map[containeredits.CDIClass]*specs.Spec{}, 0
	add := func(l containeredits.Limit) {
		if all[l.Class] == nil {
			all[l.Class] = newSpec(l.Class)
		}
		all[l.Class].Devices = append(all[l.Class].Devices, specs.Device{
			Name: l.CDIName, ContainerEdits: specs.ContainerEdits{Env: l.Env},
		})
	}
	for _, g := range w.Snapshot.GPUs {
		most = max(most, int(g.MemoryBytes>>20))
	}
	for mib := memoryStep; mib <= most; mib += memoryStep {
		if byMPS {
			add(containeredits.MemoryLimit(mib))
		}
		if byDriver {
			add(containeredits.DriverMemoryLimit(mib))
		}
	}
	for percentage := threadStep; byMPS && percentage <= 100; percentage += threadStep {
		add(containeredits.ThreadLimit(percentage))
	}
	return all
}
