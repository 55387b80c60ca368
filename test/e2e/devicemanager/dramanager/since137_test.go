//go:build !kubelet134 && !kubelet135 && !kubelet136

package dramanager

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
)

// newest says that kubelet's scenarios are those that the table names.
const newest = true

func updateStatus(m *dra.Manager, pod *v1.Pod, status *v1.PodStatus) {
	m.UpdateAllocatedResourcesStatus(klog.Background(), pod, status)
}

// WatchHealthStatus is what the library of 1.37 asks for; NVIDIA's plugin for ComputeDomains tells
// nothing of health.
func (*domainPlugin) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}
