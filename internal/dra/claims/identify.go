package claims

import (
	"cmp"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// Identify sets the ID of devices that containers hold by a claim to the UUID of the GPU
// or MIG device. Devices of other drivers, of unprepared claims, and devices with
// adminAccess are omitted.
func Identify(devices []kubelet.ContainerDevice, prepared []ClaimStatus) []kubelet.ContainerDevice {
	uuids := map[kubelet.ClaimResource]string{}
	for _, c := range prepared {
		driver := cmp.Or(c.Driver, dra.Driver)
		for _, d := range c.Devices {
			if !d.Admin {
				uuids[kubelet.ClaimResource{Namespace: c.Namespace, Name: c.Name, Driver: driver, Device: d.Name,
					ShareID: d.ShareID}] = d.uuid()
			}
		}
	}
	var all []kubelet.ContainerDevice
	for _, d := range devices {
		key := d.Claim
		key.Pool = "" // the node has one pool
		d.ID = cmp.Or(d.ID, uuids[key])
		if d.ID != "" {
			all = append(all, d)
		}
	}
	return all
}

// WithPodUIDs returns devices with the UIDs of their pods, where a device belongs to a claim that
// only one pod can use.
func WithPodUIDs(devices []kubelet.ContainerDevice, prepared []ClaimStatus) []kubelet.ContainerDevice {
	type name struct{ namespace, name string }
	owners := map[name]string{}
	for _, c := range prepared {
		owners[name{c.Namespace, c.Name}] = c.OwnerPod
	}
	devices = slices.Clone(devices)
	for i, d := range devices {
		if d.PodUID == "" {
			devices[i].PodUID = owners[name{d.Claim.Namespace, d.Claim.Name}]
		}
	}
	return devices
}

// Of returns the names and UIDs of the claims with at least a part of the GPUs or MIG
// devices, given by UUID.
func Of(prepared []ClaimStatus, devices []string) (all []dra.Claim) {
	for _, c := range prepared {
		if c.Released == "" && slices.ContainsFunc(c.Devices, func(d DeviceStatus) bool {
			return !d.Admin && (slices.Contains(devices, d.GPU) || slices.Contains(devices, d.uuid()))
		}) {
			all = append(all, dra.Claim{UID: c.UID, Namespace: c.Namespace, Name: c.Name})
		}
	}
	return all
}

// uuid returns the UUID of the GPU or MIG device.
func (d DeviceStatus) uuid() string { return cmp.Or(d.MIG, d.GPU) }
