// Package dra decides how the GPUs of a node look to the scheduler under Dynamic Resource
// Allocation: devices with attributes, capacities and taints, in slices. Names, attributes and
// taints are those of NVIDIA's driver gpu.nvidia.com, so that DeviceClasses, claims and CEL
// selectors for it work unchanged; attributes about links are ours, in a domain of our own.
// docs/dra.md has all of them.
//
// A device is a GPU that is not in MIG mode, or a MIG device; a GPU whose mode follows claims is
// both. Its name has the number of the GPU: the minor at first sight, which then stays with the
// UUID. All devices of a GPU are in one slice, and the slice follows from the number alone: what
// happens to a GPU changes one slice. In a slice, well connected GPUs are neighbours, because the
// scheduler takes the first devices that fit.
//
// It also reads the configuration that claims and classes have for the driver, and decides which
// GPUs are the driver's: a GPU is given to pods either in slices or by the device plugin.
//
// The package is pure policy: no I/O, clock, goroutine or log. Its values have the JSON form of
// resource.k8s.io/v1, and no type of Kubernetes: the program gpu-device-plugin links none.
package dra
