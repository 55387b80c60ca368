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
	Driver        = "gpu.nvidia.com"
	Resources     = "nvidia.com/" // the prefix of the names of resources
	productLabel  = "nvidia.com/gpu.product"
	countLabel    = "nvidia.com/gpu.count"
	driverLabel   = "nvidia.com/cuda.driver-version.full"
	layoutLabel   = "nvidia.com/mig.config"
	stateLabel    = "nvidia.com/mig.config.state"
	strategyLabel = "nvidia.com/mig.strategy"
)

// Facts are what the API server has.
type Facts struct {
	Nodes  []corev1.Node
	Pods   []corev1.Pod // that ask for GPUs, and the daemon's
	Slices []resourceapi.ResourceSlice
	Claims []resourceapi.ResourceClaim // that have a GPU
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

// HasGPU reports whether a claim has a GPU or MIG device.
func HasGPU(c *resourceapi.ResourceClaim) bool {
	return c.Status.Allocation != nil && slices.ContainsFunc(c.Status.Allocation.Devices.Results, isGPU)
}

func isGPU(r resourceapi.DeviceRequestAllocationResult) bool { return r.Driver == Driver }

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
