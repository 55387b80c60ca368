package kubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// preStartTimeout is how long PreStartContainer may take. The other calls of an admission have no
// limit.
const preStartTimeout = 30 * time.Second

// withoutNode is where kubelet counts devices that name no NUMA node.
const withoutNode = -1

// The reasons of a PodError.
const (
	// UnexpectedAdmission: the kubelet has failed the pod, and does not retry.
	UnexpectedAdmission = "UnexpectedAdmissionError"
	// CreateContainerConfig: the pod is admitted and keeps its devices; kubelet tries again to start
	// the container.
	CreateContainerConfig = "CreateContainerConfigError"
	// TopologyAffinity: the Topology Manager has failed the pod, because its devices fit on no NUMA node.
	// The kubelet does not retry.
	TopologyAffinity = "TopologyAffinityError"
	// Unschedulable: no plugin has brought the resource, so the scheduler would have left the pod
	// Pending.
	Unschedulable = "Unschedulable"
)

// ErrCrash is in the error of a call during which kubelet would have crashed.
var ErrCrash = errors.New("kubelet would have crashed")

// PodError says why a pod did not come up.
type PodError struct {
	Reason string // as kubelet gives it in the pod's status
	Err    error
}

func (e *PodError) Error() string { return e.Reason + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *PodError) Unwrap() error { return e.Err }

// Container is what a container asks of one resource.
type Container struct {
	Pod      string // name, and UID, of a pod in the namespace "default"
	Name     string
	Resource string
	Count    int
	NUMA     []int // the nodes that the Topology Manager has chosen; none means that it has no preference
	// SingleNode says that the Topology Manager's policy is single-numa-node: before a container is
	// given its devices, or finds those that it holds, kubelet looks on which NUMA node they all are.
	SingleNode bool
	Init       bool // a plain init container: containers of its pod that come after it reuse its devices
}

// Allocation is what a container was given.
type Allocation struct {
	IDs      []string // sorted
	Response *v1beta1.ContainerAllocateResponse
}

// holding is what one container holds of one resource.
type holding struct {
	pod, container, resource string
	byNode                   map[int64][]string // NUMA node → IDs; an ID with several nodes is below each
	response                 *v1beta1.ContainerAllocateResponse
}

func (h holding) ids() set {
	ids := set{}
	for _, onNode := range h.byNode {
		for _, id := range onNode {
			ids[id] = struct{}{}
		}
	}
	return ids
}

// Admit brings a container up: GetPreferredAllocation, Allocate and PreStartContainer, as far as
// the plugin wants them. A container that holds its devices already keeps them, without a call but
// PreStartContainer: that is a container that starts again.
//
// An error is a *PodError, or ErrStopped. After any reason but CreateContainerConfig the pod is not
// there, nor are its other containers; after CreateContainerConfig it is, and holds its devices.
func (k *Kubelet) Admit(ctx context.Context, c Container) (Allocation, error) {
	m, err := k.running()
	if err != nil {
		return Allocation{}, err
	}
	if err := k.admit(ctx, m, c); err != nil {
		return Allocation{}, err
	}
	if err := m.preStart(ctx, c); err != nil {
		return Allocation{}, &PodError{Reason: CreateContainerConfig, Err: err}
	}
	h, _ := m.holding(c)
	return Allocation{IDs: slices.Sorted(maps.Keys(h.ids())), Response: h.response}, nil
}

// StartAgain starts a container again that was admitted and has ended. Kubelet does not look at its
// devices then: it calls PreStartContainer, as far as the plugin wants that. An error is a
// *PodError, or ErrStopped.
func (k *Kubelet) StartAgain(ctx context.Context, c Container) error {
	m, err := k.running()
	if err != nil {
		return err
	}
	if err := m.preStart(ctx, c); err != nil {
		return &PodError{Reason: CreateContainerConfig, Err: err}
	}
	return nil
}

func (k *Kubelet) admit(ctx context.Context, m *manager, c Container) error {
	k.admission.Lock()
	defer k.admission.Unlock()
	if !m.knows(c.Resource) {
		return &PodError{Reason: Unschedulable, Err: fmt.Errorf("node has no %s", c.Resource)}
	}
	k.pods.add(c)
	if err := m.fits(c); err != nil {
		k.pods.remove(c.Pod)
		return err
	}
	if err := m.allocate(ctx, c); err != nil {
		k.pods.remove(c.Pod)
		return &PodError{Reason: UnexpectedAdmission, Err: err}
	}
	return nil
}

// A Moment is one of an admission at which kubelet has chosen devices and not noted that the
// container holds them.
type Moment string

// The moments.
const (
	BeforeAllocate Moment = "before Allocate"
	AfterAllocate  Moment = "after the answer to Allocate"
)

