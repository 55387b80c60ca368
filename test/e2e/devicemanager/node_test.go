package devicemanager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	apisgrpc "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager/bitmask"
	"k8s.io/kubernetes/pkg/kubelet/config"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// node is kubelet's device manager and PodResources service with just enough of a kubelet around
// them: the pods. It is a scenario.Subject.
type node struct {
	dir, podResourcesSocket string

	admission sync.Mutex // kubelet admits one pod at a time

	mu      sync.Mutex // guards all following fields
	manager *devicemanager.ManagerImpl
	pods    map[string]*v1.Pod
	numa    []int // what the Topology Manager has chosen for the pod that is being admitted
	unheard bool  // kubelet has not heard from the API server
	crashed bool
}

// startNode starts a node that ends with the test.
func startNode(t *testing.T, dir, podResourcesSocket string) *node {
	t.Helper()
	n := &node{dir: dir, podResourcesSocket: podResourcesSocket, pods: map[string]*v1.Pod{}}
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.stop)
	n.servePodResources(t)
	return n
}

func (n *node) start() error {
	if err := os.MkdirAll(n.dir, 0o750); err != nil {
		return err
	}
	m, err := newManager(filepath.Join(n.dir, "kubelet.sock"), topologyStore{node: n})
	if err != nil {
		return err
	}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return n.podsKnown() })
	if err := startManager(m, n.active, ready); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.manager = m
	return nil
}

// stop stops the device manager. One that has crashed holds its lock for ever; it is left alone.
func (n *node) stop() {
	n.mu.Lock()
	m, crashed := n.manager, n.crashed
	n.mu.Unlock()
	if !crashed {
		_ = stopManager(m) // it returns nil
	}
}

func (n *node) current() *devicemanager.ManagerImpl {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.manager
}

func (n *node) active() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.unheard {
		return nil
	}
	return slices.Collect(maps.Values(n.pods))
}

func (n *node) podsKnown() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.unheard
}

// SetPodsKnown says whether kubelet has heard from the API server since it started.
func (n *node) SetPodsKnown(known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unheard = !known
}

// Restart stops the device manager and starts another one over the same directory.
func (n *node) Restart() error {
	n.stop()
	return n.start()
}

// DropStream makes kubelet disconnect from every plugin of a resource, as it does when the plugin
// watcher asks for it. It reports 1 if there was a stream; allocatable tells, but only beforehand:
// a plugin may be back at once.
func (n *node) DropStream(resource string) int {
	entries, err := os.ReadDir(n.dir)
	if err != nil || n.Resources()[resource].Allocatable == 0 {
		return 0
	}
	for _, entry := range entries {
		deregister(n.current(), resource, filepath.Join(n.dir, entry.Name()))
		if version == kubelet.V136 {
			break // it goes by the resource alone
		}
	}
	return 1
}

func (n *node) Resources() map[string]kubelet.Quantity {
	capacity, allocatable := capacityOf(n.current())
	quantities := map[string]kubelet.Quantity{}
	for name, quantity := range capacity {
		healthy := allocatable[name]
		quantities[string(name)] = kubelet.Quantity{Capacity: int(quantity.Value()), Allocatable: int(healthy.Value())}
	}
	return quantities
}

// Admit does what kubelet does to bring a container up, as far as devices go.
func (n *node) Admit(ctx context.Context, c kubelet.Container) (kubelet.Allocation, error) {
	pod, container := n.addPod(c)
	if err := n.allocate(ctx, pod, container, c); err != nil {
		n.Remove(c.Pod)
		return kubelet.Allocation{}, err
	}
	options, err := runOptions(ctx, n.current(), pod, container)
	if err != nil {
		return kubelet.Allocation{}, &kubelet.PodError{Reason: kubelet.CreateContainerConfig, Err: err}
	}
	response := &v1beta1.ContainerAllocateResponse{Envs: map[string]string{}}
	for _, env := range options.Envs {
		response.Envs[env.Name] = env.Value
	}
	held := n.current().GetDevices(string(pod.UID), container.Name)[c.Resource]
	return kubelet.Allocation{IDs: slices.Sorted(maps.Keys(held)), Response: response}, nil
}

func (n *node) allocate(ctx context.Context, pod *v1.Pod, container *v1.Container, c kubelet.Container) (err error) {
	n.admission.Lock()
	defer n.admission.Unlock()
	n.mu.Lock()
	n.numa = c.NUMA
	n.mu.Unlock()
	defer func() {
		if crash := recover(); crash != nil {
			n.mu.Lock()
			n.crashed = true
			n.mu.Unlock()
			err = fmt.Errorf("%w: %v", kubelet.ErrCrash, crash)
		}
	}()
	if c.SingleNode && !fits(hints(n.current(), pod, container)[c.Resource]) {
		return &kubelet.PodError{Reason: kubelet.TopologyAffinity, Err: errors.New("no NUMA node has them all")}
	}
	if err := allocate(ctx, n.current(), pod, container); err != nil {
		return &kubelet.PodError{Reason: kubelet.UnexpectedAdmission, Err: err}
	}
	if len(n.current().GetDevices(string(pod.UID), container.Name)[c.Resource]) < c.Count {
		// Kubelet does not concern itself with a resource that it does not know; the scheduler would not
		// have sent the pod.
		return &kubelet.PodError{Reason: kubelet.Unschedulable, Err: errors.New("no such resource")}
	}
	return nil
}

