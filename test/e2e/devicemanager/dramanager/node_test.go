//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const (
	nodeName  = "node-1"
	namespace = "default"
	// patience bounds every wait for something that must happen. Kubelet looks for pods that ended
	// once in a minute.
	patience = 3 * time.Minute
)

// A node is a machine with an API server, room for a kubelet, and what drivers find on it.
type node struct {
	t      *testing.T
	dir    string // of all folders
	api    *apiserver.Server
	client kubernetes.Interface

	pools     *feed.Feed[policy.Pool]
	snapshots *feed.Feed[inventory.Snapshot]

	mu      sync.Mutex // guards all following fields
	pods    map[types.UID]*v1.Pod
	kubelet *kubelet
	made    int // pods
}

// A kubelet is the part of one that deals with drivers.
type kubelet struct {
	manager *dra.Manager
	plugins pluginmanager.PluginManager
	stop    func()
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "n") // the path of a socket has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &node{
		t: t, dir: dir, pods: map[types.UID]*v1.Pod{}, pools: feed.New(policy.Pool{}), snapshots: feed.New(inventory.Snapshot{}),
	}
	for _, folder := range []string{"plugins_registry", "kubelet", "api", "root/usr/lib/x86_64-linux-gnu"} {
		if err := os.MkdirAll(n.path(folder), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(n.path("root/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if n.api, err = apiserver.Start(n.path("api")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.api.Stop)
	if err := n.api.ChangeNode(nodeName, func(*v1.Node) {}); err != nil {
		t.Fatal(err)
	}
	settings, err := clientcmd.BuildConfigFromFlags("", n.api.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	settings.QPS, settings.Burst = 1000, 1000
	if n.client, err = kubernetes.NewForConfig(settings); err != nil {
		t.Fatal(err)
	}
	n.setHealth(inventory.Health{State: inventory.Healthy})
	t.Cleanup(n.stopKubelet)
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

// setHealth publishes eight GPUs, of which the first has this health.
func (n *node) setHealth(health inventory.Health) {
	s, pool := machine(health)
	n.snapshots.Publish(s)
	n.pools.Publish(pool)
}

// machine returns eight GPUs, of which the first has this health.
func machine(health inventory.Health) (inventory.Snapshot, policy.Pool) {
	s := inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580.95.05"},
		Control: inventory.NodeControl | inventory.NodeUVM}
	for i := range 8 {
		g := inventory.GPU{UUID: "GPU-" + strconv.Itoa(i), Index: i, Minor: i, BDF: fmt.Sprintf("0000:%d0:00.0", i+1),
			NUMANode:    -1,
			MemoryBytes: 80 << 30,
			MIG:         inventory.MIGDisabled, Health: inventory.Health{State: inventory.Healthy}}
		if i == 0 {
			g.Health = health
		}
		s.GPUs = append(s.GPUs, g)
	}
	return s, policy.New(s, nodeName, policy.Numbers{}.With(s.GPUs), policy.All(s.GPUs), nil).Shared(8)
}

// startKubelet starts a kubelet: another one after stopKubelet goes on from the files of that one.
func (n *node) startKubelet() {
	n.t.Helper()
	k := n.startKubeletWithoutDRA()
	k.plugins.AddHandler(registerapi.DRAPlugin, k.manager.GetWatcherHandler())
}

// startKubeletWithoutDRA starts one that does not register DRA drivers yet.
func (n *node) startKubeletWithoutDRA() *kubelet {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	manager, err := dra.NewManager(klog.Background(), n.client, n.path("kubelet"))
	if err != nil {
		n.t.Fatal(err)
	}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	getNode := func(context.Context) (*v1.Node, error) {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, nil
	}
	if err := manager.Start(ctx, n.active, getNode, ready); err != nil {
		n.t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	k := &kubelet{manager: manager, plugins: pluginmanager.NewPluginManager(n.path("plugins_registry"),
		record.NewFakeRecorder(100))}
	go func() {
		defer close(ended)
		for { // it ends at once when the machine has no inotify instance left, of which a user has 128 altogether
			k.plugins.Run(ctx, ready, stop)
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	k.stop = func() {
		cancel()
		close(stop)
		<-ended
		manager.GetWatcherHandler().(*plugin.DRAPluginManager).Stop() //nolint:forcetypeassert // it is one in all versions
	}
	n.mu.Lock()
	n.kubelet = k
	n.mu.Unlock()
	return k
}

// stopKubelet ends kubelet: its connections close, and its files stay.
func (n *node) stopKubelet() {
	n.mu.Lock()
	k := n.kubelet
	n.kubelet = nil
	n.mu.Unlock()
	if k != nil {
		k.stop()
	}
}

func (n *node) restartKubelet() {
	n.t.Helper()
	n.stopKubelet()
	n.startKubelet()
}

func (n *node) manager() *dra.Manager {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.kubelet.manager
}

func (n *node) active() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	var pods []*v1.Pod
	for _, pod := range n.pods {
		pods = append(pods, pod)
	}
	return pods
}

// pod makes a pod with one claim, to which the scheduler gave these devices: "gpu-0",
// "DRIVER:gpu-0" where the driver has another name, "other:x" of another driver, or "gpu-0/SHARE",
// a quarter of its memory.
func (n *node) pod(devices ...string) *v1.Pod {
	n.t.Helper()
	n.mu.Lock()
	n.made++
	name := "pod-" + strconv.Itoa(n.made)
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace,
			UID: types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", n.made))},
		Spec: v1.PodSpec{
			ResourceClaims: []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}},
			Containers:     []v1.Container{{Name: "main", Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu"}}}}},
		},
		Status: v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: "main"}}},
	}
	n.pods[pod.UID] = pod
	n.mu.Unlock()
	err := n.api.ChangeClaim(namespace, name, func(c *resourceapi.ResourceClaim) {
		c.Name, c.Namespace = name, namespace
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: pod.UID}}
		c.Status.Allocation = &resourceapi.AllocationResult{}
		for _, device := range devices {
			result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: policy.Driver, Pool: nodeName,
				Device: device}
			if driver, other, ok := strings.Cut(device, ":"); ok {
				if result.Driver, result.Device = driver, other; driver == "other" {
					result.Driver = otherDriver
				}
			}
			if device, share, ok := strings.Cut(result.Device, "/"); ok {
				id := types.UID(share)
				result.Device, result.ShareID = device, &id
				result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("20Gi")}
			}
			c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, result)
		}
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return pod
}