// WhileAllocating has a function called in each admission at both moments; nil for none. It may use
// all of the Kubelet but Admit.
func (k *Kubelet) WhileAllocating(f func(Moment)) {
	if f == nil {
		k.allocating.Store(nil)
		return
	}
	k.allocating.Store(&f)
}

// AdmitClaim runs a container with a device that its DRA driver has prepared: the PodResources API then
// names the claim.
func (k *Kubelet) AdmitClaim(c Container, claim *podresources.DynamicResource) {
	k.pods.addClaim(c, claim)
}

// Remove ends a pod. Kubelet tells no plugin; it counts the devices as free from its next admission
// on.
func (k *Kubelet) Remove(pod string) { k.pods.remove(pod) }

// PodStatus returns allocatedResourcesStatus of a pod's containers: resource → device ID → true if
// Healthy. Health is what the last list said, stream or no stream; an ID that is in no list any
// more counts as healthy.
func (k *Kubelet) PodStatus(pod string) map[string]map[string]bool {
	m, err := k.running()
	if err != nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	status := map[string]map[string]bool{}
	for _, h := range m.held {
		if h.pod != pod {
			continue
		}
		if status[h.resource] == nil {
			status[h.resource] = map[string]bool{}
		}
		for id := range h.ids() {
			device := m.all[h.resource][id]
			status[h.resource][id] = device == nil || device.GetHealth() == v1beta1.Healthy
		}
	}
	return status
}

// knows reports whether admission concerns itself with a resource at all.
func (m *manager) knows(resource string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, registered := m.healthy[resource]
	_, allocated := m.allocated[resource]
	return registered || allocated
}

func (m *manager) holding(c Container) (holding, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.holdingLocked(c)
}

func (m *manager) holdingLocked(c Container) (holding, bool) {
	i := slices.IndexFunc(m.held, func(h holding) bool {
		return h.pod == c.Pod && h.container == c.Name && h.resource == c.Resource
	})
	if i < 0 {
		return holding{}, false
	}
	return m.held[i], true
}

// recountLocked counts afresh what is in use from what containers hold.
func (m *manager) recountLocked() {
	m.allocated = map[string]set{}
	for _, h := range m.held {
		if m.allocated[h.resource] == nil {
			m.allocated[h.resource] = set{}
		}
		maps.Copy(m.allocated[h.resource], h.ids())
	}
}

// freeGone takes back what pods held that are no more. Only then does kubelet count afresh what is
// in use, and forgets what it is allocating at that moment (kubernetes/kubernetes#137534). A
// kubelet that has not heard of all pods yet takes back nothing.
func (m *manager) freeGone() {
	if !m.pods.known() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	known := map[string]set{}
	for _, h := range m.held {
		if known[h.resource] == nil {
			known[h.resource] = set{}
		}
		maps.Copy(known[h.resource], h.ids())
	}
	before := len(m.held)
	m.held = slices.DeleteFunc(m.held, func(h holding) bool { return !m.pods.has(h.pod) })
	if len(m.held) == before {
		return
	}
	for resource, ids := range m.allocated {
		if forgotten := minus(ids, known[resource]); len(forgotten) > 0 {
			m.log.add(Event{Kind: Forgotten, Resource: resource, IDs: slices.Sorted(maps.Keys(forgotten)), Pod: m.admitted})
		}
	}
	m.recountLocked()
}

// fits does what kubelet does for the Topology Manager's policy single-numa-node: one NUMA node
// must have the container's devices, those that it holds or enough that are free. A device that it
// holds and that left the list is a nil dereference in kubelet.
func (m *manager) fits(c Container) error {
	m.freeGone()
	m.mu.Lock()
	defer m.mu.Unlock()
	hasNode := func(device *v1beta1.Device) bool { return len(device.GetTopology().GetNodes()) > 0 }
	if !c.SingleNode || !slices.ContainsFunc(slices.Collect(maps.Values(m.all[c.Resource])), hasNode) {
		return nil
	}
	candidates := minus(m.healthy[c.Resource], m.allocated[c.Resource])
	if held, holds := m.holdingLocked(c); holds {
		candidates = held.ids()
	}
	onNode := map[int64]int{}
	for id := range candidates {
		device := m.all[c.Resource][id]
		if device == nil {
			err := fmt.Errorf("%w: device %s of %s is held by %s and in no list", ErrCrash, id, c.Resource, c.Pod)
			m.log.add(Event{Kind: Crash, Resource: c.Resource, IDs: []string{id}, Err: err})
			return err
		}
		for _, node := range device.GetTopology().GetNodes() {
			onNode[node.GetID()]++
		}
	}
	for _, count := range onNode {
		if count >= c.Count {
			return nil
		}
	}
	return &PodError{Reason: TopologyAffinity, Err: errors.New("resources cannot be allocated with topology locality")}
}

