package kubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// namespace is where all pods are.
const namespace = "default"

// Kubelet answers so many PodResources calls a second, and so many at once.
const (
	answersPerSecond = 100
	answersAtOnce    = 10
)

// limiter is a token bucket for calls. The zero value is full.
type limiter struct {
	mu   sync.Mutex // guards all following fields
	full time.Time  // when the bucket will be full again
}

// intercept refuses a call that comes too fast.
func (l *limiter) intercept(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	if !l.allow(time.Now()) {
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	return handler(ctx, request)
}

func (l *limiter) allow(now time.Time) bool {
	const token = time.Second / answersPerSecond
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full.Before(now) {
		l.full = now
	}
	if l.full.Sub(now) > (answersAtOnce-1)*token {
		return false
	}
	l.full = l.full.Add(token)
	return true
}

// resourcesService is kubelet's PodResources service.
type resourcesService struct {
	podresources.UnimplementedPodResourcesListerServer
	m *manager
}

// List answers for the active pods.
func (s resourcesService) List(
	context.Context, *podresources.ListPodResourcesRequest,
) (*podresources.ListPodResourcesResponse, error) {
	s.m.freeGone()
	pods := s.m.pods.all()
	response := &podresources.ListPodResourcesResponse{}
	for _, pod := range slices.Sorted(maps.Keys(pods)) {
		response.PodResources = append(response.PodResources, s.pod(pod, pods[pod]))
	}
	return response, nil
}

// Get answers for one pod.
func (s resourcesService) Get(
	_ context.Context, r *podresources.GetPodResourcesRequest,
) (*podresources.GetPodResourcesResponse, error) {
	containers, active := s.m.pods.all()[r.GetPodName()]
	if !active || r.GetPodNamespace() != namespace {
		return nil, fmt.Errorf("pod %s in namespace %s not found", r.GetPodName(), r.GetPodNamespace())
	}
	return &podresources.GetPodResourcesResponse{PodResources: s.pod(r.GetPodName(), containers)}, nil
}

// GetAllocatableResources answers with the healthy devices, held by pods or not.
func (s resourcesService) GetAllocatableResources(
	context.Context, *podresources.AllocatableResourcesRequest,
) (*podresources.AllocatableResourcesResponse, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	response := &podresources.AllocatableResourcesResponse{}
	for resource, healthy := range s.m.healthy {
		for id := range healthy {
			device, known := s.m.all[resource][id]
			if !known {
				continue
			}
			if device.GetTopology() == nil {
				response.Devices = append(response.Devices, containerDevice(resource, id))
			}
			// A device whose topology names no node is not in kubelet's answer at all.
			for _, node := range device.GetTopology().GetNodes() {
				response.Devices = append(response.Devices, containerDevice(resource, id, node.GetID()))
			}
		}
	}
	return response, nil
}

// pod leaves out plain init containers, as kubelet does, although they hold devices.
func (s resourcesService) pod(pod string, containers []string) *podresources.PodResources {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	answer := &podresources.PodResources{Name: pod, Namespace: namespace}
	for _, container := range containers {
		if s.m.pods.isInit(pod, container) {
			continue
		}
		c := &podresources.ContainerResources{Name: container}
		for _, h := range s.m.held {
			if h.pod == pod && h.container == container {
				c.Devices = append(c.Devices, heldDevices(h)...)
			}
		}
		if claim := s.m.pods.claim(pod, container); claim != nil {
			c.DynamicResources = append(c.DynamicResources, claim)
		}
		answer.Containers = append(answer.Containers, c)
	}
	return answer
}

// heldDevices returns one entry for each device and NUMA node, as kubelet does.
func heldDevices(h holding) []*podresources.ContainerDevices {
	var devices []*podresources.ContainerDevices
	for node, ids := range h.byNode {
		for _, id := range ids {
			if node == withoutNode {
				devices = append(devices, containerDevice(h.resource, id))
				continue
			}
			devices = append(devices, containerDevice(h.resource, id, node))
		}
	}
	return devices
}

func containerDevice(resource, id string, nodes ...int64) *podresources.ContainerDevices {
	device := &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}}
	for _, node := range nodes {
		device.Topology = &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: node}}}
	}
	return device
}
