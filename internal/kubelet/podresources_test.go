package kubelet_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// accounts is a kubelet's PodResources service that counts what it is asked.
type accounts struct {
	podresources.UnimplementedPodResourcesListerServer
	asked  atomic.Int32
	listed atomic.Int32
	padded int // bytes that its answers about pods have more
	// foreign is how many devices pods hold besides.
	foreign atomic.Int32
}

func (a *accounts) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (
	*podresources.AllocatableResourcesResponse, error,
) {
	a.asked.Add(1)
	return &podresources.AllocatableResourcesResponse{Devices: []*podresources.ContainerDevices{
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"b"}}, {ResourceName: "nvidia.com/gpu",
			DeviceIds: []string{"a"}},
	}}, nil
}

func (a *accounts) List(
	context.Context, *podresources.ListPodResourcesRequest,
) (*podresources.ListPodResourcesResponse, error) {
	a.listed.Add(1)
	var devices []*podresources.ContainerDevices
	for _, node := range []int64{1, 0} { // kubelet names a device once for each of its NUMA nodes
		devices = append(devices, &podresources.ContainerDevices{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"b"},
			Topology: &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: node}}}})
	}
	devices = append(devices, &podresources.ContainerDevices{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"c"}})
	if n := int(a.foreign.Load()); n > 0 {
		foreign := &podresources.ContainerDevices{ResourceName: "nvidia.com/gpu"}
		for i := range n {
			foreign.DeviceIds = append(foreign.DeviceIds, strconv.Itoa(i))
		}
		devices = append(devices, foreign)
	}
	container := &podresources.ContainerResources{Name: "main" + strings.Repeat("n", a.padded), Devices: devices,
		DynamicResources: []*podresources.DynamicResource{
			{ClaimNamespace: "ns", ClaimName: "one", ClaimResources: []*podresources.ClaimResource{
				{DriverName: "gpu.nvidia.com", PoolName: "node", DeviceName: "gpu-0", ShareId: new("s")},
			}},
			{ClaimNamespace: "ns", ClaimName: "two"},
		}}
	return &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Namespace: "ns", Name: "p", Containers: []*podresources.ContainerResources{container}},
	}}, nil
}

// client returns a client of the service.
func (a *accounts) client(t *testing.T, c clock.Clock) *kubelet.PodResources {
	t.Helper()
	socket := filepath.Join(folder(t), "p%2Fx%zz.sock") // the path of a socket is no URL
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, a)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	client := kubelet.NewPodResources(socket, c)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// TestLargeAccount: an answer of 18 MB, which was seen on a node with many pods, is read.
func TestLargeAccount(t *testing.T) {
	t.Parallel()
	service := &accounts{padded: 18 << 20}
	if held, err := service.client(t, nil).Held(t.Context()); err != nil || len(held) != 2 {
		t.Errorf("%d devices: %v", len(held), err)
	}
}

// TestAccountWithTooManyDevices: an answer with more devices than a node has is an error, and the
// next one is read.
func TestAccountWithTooManyDevices(t *testing.T) {
	t.Parallel()
	service := &accounts{}
	client := service.client(t, nil)
	for _, tt := range []struct {
		devices int32
		refused bool
	}{{131069, false}, {600_000, true}, {0, false}} {
		service.foreign.Store(tt.devices)
		held, err := client.Held(t.Context())
		if refused := err != nil && strings.Contains(err.Error(), "devices of pods"); refused != tt.refused ||
			refused != (len(held) == 0) {
			t.Errorf("%d devices more: %d, %v", tt.devices, len(held), err)
		}
	}
}

