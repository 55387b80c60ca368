//go:build kubelet136 || kubelet135 || kubelet134

package devicemanager

import (
	"context"

	cadvisor "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// This file holds what the Go interfaces of the kubelets before 1.37 have in common. All of them
// keep one client a resource.

const version = kubelet.V136

type numaNode = cadvisor.Node

// numaNodes are the machine's.
var numaNodes = []numaNode{{Id: 0}, {Id: 1}}

func capacityOf(m *devicemanager.ManagerImpl) (v1.ResourceList, v1.ResourceList) {
	capacity, allocatable, _ := m.GetCapacity()
	return capacity, allocatable
}

func allocate(_ context.Context, m *devicemanager.ManagerImpl, pod *v1.Pod, container *v1.Container) error {
	return m.Allocate(pod, container)
}

func hints(m *devicemanager.ManagerImpl, pod *v1.Pod, container *v1.Container) map[string][]topologymanager.TopologyHint {
	return m.GetTopologyHints(pod, container)
}

func deregister(m *devicemanager.ManagerImpl, resource, path string) {
	m.GetWatcherHandler().DeRegisterPlugin(resource, path)
}

func updateStatus(m *devicemanager.ManagerImpl, pod *v1.Pod, status *v1.PodStatus) {
	m.UpdateAllocatedResourcesStatus(pod, status)
}

func (s topologyStore) GetAffinity(string, string) topologymanager.TopologyHint { return s.hint() }

// devicesOf shows PodResources the devices.
type devicesOf struct{ node *node }

func (d devicesOf) UpdateAllocatedDevices() { d.node.current().UpdateAllocatedDevices() }

func (d devicesOf) GetDevices(podUID, container string) []*podresourcesv1.ContainerDevices {
	return containerDevices(d.node.current().GetDevices(podUID, container))
}

func (d devicesOf) GetAllocatableDevices() []*podresourcesv1.ContainerDevices {
	return containerDevices(d.node.current().GetAllocatableDevices())
}

// nothing is all the other resources of the node.
type nothing struct{}

func (nothing) GetCPUs(string, string) []int64                             { return nil }
func (nothing) GetAllocatableCPUs() []int64                                { return nil }
func (nothing) GetMemory(string, string) []*podresourcesv1.ContainerMemory { return nil }
func (nothing) GetAllocatableMemory() []*podresourcesv1.ContainerMemory    { return nil }
func (nothing) GetDynamicResources(*v1.Pod, *v1.Container) []*podresourcesv1.DynamicResource {
	return nil
}