// remove removes a pod from those that kubelet is to run, and its claim.
func (n *node) remove(pod *v1.Pod) {
	n.t.Helper()
	n.mu.Lock()
	delete(n.pods, pod.UID)
	n.mu.Unlock()
	if err := n.api.DeleteClaim(namespace, pod.Name); err != nil {
		n.t.Fatal(err)
	}
}

// prepare has kubelet prepare the claims of a pod once.
func (n *node) prepare(pod *v1.Pod) error {
	return n.manager().PrepareResources(n.t.Context(), pod)
}

// runs has kubelet start a pod, as often as it takes, and returns the device nodes that the
// container gets.
func (n *node) runs(pod *v1.Pod) []string {
	n.t.Helper()
	n.eventually("pod "+pod.Name+" runs", func() error { return n.prepare(pod) })
	return n.devices(pod)
}

// devices returns the device nodes of a container of a pod that was prepared, as the container
// runtime resolves them.
func (n *node) devices(pod *v1.Pod) []string {
	n.t.Helper()
	info, err := n.manager().GetResources(pod, &pod.Spec.Containers[0])
	if err != nil {
		n.t.Fatal(err)
	}
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(n.path("cdi")), cdilib.WithAutoRefresh(false))
	if err != nil {
		n.t.Fatal(err)
	}
	var nodes []string
	for _, id := range info.CDIDevices {
		if strings.HasPrefix(id.Name, otherDriver) {
			continue
		}
		device := cache.GetDevice(id.Name)
		if device == nil {
			n.t.Fatalf("the runtime does not find %s: %v", id.Name, cache.GetErrors())
		}
		for _, d := range device.ContainerEdits.DeviceNodes {
			if strings.HasPrefix(d.Path, "/dev/nvidia") && !strings.HasPrefix(d.Path, "/dev/nvidiactl") &&
				!strings.HasPrefix(d.Path, "/dev/nvidia-") {
				nodes = append(nodes, d.Path)
			}
		}
	}
	slices.Sort(nodes)
	return nodes
}

// ends has kubelet end a pod, as often as it takes.
func (n *node) ends(pod *v1.Pod) {
	n.t.Helper()
	n.eventually("pod "+pod.Name+" ends", func() error { return n.manager().UnprepareResources(n.t.Context(), pod) })
}

// recorded says whether the claim of a pod is prepared for the driver.
func (n *node) recorded(pod *v1.Pod) bool {
	n.t.Helper()
	claim, err := n.api.Claim(namespace, pod.Name)
	if err != nil {
		n.t.Fatal(err)
	}
	return n.hasRecord(string(claim.UID))
}

func (n *node) hasRecord(uid string) bool {
	n.t.Helper()
	_, err := os.Stat(n.path("state/claims/" + uid + ".json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	return err == nil
}

// health returns what kubelet tells of the device of a pod, as "Health message".
func (n *node) health(pod *v1.Pod) string {
	status := pod.Status.DeepCopy()
	updateStatus(n.manager(), pod, status)
	claims := status.ContainerStatuses[0].AllocatedResourcesStatus
	if len(claims) == 0 || len(claims[0].Resources) == 0 {
		return "none"
	}
	h := claims[0].Resources[0]
	if h.Message == nil {
		return string(h.Health)
	}
	return string(h.Health) + " " + *h.Message
}

func (n *node) awaitHealth(pod *v1.Pod, want string) {
	n.t.Helper()
	n.eventually("health of the device is "+want, func() error {
		if now := n.health(pod); now != want {
			return fmt.Errorf("it is %q", now)
		}
		return nil
	})
}

// eventually waits until something is done.
func (n *node) eventually(what string, do func() error) {
	n.t.Helper()
	deadline := time.After(patience)
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := do()
		if err == nil {
			return
		}
		select {
		case <-ticker.C:
		case <-deadline:
			n.t.Fatalf("not within %v: %s: %v", patience, what, err)
		}
	}
}

// sockets returns the names of the sockets in the folder for plugins.
func (n *node) sockets() []string {
	n.t.Helper()
	entries, err := os.ReadDir(n.path("plugins_registry"))
	if err != nil {
		n.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
