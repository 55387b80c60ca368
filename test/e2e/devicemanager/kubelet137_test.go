//go:build !kubelet136 && !kubelet135 && !kubelet134

package devicemanager

import (
	"context"

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// This file holds what is different in kubelet 1.37's Go interfaces.

const version = kubelet.V137

type numaNode = cadvisor.Node

// numaNodes are the machine's.
var numaNodes = []numaNode{{Id: 0}, {Id: 1}}

func capacityOf(m *devicemanager.ManagerImpl) (v1.ResourceList, v1.ResourceList) {
	capacity, allocatable, _ := m.GetCapacity(klog.Background())
	return capacity, allocatable
}

func allocate(ctx context.Context, m *devicemanager.ManagerImpl, pod *v1.Pod, container *v1.Container) error {
	return m.Allocate(ctx, pod, container, lifecycle.AddOperation)
}

func hints(m *devicemanager.ManagerImpl, pod *v1.Pod, container *v1.Container) map[string][]topologymanager.TopologyHint {
	return m.GetTopologyHints(klog.Background(), pod, container, lifecycle.AddOperation)
}

func deregister(m *devicemanager.ManagerImpl, resource, path string) {
	m.GetWatcherHandler().DeRegisterPlugin(context.Background(), resource, path)
}

func updateStatus(m *devicemanager.ManagerImpl, pod *v1.Pod, status *v1.PodStatus) {
	m.UpdateAllocatedResourcesStatus(klog.Background(), pod, status)
}

func (s topologyStore) GetAffinity(klog.Logger, string, string) topologymanager.TopologyHint {
	return s.hint()
}

// devicesOf shows PodResources the devices.
type devicesOf struct{ node *node }

func (d devicesOf) UpdateAllocatedDevices(logger klog.Logger) {
	d.node.current().UpdateAllocatedDevices(logger)
}

func (d devicesOf) GetDevices(podUID, container string) []*podresourcesv1.ContainerDevices {
	return containerDevices(d.node.current().GetDevices(podUID, container))
}

func (d devicesOf) GetAllocatableDevices(logger klog.Logger) []*podresourcesv1.ContainerDevices {
	return containerDevices(d.node.current().GetAllocatableDevices(logger))
}

// nothing is all the other resources of the node.
type nothing struct{}

func (nothing) GetCPUs(*v1.Pod, *v1.Container) []int64                             { return nil }
func (nothing) GetPodCPUs(string) []int64                                          { return nil }
func (nothing) GetAllocatableCPUs() []int64                                        { return nil }
func (nothing) GetPodMemory(klog.Logger, string) []*podresourcesv1.ContainerMemory { return nil }
func (nothing) GetAllocatableMemory(klog.Logger) []*podresourcesv1.ContainerMemory { return nil }
func (nothing) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesv1.ContainerMemory {
	return nil
}
func (nothing) GetDynamicResources(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesv1.DynamicResource {
	return nil
}
