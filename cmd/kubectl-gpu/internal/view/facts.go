// Package view joins what the API server has of nodes and GPUs with what daemons answer, to what is
// shown: a row a node, and a row a GPU. It is pure: no I/O, clock or log.
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

// usualDriver is the name of the driver of GPUs where none is configured.
const usualDriver = "gpu.nvidia.com"

// Facts are what the API server has.
type Facts struct {
	Nodes  []corev1.Node
	Pods   []corev1.Pod                // that may ask for GPUs, and the daemon's
	Slices []resourceapi.ResourceSlice // of drivers of GPUs; of other drivers, too, in those for package why
	Claims []resourceapi.ResourceClaim // that have devices, of any driver
	// Served are the resources that daemons say they serve, of those that were asked.
	Served map[corev1.ResourceName]bool
	Deployment
	// Missing are sentences: what could not be read, and why.
	Missing []string
}

// An Answer is that of one daemon.
type Answer struct {
	Pod    *corev1.Pod
	Status status.Status
	Err    error
}

// HasGPUs reports whether a slice is of a driver of NVIDIA GPUs. Such a driver can have any name:
// its devices say that they compute with CUDA.
func HasGPUs(s *resourceapi.ResourceSlice) bool {
	return s.Spec.Driver == usualDriver || slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool {
		_, computes := d.Attributes["cudaComputeCapability"]
		return computes
	})
}

// Drivers returns the names of the drivers of GPUs.
func (f Facts) Drivers() map[string]bool {
	names := map[string]bool{usualDriver: true}
	for i := range f.Slices {
		if HasGPUs(&f.Slices[i]) {
			names[f.Slices[i].Spec.Driver] = true
		}
	}
	return names
}

// A deviceName is what a device is called at the API server.
type deviceName struct{ driver, pool, device string }

// given returns the claims that have GPUs and MIG devices, by the device; those that only look at
// it too.
func (f Facts) given() map[deviceName][]given {
	drivers, all := f.Drivers(), map[deviceName][]given{}
	for i := range f.Claims {
		c := &f.Claims[i]
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if drivers[r.Driver] {
				name := deviceName{r.Driver, r.Pool, r.Device}
				all[name] = append(all[name], given{c, r.AdminAccess != nil && *r.AdminAccess})
			}
		}
	}
	return all
}

// given is a claim that has a device, or that looks at it as an administrator.
type given struct {
	claim *resourceapi.ResourceClaim
	admin bool
}

// IsOver reports whether a pod has ended.
func IsOver(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// LeadFirst returns the pods of answers of one node, the one that leads first.
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
			"%d pods of the daemon run on the node, and none of them says that it leads; try again in a minute", len(answers))},
			problems...)...)
	}
	return pods, nil
}

// nodeNames returns the names of all nodes that something tells of, in order.
func (f Facts) nodeNames(daemons map[string]*corev1.Pod) []string {
	names := map[string]bool{}
	for i := range f.Nodes {
		names[f.Nodes[i].Name] = true
	}
	if len(f.Nodes) == 0 { // they could not be read: then the other objects name them
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