func TestKubeletsAccount(t *testing.T) {
	service := &accounts{}
	c := clocktesting.NewFakeClock(time.Now())
	client := service.client(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	held, err := client.Held(ctx)
	want := []kubelet.HeldDevice{
		{Resource: "nvidia.com/gpu", ID: "b", Pod: "ns/p", Container: "main", NUMANodes: []int64{1, 0}},
		{Resource: "nvidia.com/gpu", ID: "c", Pod: "ns/p", Container: "main"},
	}
	if diff := cmp.Diff(want, held); err != nil || diff != "" {
		t.Errorf("Held() (-want +got):\n%s\n%v", diff, err)
	}

	c.Step(listPause)
	devices, err := client.ContainerDevices(ctx)
	wantDevices := []kubelet.ContainerDevice{
		{Resource: "nvidia.com/gpu", ID: "b", Namespace: "ns", Pod: "p", Container: "main"},
		{Resource: "nvidia.com/gpu", ID: "c", Namespace: "ns", Pod: "p", Container: "main"},
		{Namespace: "ns", Pod: "p", Container: "main", Claim: kubelet.ClaimResource{
			Namespace: "ns", Name: "one", Driver: "gpu.nvidia.com", Pool: "node", Device: "gpu-0", ShareID: "s",
		}},
	}
	if diff := cmp.Diff(wantDevices, devices); err != nil || diff != "" {
		t.Errorf("ContainerDevices() (-want +got):\n%s\n%v", diff, err)
	}

	c.Step(listPause)
	claims, err := client.Claims(ctx)
	if diff := cmp.Diff(map[string]bool{"ns/one": true, "ns/two": true}, claims); err != nil || diff != "" {
		t.Errorf("Claims() (-want +got):\n%s\n%v", diff, err)
	}

	// Many ask at once: kubelet is asked once, and what one does to its answer is its own affair.
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			ids, err := client.Allocatable(ctx)
			if err != nil {
				t.Errorf("Allocatable() = %v", err)
				return
			}
			slices.Sort(ids["nvidia.com/gpu"])
			if !slices.Equal(ids["nvidia.com/gpu"], []string{"a", "b"}) {
				t.Errorf("Allocatable() = %v, want a and b", ids)
			}
		})
	}
	all.Wait()
	if asked := service.asked.Load(); asked != 1 {
		t.Errorf("kubelet was asked %d times for 50 answers, want once", asked)
	}
	c.Step(freshFor)
	if err := client.Close(); err != nil { // the next question connects again
		t.Errorf("Close() = %v", err)
	}
	if _, err := client.Allocatable(ctx); err != nil || service.asked.Load() != 1 {
		t.Errorf("kubelet was asked %d times (%v), want once for as long as the answer is fresh", service.asked.Load(), err)
	}
	c.Step(1)
	if _, err := client.Allocatable(ctx); err != nil || service.asked.Load() != 2 {
		t.Errorf("kubelet was asked %d times (%v), want again once the answer was old", service.asked.Load(), err)
	}
	if n := client.Connections(); n != 2 {
		t.Errorf("it has connected %d times, want twice", n)
	}
}

// asking has somebody ask which claims pods have, which nobody else asks for here, and returns the
// channel of what comes of it.
func asking(ctx context.Context, client *kubelet.PodResources) <-chan error {
	answered := make(chan error, 1)
	go func() {
		_, err := client.Claims(ctx)
		answered <- err
	}()
	return answered
}

// waits waits until somebody waits by the clock, and fails if a question is answered before.
func waits(t *testing.T, c *clocktesting.FakeClock, answered <-chan error) {
	t.Helper()
	for late := time.Now().Add(patience); !c.HasWaiters(); {
		select {
		case err := <-answered:
			t.Fatalf("kubelet was asked (%v) while it allocates", err)
		case <-time.After(time.Millisecond):
		}
		if time.Now().After(late) {
			t.Fatal("nobody waits by the clock")
		}
	}
}

// TestKubeletIsNotAskedWhileItAllocates: a question about pods has kubelet forget the devices that
// it is allocating.
func TestKubeletIsNotAskedWhileItAllocates(t *testing.T) {
	service := &accounts{}
	c := clocktesting.NewFakeClock(time.Now())
	client := service.client(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	preferred := client.Allocating()
	question := asking(ctx, client)
	waits(t, c, question)
	allocated := client.Allocating()
	preferred(true)
	c.Step(10 * settleTime)
	waits(t, c, question) // a call is under way still
	allocated(false)
	c.Step(settleTime - 1)
	waits(t, c, question)
	if _, err := client.Allocatable(ctx); err != nil {
		t.Errorf("Allocatable() = %v: that question changes nothing at kubelet and need not wait", err)
	}
	c.Step(1)
	if err := <-question; err != nil || service.listed.Load() != 1 {
		t.Errorf("kubelet was asked %d times, want once after it has allocated: %v", service.listed.Load(), err)
	}
}

// TestAKubeletThatAllocatesAllTheTimeIsAsked: after a second, a pause between its calls is enough
// that is shorter.
func TestAKubeletThatAllocatesAllTheTimeIsAsked(t *testing.T) {
	service := &accounts{}
	c := clocktesting.NewFakeClock(time.Now())
	client := service.client(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client.Allocating()(false)
	began, question := c.Now(), asking(ctx, client)
	waits(t, c, question)
	for c.Since(began) < time.Minute && service.listed.Load() == 0 {
		client.Allocating()(true)
		client.Allocating()(false)
		c.Step(settleTime / 2)
		poll.Until(t, "the question is asked, or waits", func() bool { return c.HasWaiters() || service.listed.Load() > 0 })
	}
	if took := c.Since(began); took < time.Second || took > 2*time.Second {
		t.Errorf("kubelet was asked after %v, want 1 s to 2 s", took)
	}
	cancel()
	t.Logf("the question ended: %v", <-question) // it was answered, or is given up
}

// TestAQuestionWaitsNoLongerThanItsContext: a kubelet whose call does not end gets no further query, and
// the caller gets an error.
func TestAQuestionWaitsNoLongerThanItsContext(t *testing.T) {
	service := &accounts{}
	c := clocktesting.NewFakeClock(time.Now())
	client := service.client(t, c)
	defer client.Allocating()(false)
	ctx, cancel := context.WithCancel(t.Context())
	question := asking(ctx, client)
	waits(t, c, question)
	cancel()
	if err := <-question; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "while it allocates") {
		t.Errorf("Claims() = %v, want that kubelet allocates", err)
	}
	if listed := service.listed.Load(); listed != 0 {
		t.Errorf("kubelet was asked %d times", listed)
	}
}

// TestQuestionsAboutPodsComeOneAfterTheOther: kubelet refuses questions that come too fast, of all
// programs together. Those who wait for the same question share its answer, whatever they ask about
// pods.
func TestQuestionsAboutPodsComeOneAfterTheOther(t *testing.T) {
	service := &accounts{}
	c := clocktesting.NewFakeClock(time.Now())
	client := service.client(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := client.Held(ctx); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			held, err := client.Held(ctx)
			devices, err2 := client.ContainerDevices(ctx)
			if err := errors.Join(err, err2); err != nil || len(held) != 2 || len(devices) != 3 {
				t.Errorf("%v and %v: %v", held, devices, err)
			}
		})
	}
	answered := make(chan struct{})
	go func() {
		all.Wait()
		close(answered)
	}()
	steps := int32(0)
	for ended := false; !ended; {
		select {
		case <-answered:
			ended = true
		case <-time.After(time.Millisecond):
			if c.HasWaiters() {
				c.Step(listPause)
				steps++
			}
		}
	}
	if listed := service.listed.Load(); listed < 3 || listed > steps+1 {
		t.Errorf("kubelet was asked %d times in %d pauses", listed, steps)
	}
}

