package view

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	podresources "k8s.io/component-helpers/resource"
)

// The prefixes of resource names for GPUs or parts of GPUs: NVIDIA's and HAMi's, and the units of
// Volcano and CCE.
const (
	nvidiaPrefix  = "nvidia.com/"
	volcanoPrefix = "volcano.sh/gpu-"
	vgpuPrefix    = "volcano.sh/vgpu-"
	// percentageEnd is the suffix of resources that limit the threads of a container with units, and
	// reserve nothing.
	percentageEnd = ".percentage"
)

// IsExtended reports whether a resource is an extended resource: served by a device plugin or named
// by a DeviceClass.
func IsExtended(name corev1.ResourceName) bool {
	n := string(name)
	if strings.HasPrefix(n, resourceapi.ResourceDeviceClassPrefix) {
		return true
	}
	return strings.Contains(n, "/") && !strings.Contains(n, "kubernetes.io/") &&
		!strings.HasPrefix(n, corev1.DefaultResourceRequestsPrefix)
}

// Extended returns the number of devices of each extended resource that a pod requests.
func Extended(p *corev1.Pod) map[corev1.ResourceName]int64 {
	requests := map[corev1.ResourceName]int64{}
	for name, quantity := range podresources.PodRequests(p, podresources.PodResourcesOptions{}) {
		if IsExtended(name) && quantity.Value() > 0 {
			requests[name] = quantity.Value()
		}
	}
	return requests
}

// FromPlugins returns the number of devices of each extended resource that a pod has from device
// plugins, without devices from a claim created by the scheduler.
func FromPlugins(p *corev1.Pod) map[corev1.ResourceName]int64 {
	requests := Extended(p)
	if s := p.Status.ExtendedResourceClaimStatus; s != nil {
		for _, m := range s.RequestMappings {
			delete(requests, corev1.ResourceName(m.ResourceName))
		}
	}
	return requests
}

// MayAskForGPUs reports whether a pod may request GPUs: by any extended resource or any claim.
func MayAskForGPUs(p *corev1.Pod) bool { return len(p.Spec.ResourceClaims) > 0 || len(Extended(p)) > 0 }

// IsGPU reports whether a resource is for GPUs, parts of GPUs or units of their memory, by
// its name or because a daemon serves the resource.
func (f Facts) IsGPU(name corev1.ResourceName) bool {
	n := string(name)
	return strings.HasPrefix(n, nvidiaPrefix) || strings.HasPrefix(n, volcanoPrefix) ||
		strings.HasPrefix(n, vgpuPrefix) ||
		f.Served[name]
}

// UnclearResources returns the resources whose names do not show whether they are for
// GPUs, each with the daemon of a node with the resource. wanted limits the names; nil for
// all.
func (f Facts) UnclearResources(daemons map[string]*corev1.Pod,
	wanted map[corev1.ResourceName]int64) map[corev1.ResourceName]*corev1.Pod {
	who := map[corev1.ResourceName]*corev1.Pod{}
	for i := range f.Nodes {
		pod := daemons[f.Nodes[i].Name]
		if pod == nil {
			continue
		}
		for name := range f.Nodes[i].Status.Capacity {
			if _, asked := wanted[name]; IsExtended(name) && !f.IsGPU(name) && who[name] == nil &&
				(wanted == nil || asked) {
				who[name] = pod
			}
		}
	}
	return who
}

// Learn adds the resources in the answers of daemons.
func (f *Facts) Learn(answers []Answer) {
	if f.Served == nil {
		f.Served = map[corev1.ResourceName]bool{}
	}
	for _, a := range answers {
		for _, r := range a.Status.Resources {
			f.Served[corev1.ResourceName(r.Name)] = true
		}
	}
}

// ClassOf returns the DeviceClass for an extended resource, chosen like the scheduler does; nil if
// there is none.
func ClassOf(name corev1.ResourceName, classes []*resourceapi.DeviceClass) *resourceapi.DeviceClass {
	var named *resourceapi.DeviceClass
	own, isOwn := strings.CutPrefix(string(name), resourceapi.ResourceDeviceClassPrefix)
	for _, c := range classes {
		switch {
		case isOwn && c.Name == own:
			return c
		case c.Spec.ExtendedResourceName == nil || *c.Spec.ExtendedResourceName != string(name):
		case named == nil || named.CreationTimestamp.Before(&c.CreationTimestamp),
			named.CreationTimestamp.Equal(&c.CreationTimestamp) && c.Name < named.Name:
			named = c
		}
	}
	return named
}

// A NodeResource is the state of one resource on a node.
type NodeResource struct {
	Name      string `json:"name"`
	All       int64  `json:"all"`
	Healthy   int64  `json:"healthy"`
	Allocated int64  `json:"allocated"`
	// Departing are devices that left the resource and are still counted by the kubelet. All does not
	// include them.
	Departing int64 `json:"departing,omitempty"`
}

// resources returns the GPU resources of a node, sorted by name; taken are the devices allocated to
// pods.
func (f Facts) resources(n *corev1.Node, taken map[corev1.ResourceName]int64) (all []NodeResource) {
	if n == nil {
		return nil
	}
	for name, quantity := range n.Status.Capacity {
		if f.IsGPU(name) {
			healthy := n.Status.Allocatable[name]
			all = append(all, NodeResource{Name: string(name), All: quantity.Value(), Healthy: healthy.Value(),
				Allocated: taken[name]})
		}
	}
	slices.SortFunc(all, func(a, b NodeResource) int { return strings.Compare(a.Name, b.Name) })
	return all
}
