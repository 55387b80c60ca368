//go:build !kubelet134

package claims

import "k8s.io/dynamic-resource-allocation/structured"

// allocatorFeatures are the default gates of 1.36 and 1.37, of which some are off by default in 1.35.
var allocatorFeatures = structured.Features{
	AdminAccess: true, PrioritizedList: true, PartitionableDevices: true, DeviceTaints: true,
	DeviceBindingAndStatus: true, ConsumableCapacity: true,
}