// fits reports whether the Topology Manager's policy single-numa-node is content with a resource's
// hints.
func fits(hints []topologymanager.TopologyHint) bool {
	single := func(h topologymanager.TopologyHint) bool { return h.Preferred && h.NUMANodeAffinity.Count() == 1 }
	return hints == nil || slices.ContainsFunc(hints, single)
}

// addPod makes the container part of its pod, which is active from then on.
func (n *node) addPod(c kubelet.Container) (*v1.Pod, *v1.Container) {
	quantity := *apiresource.NewQuantity(int64(c.Count), apiresource.DecimalSI)
	container := v1.Container{Name: c.Name, Resources: v1.ResourceRequirements{
		Limits: v1.ResourceList{v1.ResourceName(c.Resource): quantity},
	}}
	n.mu.Lock()
	defer n.mu.Unlock()
	pod := n.pods[c.Pod]
	if pod == nil {
		pod = &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: c.Pod, Namespace: "default", UID: types.UID(c.Pod)}}
	}
	pod = pod.DeepCopy() // readers hold the old one
	containers := &pod.Spec.Containers
	if c.Init {
		containers = &pod.Spec.InitContainers
	}
	*containers = slices.DeleteFunc(*containers, func(old v1.Container) bool { return old.Name == c.Name })
	*containers = append(*containers, container)
	n.pods[c.Pod] = pod
	return pod, &container
}

func (n *node) Remove(pod string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.pods, pod)
}

func (n *node) PodStatus(name string) map[string]map[string]bool {
	n.mu.Lock()
	pod := n.pods[name]
	n.mu.Unlock()
	var status v1.PodStatus
	for _, container := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, v1.ContainerStatus{Name: container.Name})
	}
	updateStatus(n.current(), pod, &status)
	healthy := map[string]map[string]bool{}
	for _, container := range status.ContainerStatuses {
		for _, resource := range container.AllocatedResourcesStatus {
			if healthy[string(resource.Name)] == nil {
				healthy[string(resource.Name)] = map[string]bool{}
			}
			for _, device := range resource.Resources {
				healthy[string(resource.Name)][string(device.ResourceID)] = device.Health == v1.ResourceHealthStatusHealthy
			}
		}
	}
	return healthy
}

// servePodResources serves kubelet's PodResources as kubelet does. It outlives restarts of the
// device manager.
func (n *node) servePodResources(t *testing.T) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(n.podResourcesSocket), 0o750); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", n.podResourcesSocket)
	if err != nil {
		t.Fatal(err)
	}
	qps, burst := int32(podresources.DefaultQPS), int32(podresources.DefaultBurstTokens)
	server := grpc.NewServer(apisgrpc.WithRateLimiter(t.Context(), "podresources", qps, burst))
	service := podresources.NewV1PodResourcesServer(t.Context(), podresources.PodResourcesProviders{
		Pods: podsOf{n}, Devices: devicesOf{n}, Cpus: nothing{}, Memory: nothing{}, DynamicResources: nothing{},
	})
	podresourcesv1.RegisterPodResourcesListerServer(server, service)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() {
		server.Stop()
		serving.Wait()
	})
}

// podsOf shows PodResources the pods.
type podsOf struct{ node *node }

func (p podsOf) GetActivePods() []*v1.Pod { return p.node.active() }
func (p podsOf) GetPods() []*v1.Pod       { return p.node.active() }

func (p podsOf) GetPodByName(_, name string) (*v1.Pod, bool) {
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	pod, there := p.node.pods[name]
	return pod, there
}

// containerDevices turns what the device manager says into PodResources' words. Kubelet's own
// function for that is out of reach in its container manager; this says the same.
func containerDevices(instances devicemanager.ResourceDeviceInstances) []*podresourcesv1.ContainerDevices {
	var answer []*podresourcesv1.ContainerDevices
	for resource, devices := range instances {
		for id, device := range devices {
			if device.GetTopology() == nil {
				answer = append(answer, &podresourcesv1.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
			}
			for _, numa := range device.GetTopology().GetNodes() {
				answer = append(answer, &podresourcesv1.ContainerDevices{
					ResourceName: resource, DeviceIds: []string{id},
					Topology: &podresourcesv1.TopologyInfo{Nodes: []*podresourcesv1.NUMANode{{ID: numa.GetID()}}},
				})
			}
		}
	}
	return answer
}

// topologyStore is a Topology Manager that has chosen what the container asks for.
type topologyStore struct{ node *node }

func (s topologyStore) hint() topologymanager.TopologyHint {
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	if len(s.node.numa) == 0 {
		return topologymanager.TopologyHint{}
	}
	mask, err := bitmask.NewBitMask(s.node.numa...)
	if err != nil {
		return topologymanager.TopologyHint{}
	}
	return topologymanager.TopologyHint{NUMANodeAffinity: mask, Preferred: true}
}

func (s topologyStore) GetPolicy() topologymanager.Policy { return topologymanager.NewNonePolicy() }
func (s topologyStore) Name() string                      { return "container" }
