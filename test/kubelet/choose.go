package kubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// choose returns the devices to allocate for a container; none if it holds its devices already.
// From the choice on they count as in use.
func (m *manager) choose(ctx context.Context, c Container) (set, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	held, holds := m.holdingLocked(c)
	had := held.ids()
	if holds && len(had) != c.Count {
		return nil, fmt.Errorf("pod %q container %q changed request for resource %q from %d to %d",
			c.Pod, c.Name, c.Resource, len(had), c.Count)
	}
	healthy, err := m.healthyLocked(c, had)
	if err != nil {
		return nil, err
	}
	if holds || c.Count == 0 {
		return nil, nil
	}
	m.admitted = c.Pod
	chosen := set{}
	take := func(from set) bool { // true once there are enough
		if m.allocated[c.Resource] == nil {
			m.allocated[c.Resource] = set{}
		}
		for id := range from {
			if len(chosen) == c.Count {
				break
			}
			chosen[id] = struct{}{}
			m.allocated[c.Resource][id] = struct{}{}
		}
		return len(chosen) == c.Count
	}
	if take(m.reusableLocked(c)) {
		return chosen, nil
	}
	available, needed := minus(healthy, m.allocated[c.Resource]), c.Count-len(chosen)
	if len(available) < needed {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d",
			c.Resource, needed, len(available))
	}
	aligned := m.alignedLocked(c, available)
	// The plugin is asked for its preference among the aligned devices if there are more than enough of
	// them; else they are taken, and it is asked for the rest.
	from := aligned
	if len(aligned) <= needed {
		if take(aligned) {
			return chosen, nil
		}
		from = available
	}
	preferred, err := m.preferLocked(ctx, c, from, chosen)
	if err != nil {
		return nil, err
	}
	if take(both(preferred, from)) || take(minus(from, chosen)) {
		return chosen, nil
	}
	return nil, fmt.Errorf("unexpectedly allocated less resources than required. Requested: %d, Got: %d",
		c.Count, len(chosen))
}

// healthyLocked returns the healthy devices of the container's resource. It is an error if there
// are none, or if a device that the container had is not among them.
func (m *manager) healthyLocked(c Container, had set) (set, error) {
	healthy, registered := m.healthy[c.Resource]
	if !registered {
		return nil, fmt.Errorf("cannot allocate unregistered device %s", c.Resource)
	}
	if len(healthy) == 0 {
		return nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", c.Resource)
	}
	if len(minus(had, healthy)) > 0 {
		return nil, fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s",
			c.Resource)
	}
	return healthy, nil
}

// preferLocked asks the plugin which devices it would like to see allocated, if it wants to be
// asked. The lock is given up for the call, so lists come in meanwhile.
func (m *manager) preferLocked(ctx context.Context, c Container, available, included set) (set, error) {
	e := m.endpoints[c.Resource]
	if e == nil {
		return nil, fmt.Errorf("endpoint not found in cache for a registered resource: %s", c.Resource)
	}
	if !e.options.GetGetPreferredAllocationAvailable() {
		return nil, nil
	}
	m.mu.Unlock()
	response, err := m.callPrefer(ctx, c, e, slices.Collect(maps.Keys(available)), slices.Collect(maps.Keys(included)))
	m.mu.Lock()
	if err != nil {
		return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %w", err)
	}
	preferred := set{}
	if len(response.GetContainerResponses()) > 0 {
		for _, id := range response.GetContainerResponses()[0].GetDeviceIDs() {
			preferred[id] = struct{}{}
		}
	}
	return preferred, nil
}

func (m *manager) callPrefer(
	ctx context.Context, c Container, e *endpoint, available, included []string,
) (*v1beta1.PreferredAllocationResponse, error) {
	if err := m.live(e); err != nil {
		return nil, err
	}
	response, err := e.api.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: available, MustIncludeDeviceIDs: included, AllocationSize: int32(c.Count),
		}},
	})
	m.log.add(Event{Kind: Preferred, Resource: c.Resource, Endpoint: e.path, IDs: available, Err: err})
	return response, err
}

// reusableLocked returns the devices of the pod's init containers that no other of its containers
// holds.
func (m *manager) reusableLocked(c Container) set {
	ofInits, ofOthers := set{}, set{}
	for _, h := range m.held {
		switch {
		case h.pod != c.Pod || h.resource != c.Resource:
		case m.pods.isInit(h.pod, h.container):
			maps.Copy(ofInits, h.ids())
		default:
			maps.Copy(ofOthers, h.ids())
		}
	}
	return minus(ofInits, ofOthers)
}

// alignedLocked returns the available devices on the container's NUMA nodes. Without a preference of the
// Topology Manager, or when no device of the resource names a node, there are none.
func (m *manager) alignedLocked(c Container, available set) set {
	aligned := set{}
	for id := range available {
		for _, node := range nodesOf(m.all[c.Resource][id]) {
			if node != withoutNode && slices.Contains(c.NUMA, int(node)) {
				aligned[id] = struct{}{}
			}
		}
	}
	return aligned
}

func minus(a, b set) set {
	rest := set{}
	for id := range a {
		if _, in := b[id]; !in {
			rest[id] = struct{}{}
		}
	}
	return rest
}

func both(a, b set) set { return minus(a, minus(a, b)) }
