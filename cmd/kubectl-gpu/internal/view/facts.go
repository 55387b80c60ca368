// Package view joins what the API server has of nodes and GPUs with what daemons answer, to what is shown: a row a node, and a row a GPU.
// It is pure: no I/O, clock or log.
package view

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	podresources "k8s.io/component-helpers/resource"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

// Names at the API server.
const (
	Domain        = "gpu-device-plugin.github.io"
	ConditionType = "GPUHealthy"
	Resources     = "nvidia.com/" // the prefix of the names of resources
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
	Pods   []corev1.Pod                // that ask for GPUs, and the daemon's
	Slices []resourceapi.ResourceSlice // of drivers of GPUs; of other drivers, too, in those for package why
	Claims []resourceapi.ResourceClaim // that have devices, of any driver
	// Missing are sentences: what could not be read, and why.
	Missing []string
}

// An Answer is that of one daemon.
type Answer struct {
	Pod    *corev1.Pod
	Status status.Status
	Err    error
}

// AsksForGPUs reports whether a pod asks for GPUs: by a resource, or by any claim.
func AsksForGPUs(p *corev1.Pod) bool { return len(p.Spec.ResourceClaims) > 0 || len(Requests(p)) > 0 }

// Requests returns how many devices of each resource a pod asks for.
func Requests(p *corev1.Pod) map[corev1.ResourceName]int64 {
	requests := map[corev1.ResourceName]int64{}
	for name, quantity := range podresources.PodRequests(p, podresources.PodResourcesOptions{}) {
		if strings.HasPrefix(string(name), Resources) && quantity.Value() > 0 {
			requests[name] = quantity.Value()
		}
	}
	return requests
}

// HasGPUs reports whether a slice is of a driver of NVIDIA GPUs. Such a driver can have any name: its devices say that they compute with
// CUDA.
func HasGPUs(s *resourceapi.ResourceSlice) bool {
	return s.Spec.Driver == usualDriver || slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool {
		_, computes := d.Attributes["cudaComputeCapability"]
		return computes
	})
}

// drivers returns the names of the drivers of GPUs.
func (f Facts) drivers() map[string]bool {
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

// given returns the claims that have GPUs and MIG devices, by the device; those that only look at it too.
func (f Facts) given() map[deviceName][]given {
	drivers, all := f.drivers(), map[deviceName][]given{}
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

// Daemons returns the daemon's pod of each node: of several, the youngest one that is ready. A node has none where pods of two namespaces
// could be the daemon's: anybody may have a DaemonSet with its labels.
func (f Facts) Daemons(isDaemon func(*corev1.Pod) bool) map[string]*corev1.Pod {
	daemons, _ := f.daemons(isDaemon)
	return daemons
}

// Disputed returns a sentence for each node on which pods of two namespaces could be the daemon's.
func (f Facts) Disputed(isDaemon func(*corev1.Pod) bool) (sentences []string) {
	_, disputed := f.daemons(isDaemon)
	for _, node := range slices.Sorted(maps.Keys(disputed)) {
		sentences = append(sentences, fmt.Sprintf("the daemon of node %s is not asked: pods of two namespaces have its labels: "+
			"give --daemon-namespace", node))
	}
	return sentences
}

// daemons returns the daemon's pod of each node, and the nodes on which pods of two namespaces could be that.
func (f Facts) daemons(isDaemon func(*corev1.Pod) bool) (daemons map[string]*corev1.Pod, disputed map[string]bool) {
	daemons, disputed = map[string]*corev1.Pod{}, map[string]bool{}
	for i := range f.Pods {
		p := &f.Pods[i]
		if !isDaemon(p) || p.Spec.NodeName == "" || p.Status.Phase != corev1.PodRunning {
			continue
		}
		other := daemons[p.Spec.NodeName]
		if other != nil && other.Namespace != p.Namespace {
			disputed[p.Spec.NodeName] = true
		}
		if other == nil || better(p, other) {
			daemons[p.Spec.NodeName] = p
		}
	}
	maps.DeleteFunc(daemons, func(node string, _ *corev1.Pod) bool { return disputed[node] })
	return daemons, disputed
}

func better(p, other *corev1.Pod) bool {
	if ready(p).IsZero() != ready(other).IsZero() {
		return !ready(p).IsZero()
	}
	return other.CreationTimestamp.Before(&p.CreationTimestamp)
}

// ready returns since when a pod is ready; zero if it is not.
func ready(p *corev1.Pod) time.Time {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
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
