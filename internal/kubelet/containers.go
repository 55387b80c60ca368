package kubelet

import (
	"context"
	"fmt"
	"slices"
	"strings"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// A ContainerDevice is a device held by a container.
type ContainerDevice struct {
	// Resource is the name of the device's resource, and ID the ID known to the kubelet. Both are
	// empty for a device of a claim.
	Resource, ID string
	// Namespace, Pod and Container are the names of the container and its pod.
	Namespace, Pod, Container string
	// PodUID is the UID of the pod; empty if unknown. PodResources does not return UIDs.
	PodUID string
	// Claim is the claim by which the container holds the device, if any.
	Claim ClaimResource
}

// IsGPU reports whether the device is a GPU or a part of a GPU: by its ID, by the resources and the
// driver of this program, or by the name of its resource or driver. driver is empty for none.
func (d ContainerDevice) IsGPU(resources []string, driver string) bool {
	if d.Claim.Name != "" {
		return strings.HasSuffix(d.Claim.Driver, "nvidia.com") || driver != "" && d.Claim.Driver == driver
	}
	return strings.HasPrefix(d.ID, "GPU-") || strings.HasPrefix(d.ID, "MIG-") ||
		strings.HasPrefix(d.Resource, "nvidia.com/") || slices.Contains(resources, d.Resource)
}

// A ClaimResource is a device of a ResourceClaim. ShareID is empty for a device used by this claim
// only.
type ClaimResource struct {
	Namespace, Name, Driver, Pool, Device, ShareID string
}

// A listing is the kubelet's answer about the pods on the node. Ended pods and plain init
// containers are missing. After a start of the kubelet, most pods are missing until the
// kubelet is connected to the API server. Concurrent callers share a listing.
type listing struct {
	held       []HeldDevice
	containers []ContainerDevice
	claims     map[string]bool
}

// Held returns the devices held by pods. Init containers are missing. After a start of the
// kubelet, most pods are missing until the kubelet is connected to the API server. The
// kubelet answered after the call of Held. The result is shared: callers must not change it.
func (p *PodResources) Held(ctx context.Context) ([]HeldDevice, error) {
	l, err := p.list(ctx)
	return l.held, err
}

// ContainerDevices returns the devices of all resources and claims held by containers, each device
// once for each container. Otherwise it is like Held.
func (p *PodResources) ContainerDevices(ctx context.Context) ([]ContainerDevice, error) {
	l, err := p.list(ctx)
	return l.containers, err
}

// Claims returns the ResourceClaims of the pods on the node, by "NAMESPACE/NAME". Otherwise it is
// like Held.
func (p *PodResources) Claims(ctx context.Context) (map[string]bool, error) {
	l, err := p.list(ctx)
	return l.claims, err
}

// Allocating records the start of a call that allocates devices to a pod:
// GetPreferredAllocation or Allocate. The caller must call ended at the end of the call;
// more says that a call of Allocate follows. Until then, and for a short time after, queries
// about pods, such as Held, wait for at most 10 s.
func (p *PodResources) Allocating() (ended func(more bool)) { return p.listings.allocating() }

// list asks the kubelet about the pods on the node. No other function does.
func (p *PodResources) list(ctx context.Context) (listing, error) {
	client, err := p.connect()
	if err != nil {
		return listing{}, err
	}
	return p.containers.Ask(ctx, func() (listing, error) {
		answer, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
		if err != nil {
			return listing{}, fmt.Errorf("ask the kubelet for the devices of pods: %w", err)
		}
		if devices := devicesIn(answer); devices > maxHeld {
			return listing{}, fmt.Errorf("the kubelet's PodResources socket names %d devices of pods; more than %d "+
				"are not read",
				devices, maxHeld)
		}
		return listingOf(answer), nil
	})
}

// maxHeld bounds the devices held by pods in one answer. It exceeds the length of any
// resource's list, and still needs little memory.
const maxHeld = 1 << 17

func devicesIn(answer *podresources.ListPodResourcesResponse) (n int) {
	for _, pod := range answer.GetPodResources() {
		for _, container := range pod.GetContainers() {
			for _, d := range container.GetDevices() {
				n += len(d.GetDeviceIds()) * max(1, len(d.GetTopology().GetNodes()))
			}
		}
	}
	return n
}

// noNode stands for an unknown NUMA node.
const noNode = -1

func listingOf(answer *podresources.ListPodResourcesResponse) listing {
	held, l := holdings{}, listing{claims: map[string]bool{}}
	seen := map[ContainerDevice]bool{} // a device has an entry for each of its NUMA nodes
	for _, pod := range answer.GetPodResources() {
		name := pod.GetNamespace() + "/" + pod.GetName()
		for _, container := range pod.GetContainers() {
			for _, d := range container.GetDevices() {
				for _, id := range d.GetDeviceIds() {
					device := HeldDevice{Resource: d.GetResourceName(), ID: id, Pod: name,
						Container: container.GetName()}
					held.add(device, noNode)
					for _, node := range d.GetTopology().GetNodes() {
						held.add(device, node.GetID())
					}
					c := ContainerDevice{
						Resource: d.GetResourceName(), ID: id, Namespace: pod.GetNamespace(), Pod: pod.GetName(),
						Container: container.GetName(),
					}
					if !seen[c] {
						seen[c] = true
						l.containers = append(l.containers, c)
					}
				}
			}
			for _, claim := range container.GetDynamicResources() {
				l.claims[claim.GetClaimNamespace()+"/"+claim.GetClaimName()] = true
				for _, d := range claim.GetClaimResources() {
					l.containers = append(l.containers, ContainerDevice{
						Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(),
						Claim: ClaimResource{
							Namespace: claim.GetClaimNamespace(), Name: claim.GetClaimName(),
							Driver: d.GetDriverName(), Pool: d.GetPoolName(), Device: d.GetDeviceName(),
							ShareID: shareOf(d),
						},
					})
				}
			}
		}
	}
	l.held = held.devices
	return l
}

// shareOf returns the claim's share of its device. The API of kubelet 1.34, used by some
// tests, has no shares.
func shareOf(resource any) string {
	if r, has := resource.(interface{ GetShareId() string }); has {
		return r.GetShareId()
	}
	return ""
}
