// Package dra decides how the scheduler sees the GPUs of a node under Dynamic Resource Allocation:
// devices with attributes, capacities and taints, in slices. Names, attributes and taints are those
// of NVIDIA's driver gpu.nvidia.com, so its DeviceClasses, claims and CEL selectors work unchanged.
// Attributes about links are our own, in a separate domain. docs/dra.md lists all attributes.
//
// A device is a GPU outside MIG mode, or a MIG device; a GPU whose mode follows claims is both. The
// device's name contains the number of the GPU: the GPU's first minor, which then stays with the
// UUID. All devices of a GPU are in one slice, chosen by the number alone: an event of a GPU
// changes one slice. In a slice, well connected GPUs are neighbours, because the scheduler takes
// the first suitable devices.
//
// The package also parses the configuration in claims and classes, and decides the owner of each
// GPU: pods get a GPU either in slices or by the device plugin.
//
// The package is pure policy: no I/O, clock, goroutine or log. The values have the JSON form of
// resource.k8s.io/v1 but no type of Kubernetes, because the program gpu-device-plugin links none.
package dra
