//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// The names of NVIDIA's plugin for ComputeDomains.
const (
	domains       = "compute-domain.nvidia.com"
	domainChannel = "channel-0"
	imexChannel   = "/dev/nvidia-caps-imex-channels/channel0"
)

// A domainPlugin stands in for that plugin on a machine without NVLink between nodes: it has its
// names and files, and offers itself to kubelet by the same library of Kubernetes with the same
// options.
type domainPlugin struct {
	node *node
	stop func()
}

func (n *node) startDomains() *domainPlugin {
	n.t.Helper()
	d := &domainPlugin{node: n}
	data := n.path("plugins/" + domains)
	if err := os.MkdirAll(data, 0o750); err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	helper, err := kubeletplugin.Start(ctx, d, kubeletplugin.KubeClient(n.client), kubeletplugin.NodeName(nodeName),
		kubeletplugin.DriverName(domains),
		kubeletplugin.Serialize(false), kubeletplugin.RegistrarDirectoryPath(n.path("plugins_registry")), kubeletplugin.PluginDataDirectoryPath(data))
	if err != nil {
		cancel()
		n.t.Fatal(err)
	}
	d.stop = sync.OnceFunc(func() {
		cancel()
		helper.Stop()
	})
	n.t.Cleanup(d.stop)
	return d
}

// publish writes the slice of the plugin, once.
func (d *domainPlugin) publish() {
	d.node.t.Helper()
	device := resourceapi.Device{Name: domainChannel, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"type": {StringValue: ptr.To("channel")}, "id": {IntValue: ptr.To(int64(0))},
	}}
	err := d.node.api.ChangeSlice(nodeName+"-"+domains+"-x7k2p", func(s *resourceapi.ResourceSlice) {
		s.Spec = resourceapi.ResourceSliceSpec{
			Driver: domains, NodeName: ptr.To(nodeName), Pool: resourceapi.ResourcePool{Name: nodeName, Generation: 1,
				ResourceSliceCount: 1},
			Devices: []resourceapi.Device{device},
		}
	})
	if err != nil {
		d.node.t.Fatal(err)
	}
}

func (d *domainPlugin) spec(uid types.UID) string {
	return d.node.path("cdi/" + cdilib.GenerateTransientSpecName("k8s."+domains, "claim", string(uid)) + ".yaml")
}

func (d *domainPlugin) PrepareResourceClaims(
	_ context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		name := fmt.Sprintf("%s-%s", claim.UID, domainChannel)
		text := fmt.Sprintf(`{"cdiVersion":%q,"kind":"k8s.%s/claim","devices":[{"name":%q,"containerEdits":{"deviceNodes":[{"path":%q}]}}]}`,
			specs.CurrentVersion, domains, name, imexChannel)
		if err := os.MkdirAll(d.node.path("cdi"), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(d.spec(claim.UID), []byte(text), 0o600); err != nil {
			return nil, err
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: []kubeletplugin.Device{{
			Requests: []string{"channel"}, PoolName: nodeName, DeviceName: domainChannel, CDIDeviceIDs: []string{"k8s." +
				domains + "/claim=" + name},
		}}}
	}
	return results, nil
}

func (d *domainPlugin) UnprepareResourceClaims(_ context.Context,
	claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = os.Remove(d.spec(claim.UID))
	}
	return results, nil
}

func (*domainPlugin) HandleError(context.Context, error, string) {}

// podInDomain makes a pod with a claim for a GPU and one for the channel of a ComputeDomain.
func (n *node) podInDomain(gpu string) *v1.Pod {
	n.t.Helper()
	pod := n.pod(gpu)
	name := pod.Name + "-channel"
	err := n.api.ChangeClaim(namespace, name, func(c *resourceapi.ResourceClaim) {
		c.Name, c.Namespace = name, namespace
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod.Name, UID: pod.UID}}
		c.Status.Allocation = &resourceapi.AllocationResult{}
		c.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{
			{Request: "channel", Driver: domains, Pool: nodeName, Device: domainChannel},
		}
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims,
		v1.PodResourceClaim{Name: "channel", ResourceClaimName: &name})
	resources := &pod.Spec.Containers[0].Resources
	resources.Claims = append(resources.Claims, v1.ResourceClaim{Name: "channel"})
	return pod
}