// allocate chooses devices for a container and asks the plugin for them.
func (m *manager) allocate(ctx context.Context, c Container) error {
	m.freeGone()
	defer m.setAdmitted("")
	chosen, err := m.choose(ctx, c)
	if err != nil || len(chosen) == 0 {
		return err
	}
	m.reached(BeforeAllocate)
	m.mu.Lock()
	e := m.endpoints[c.Resource]
	m.mu.Unlock()
	if e == nil {
		return m.giveUp(fmt.Errorf("unknown Device Plugin %s", c.Resource))
	}
	ids := slices.Collect(maps.Keys(chosen))
	response, err := m.callAllocate(ctx, c, e, ids)
	if err != nil {
		return m.giveUp(err)
	}
	if len(response.GetContainerResponses()) == 0 {
		return errors.New("no containers return in allocation response") // the devices stay counted as in use
	}
	if err := m.hold(c, ids, response.GetContainerResponses()[0]); err != nil {
		m.log.add(Event{Kind: Crash, Resource: c.Resource, IDs: ids, Err: err})
		return m.giveUp(err)
	}
	m.writeCheckpoint()
	return nil
}

func (m *manager) setAdmitted(pod string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.admitted = pod
}

// giveUp takes back the devices of an allocation that failed.
func (m *manager) giveUp(err error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recountLocked()
	return err
}

func (m *manager) callAllocate(
	ctx context.Context, c Container, e *endpoint, ids []string,
) (*v1beta1.AllocateResponse, error) {
	if err := m.live(e); err != nil {
		return nil, err
	}
	response, err := e.api.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	m.log.add(Event{Kind: Allocated, Resource: c.Resource, Endpoint: e.path, IDs: ids, Pod: c.Pod, Err: err})
	m.reached(AfterAllocate)
	return response, err
}

func (m *manager) reached(moment Moment) {
	if then := m.allocating.Load(); then != nil {
		(*then)(moment)
	}
}

// live fails if an endpoint was stopped.
func (m *manager) live(e *endpoint) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.stopped.IsZero() {
		return nil
	}
	return fmt.Errorf("endpoint %s has been stopped", e.path)
}

// hold notes what a container holds. A device that has left the list meanwhile is a nil dereference
// in kubelet.
func (m *manager) hold(c Container, ids []string, response *v1beta1.ContainerAllocateResponse) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := holding{pod: c.Pod, container: c.Name, resource: c.Resource, byNode: map[int64][]string{}, response: response}
	for _, id := range ids {
		device := m.all[c.Resource][id]
		if device == nil {
			return fmt.Errorf("%w: device %s left the list of %s while it was allocated", ErrCrash, id, c.Resource)
		}
		for _, node := range nodesOf(device) {
			h.byNode[node] = append(h.byNode[node], id)
		}
	}
	m.held = append(m.held, h)
	return nil
}

// nodesOf returns a device's NUMA nodes, or withoutNode.
func nodesOf(device *v1beta1.Device) []int64 {
	if len(device.GetTopology().GetNodes()) == 0 {
		return []int64{withoutNode}
	}
	var nodes []int64
	for _, node := range device.GetTopology().GetNodes() {
		nodes = append(nodes, node.GetID())
	}
	return nodes
}

// preStart asks the plugin before a container starts, if it wants to be asked.
func (m *manager) preStart(ctx context.Context, c Container) error {
	m.mu.Lock()
	e := m.endpoints[c.Resource]
	h, held := m.holdingLocked(c)
	m.mu.Unlock()
	if e == nil {
		return fmt.Errorf("endpoint not found in cache for a registered resource: %s", c.Resource)
	}
	if !e.options.GetPreStartRequired() {
		return nil
	}
	if !held {
		return fmt.Errorf("no devices of %s in local cache for pod %s, container %s", c.Resource, c.Pod, c.Name)
	}
	if err := m.live(e); err != nil {
		return fmt.Errorf("device plugin PreStartContainer rpc failed with err: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, preStartTimeout)
	defer cancel()
	ids := slices.Collect(maps.Keys(h.ids()))
	_, err := e.api.PreStartContainer(ctx, &v1beta1.PreStartContainerRequest{DevicesIds: ids})
	m.log.add(Event{Kind: PreStarted, Resource: c.Resource, Endpoint: e.path, IDs: ids, Err: err})
	if err != nil {
		return fmt.Errorf("device plugin PreStartContainer rpc failed with err: %w", err)
	}
	return nil
}
