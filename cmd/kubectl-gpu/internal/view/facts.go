// Package view combines the objects of the API server and the answers of daemons into rows for
// nodes and GPUs. It is pure: no I/O, clock or log.
package view

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// Names at the API server.
const (
	Domain        = "gpu-device-plugin.github.io"
	ConditionType = "GPUHealthy"
	productLabel  = "nvidia.com/gpu.product"
	countLabel    = "nvidia.com/gpu.count"
	driverLabel   = "nvidia.com/cuda.driver-version.full"
	layoutLabel   = "nvidia.com/mig.config"
	stateLabel    = "nvidia.com/mig.config.state"
	strategyLabel = "nvidia.com/mig.strategy"
)

// defaultDriver is the default name of the GPU driver.
const defaultDriver = "gpu.nvidia.com"

// Facts are the objects of the API server.
type Facts struct {
	Nodes  []corev1.Node
	Pods   []corev1.Pod                // pods that may request GPUs, and the daemon's pods
	Slices []resourceapi.ResourceSlice // of GPU drivers; in Facts for package why, of all drivers
	Claims []resourceapi.ResourceClaim // claims with devices of any driver
	// Served are the resources that the asked daemons serve.
	Served map[corev1.ResourceName]bool
	Deployment
	// UnknownNodes are the requested names that no node has.
	UnknownNodes []string
	// Missing are sentences about objects that could not be read.
	Missing []string
}

// An Answer is the answer of one daemon.
type Answer struct {
	Pod    *corev1.Pod
	Status status.Status
	Err    error
}

// HasGPUs reports whether a slice belongs to a driver of NVIDIA GPUs. The name of the driver is
// arbitrary: the slice is recognized by an attribute of its devices for CUDA.
func HasGPUs(s *resourceapi.ResourceSlice) bool {
	return s.Spec.Driver == defaultDriver || slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool {
		_, computes := d.Attributes["cudaComputeCapability"]
		return computes
	})
}

// Drivers returns the names of the GPU drivers.
func (f Facts) Drivers() map[string]bool {
	names := map[string]bool{defaultDriver: true}
	for i := range f.Slices {
		if HasGPUs(&f.Slices[i]) {
			names[f.Slices[i].Spec.Driver] = true
		}
	}
	return names
}

// A deviceName identifies a device at the API server.
type deviceName struct{ driver, pool, device string }

// usesByDevice returns the claims that have GPUs or MIG devices, by device, including claims with
// admin access.
func (f Facts) usesByDevice() map[deviceName][]claimUse {
	drivers, all := f.Drivers(), map[deviceName][]claimUse{}
	for i := range f.Claims {
		c := &f.Claims[i]
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if drivers[r.Driver] {
				name := deviceName{r.Driver, r.Pool, r.Device}
				all[name] = append(all[name], claimUse{c, r.AdminAccess != nil && *r.AdminAccess})
			}
		}
	}
	return all
}

// A claimUse is a claim that has a device or has admin access to it.
type claimUse struct {
	claim *resourceapi.ResourceClaim
	admin bool
}

// IsOver reports whether a pod has ended.
func IsOver(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// LeadFirst returns the pods of one node's answers, the leader first.
func LeadFirst(answers []Answer) ([]*corev1.Pod, error) {
	var pods []*corev1.Pod
	var problems []error
	for _, a := range answers {
		switch {
		case a.Err != nil:
			problems = append(problems, fmt.Errorf("pod %s/%s: %w", a.Pod.Namespace, a.Pod.Name, a.Err))
			pods = append(pods, a.Pod)
		case a.Status.Lead.This:
			pods = append([]*corev1.Pod{a.Pod}, pods...)
		default:
			pods = append(pods, a.Pod)
		}
	}
	if !slices.ContainsFunc(answers, func(a Answer) bool { return a.Err == nil && a.Status.Lead.This }) {
		return nil, errors.Join(append([]error{fmt.Errorf(
			"%d pods of the daemon run on the node, and none of them says that it leads; try again in a minute",
			len(answers))},
			problems...)...)
	}
	return pods, nil
}

// nodeNames returns the sorted names of all nodes in the facts.
func (f Facts) nodeNames(daemons map[string]*corev1.Pod) []string {
	names := map[string]bool{}
	for i := range f.Nodes {
		names[f.Nodes[i].Name] = true
	}
	if len(f.Nodes) == 0 { // the nodes could not be read: other objects have their names
		for name := range daemons {
			names[name] = true
		}
		for _, s := range f.Slices {
			if s.Spec.NodeName != nil {
				names[*s.Spec.NodeName] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}