// given returns the device nodes of GPUs and channels that the container of a pod gets, by the
// files in the folder of CDI specs.
func (n *node) given(pod *v1.Pod) []string {
	n.t.Helper()
	n.eventually("pod "+pod.Name+" runs", func() error { return n.prepare(pod) })
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
		device := cache.GetDevice(id.Name)
		if device == nil {
			n.t.Fatalf("the runtime does not find %s: %v", id.Name, cache.GetErrors())
		}
		for _, d := range device.ContainerEdits.DeviceNodes {
			nodes = append(nodes, d.Path)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// slicesOf returns how many devices each driver has in slices of the node's pool.
func (n *node) slicesOf() map[string]int {
	all := map[string]int{}
	for _, s := range n.api.Slices() {
		all[s.Spec.Driver] += len(s.Spec.Devices)
	}
	return all
}

// TestBesideComputeDomains: NVIDIA's plugin for ComputeDomains and the daemon on one node, as
// kubelet's own managers see them: a pod with a claim of each gets a GPU and a channel, and neither
// program touches the sockets, slices and CDI specs of the other when it starts, is killed or ends.
func TestBesideComputeDomains(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet()
	if err := os.Mkdir(n.path("devices"), 0o750); err != nil {
		t.Fatal(err)
	}
	devices, err := standin.Start(standin.Options{Dir: n.path("devices"), PodResourcesSocket: n.path("resources.sock"),
		Version: standin.V137})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(devices.Stop)
	theirs := n.startDomains()
	end := n.startDaemon()
	published := func(want map[string]int) {
		t.Helper()
		n.eventually("slices are there", func() error {
			if got := n.slicesOf(); fmt.Sprint(got) != fmt.Sprint(want) {
				return fmt.Errorf("devices in slices: %v", got)
			}
			return nil
		})
	}
	published(map[string]int{policy.Driver: 8}) // kubelet, which starts, has deleted all others
	theirs.publish()
	first, want := n.podInDomain("gpu-2"), fmt.Sprint([]string{imexChannel, "/dev/nvidia2"})
	if got := fmt.Sprint(n.given(first)); got != want {
		t.Errorf("the container gets %s, want %s", got, want)
	}
	theirSockets := func() error {
		_, registered := os.Stat(n.path("plugins_registry/" + domains + "-reg.sock"))
		_, served := os.Stat(n.path(filepath.Join("plugins", domains, "dra.sock")))
		return errors.Join(registered, served)
	}

	end(syscall.SIGKILL)
	end = n.startDaemon() // removes the socket that the killed one has left
	n.eventually("one socket of the daemon's is left", func() error {
		ours := slices.DeleteFunc(n.sockets(), func(name string) bool { return strings.HasPrefix(name, domains) })
		if len(ours) != 1 {
			return fmt.Errorf("the sockets are %q", ours)
		}
		return theirSockets()
	})
	second := n.podInDomain("gpu-3")
	n.given(second)
	if got := fmt.Sprint(n.given(first)); got != want {
		t.Errorf("after a kill of the daemon the container gets %s, want %s", got, want)
	}
	published(map[string]int{policy.Driver: 8, domains: 1})

	theirs.stop()
	n.startDomains()
	n.restartKubelet()
	for _, pod := range []*v1.Pod{first, second} {
		n.given(pod)
		n.ends(pod)
		if n.recorded(pod) {
			t.Errorf("the record of %s is left", pod.Name)
		}
	}
	end(syscall.SIGTERM)
	if err := theirSockets(); err != nil {
		t.Errorf("the end of the daemon: %v", err)
	}
	if left, err := filepath.Glob(n.path("cdi/k8s.*claim*")); err != nil || len(left) > 0 {
		t.Errorf("CDI specs are left: %q, %v", left, err)
	}
}