func TestWithoutPodResources(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := kubelet.NewPodResources("", nil).Held(ctx); err == nil ||
		!strings.Contains(err.Error(), "--pod-resources-socket") {
		t.Errorf("Held() without a socket = %v, want the flag's name in it", err)
	}
	dir := filepath.Join(folder(t), "pod-resources")
	socket := filepath.Join(dir, "p.sock")
	absent := kubelet.NewPodResources(socket, nil)
	none := func(when string) {
		t.Helper()
		if _, err := absent.Held(ctx); !errors.Is(err, kubelet.ErrNoPodResources) || !strings.Contains(err.Error(), socket) {
			t.Errorf("Held() %s = %v, want ErrNoPodResources and the socket", when, err)
		}
	}
	none("without the folder")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	none("in a folder that is not the kubelet's")
	if err := os.WriteFile(socket, nil, 0o600); err != nil { // as a kubelet that has ended leaves it
		t.Fatal(err)
	}
	if _, err := absent.Held(ctx); err == nil || errors.Is(err, kubelet.ErrNoPodResources) {
		t.Errorf("Held() where nobody listens = %v, want that it may work later", err)
	}
	if err := absent.Close(); err != nil {
		t.Error(err)
	}
	for what, client := range map[string]*kubelet.PodResources{
		"without a socket": kubelet.NewPodResources("", nil), "where nobody listens": kubelet.NewPodResources(filepath.Join(folder(t), "p.sock"), nil),
	} {
		_, ofAllocatable := client.Allocatable(ctx)
		_, ofHeld := client.Held(ctx)
		_, ofContainers := client.ContainerDevices(ctx)
		_, ofClaims := client.Claims(ctx)
		if ofAllocatable == nil || ofHeld == nil || ofContainers == nil || ofClaims == nil {
			t.Errorf("%s: %v, %v, %v, %v, want errors", what, ofAllocatable, ofHeld, ofContainers, ofClaims)
		}
		for range 2 {
			if err := client.Close(); err != nil {
				t.Errorf("%s: Close() = %v", what, err)
			}
		}
	}
}

// TestMissingPodResources: the kubelet's --root-dir is named where it can be seen.
func TestMissingPodResources(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	socket := filepath.Join(dir, "kubelet.sock")
	for _, tt := range []struct {
		socket string
		node   fs.FS
		want   string // in the answer; empty for no answer
	}{
		{"", nil, ""},
		{socket, nil, "--root-dir, such as /var/lib/k0s/kubelet, as kubeletRoot"},
		{socket, fstest.MapFS{"var/lib/kubelet/pod-resources/kubelet.sock": {}},
			"--root-dir, such as /var/lib/k0s/kubelet, as kubeletRoot"},
		{socket, fstest.MapFS{"var/lib/k0s/kubelet/pod-resources/kubelet.sock": {}},
			"--root-dir, which is /var/lib/k0s/kubelet, as kubeletRoot"},
		{
			socket, fstest.MapFS{"var/snap/microk8s/common/var/lib/kubelet/pod-resources/kubelet.sock": {}},
			"--root-dir, which is /var/snap/microk8s/common/var/lib/kubelet, as kubeletRoot",
		},
		{dir, nil, ""}, // it is there
	} {
		got := kubelet.NewPodResources(tt.socket, nil).Missing(tt.node)
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("Missing() of %q with %v = %q, want %q in it", tt.socket, tt.node, got, tt.want)
		}
	}
}
