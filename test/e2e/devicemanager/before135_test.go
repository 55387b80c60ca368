//go:build kubelet134

package devicemanager

import (
	"context"
	_ "unsafe" // for go:linkname

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

// This file holds what takes no logger before kubelet 1.35.

// newManagerImpl is kubelet's NewManagerImpl with a socket path of the caller's choice.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(socketPath string, topology []numaNode, store topologymanager.Store) (*devicemanager.ManagerImpl,
	error)

func newManager(socketPath string, store topologymanager.Store) (*devicemanager.ManagerImpl, error) {
	return newManagerImpl(socketPath, numaNodes, store)
}

func startManager(m *devicemanager.ManagerImpl, active devicemanager.ActivePodsFunc, ready config.SourcesReady) error {
	return m.Start(active, ready, containermap.NewContainerMap(), sets.New[string]())
}

func stopManager(m *devicemanager.ManagerImpl) error { return m.Stop() }

func runOptions(
	_ context.Context, m *devicemanager.ManagerImpl, pod *v1.Pod, container *v1.Container,
) (*devicemanager.DeviceRunContainerOptions, error) {
	return m.GetDeviceRunContainerOptions(pod, container)
}
