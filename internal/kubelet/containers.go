package kubelet

import (
	"context"
	"fmt"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// A ContainerDevice is a device that a container holds.
type ContainerDevice struct {
	// ID is the device's ID at kubelet.
	ID string
	// Namespace, Pod and Container are the names of the container and its pod.
	Namespace, Pod, Container string
}

// ContainerDevices returns the devices of all resources that containers hold, each once for a container. Kubelet leaves out pods that
// have ended and init containers, and after its start most pods until it has a connection to the API server.
func (p *PodResources) ContainerDevices(ctx context.Context) ([]ContainerDevice, error) {
	client, err := p.connect()
	if err != nil {
		return nil, err
	}
	answer, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask kubelet for the devices of containers: %w", err)
	}
	var all []ContainerDevice
	seen := map[ContainerDevice]bool{} // a device has an entry for each of its NUMA nodes
	for _, pod := range answer.GetPodResources() {
		for _, container := range pod.GetContainers() {
			for _, devices := range container.GetDevices() {
				for _, id := range devices.GetDeviceIds() {
					d := ContainerDevice{ID: id, Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName()}
					if !seen[d] {
						seen[d] = true
						all = append(all, d)
					}
				}
			}
		}
	}
	return all, nil
}

// Claims returns the ResourceClaims of the pods that are on the node, by "NAMESPACE/NAME". Kubelet leaves out what ContainerDevices says.
func (p *PodResources) Claims(ctx context.Context) (map[string]bool, error) {
	client, err := p.connect()
	if err != nil {
		return nil, err
	}
	answer, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask kubelet for the claims of pods: %w", err)
	}
	claims := map[string]bool{}
	for _, pod := range answer.GetPodResources() {
		for _, container := range pod.GetContainers() {
			for _, d := range container.GetDynamicResources() {
				claims[d.GetClaimNamespace()+"/"+d.GetClaimName()] = true
			}
		}
	}
	return claims, nil
}
