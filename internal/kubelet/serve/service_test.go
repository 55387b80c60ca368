package serve_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// client returns a client of the node's only plugin socket.
func (n *node) client(t *testing.T) pluginapi.DevicePluginClient {
	t.Helper()
	sockets := n.sockets(t)
	if len(sockets) != 1 {
		t.Fatalf("sockets = %v, want one", sockets)
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(n.dir, sockets[0]),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return pluginapi.NewDevicePluginClient(conn)
}

func TestAllocate(t *testing.T) {
	t.Parallel()
	n, d := serving(t, standin.V137, clock.RealClock{}, 8)
	d.offer(7, 3) // 7 departs, 3 is unhealthy
	n.awaitAllocatable(t, 6)
	client := n.client(t)

	tests := map[string]struct {
		containers [][]string
		want       []string // NVIDIA_VISIBLE_DEVICES of each container
		code       codes.Code
		says       string
	}{
		"one device":     {[][]string{{id(0)}}, []string{id(0)}, codes.OK, ""},
		"two devices":    {[][]string{{id(2), id(1)}}, []string{id(2) + "," + id(1)}, codes.OK, ""},
		"two containers": {[][]string{{id(0)}, {id(1)}}, []string{id(0), id(1)}, codes.OK, ""},
		"no container":   {nil, nil, codes.InvalidArgument, "names no container"},
		"no device":      {[][]string{{id(0)}, {}}, nil, codes.InvalidArgument, "no device"},
		"an empty ID":    {[][]string{{""}}, nil, codes.InvalidArgument, "empty ID"},
		"a repeated ID":  {[][]string{{id(0), id(0)}}, nil, codes.InvalidArgument, id(0) + " is requested twice"},
		"an unknown ID": {[][]string{{"GPU-x"}}, nil, codes.NotFound,
			`invalid allocation request for "nvidia.com/gpu": invalid request: unknown device: GPU-x`},
		"an unhealthy device": {[][]string{{id(3)}}, nil, codes.FailedPrecondition, "XID 48"},
		"a departing device":  {[][]string{{id(7)}}, nil, codes.FailedPrecondition, "not on this node any more"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			request := &pluginapi.AllocateRequest{}
			for _, ids := range test.containers {
				request.ContainerRequests = append(request.ContainerRequests, &pluginapi.ContainerAllocateRequest{DevicesIds: ids})
			}
			response, err := client.Allocate(t.Context(), request)
			if status.Code(err) != test.code {
				t.Fatalf("Allocate() = %v, want %v", err, test.code)
			}
			if test.says != "" && (!strings.Contains(err.Error(), test.says) ||
				!strings.Contains(err.Error(), "nvidia.com/gpu")) {
				t.Errorf("Allocate() = %v, want it to name the resource and say %q", err, test.says)
			}
			var got []string
			for _, c := range response.GetContainerResponses() {
				got = append(got, c.GetEnvs()["NVIDIA_VISIBLE_DEVICES"])
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("NVIDIA_VISIBLE_DEVICES = %v, want %v", got, test.want)
			}
		})
	}
}

// TestGPUsThatMayNotBeGiven: a pod gets none of them, and hears why.
func TestGPUsThatMayNotBeGiven(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	d := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
		MayGive: func(devices []resource.Device) error {
			return fmt.Errorf("a claim has %s and %s", devices[0].GPU, devices[1].GPU)
		}})
	d.offer(2)
	n.awaitAllocatable(t, 2)
	_, err := n.client(t).Allocate(t.Context(), allocate(id(0), id(1)))
	if status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "a claim has "+id(0)+" and "+id(1)) {
		t.Errorf("Allocate() = %v", err)
	}
}

// allocate returns the request of a container for devices.
func allocate(ids ...string) *pluginapi.AllocateRequest {
	return &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
}

// TestWhatAContainerGets: all edits, in the kubelet's words.
func TestWhatAContainerGets(t *testing.T) {
	t.Parallel()
	n, d := serving(t, standin.V137, clock.RealClock{}, 2)
	edits := containeredits.Options{DeviceNodes: true, Strategies: []containeredits.Strategy{containeredits.EnvVar,
		containeredits.VolumeMounts, containeredits.CDIAnnotations, containeredits.CDICRI}}
	plan := resource.New(inventory.Snapshot{GPUs: gpus(2)}, resource.Options{})
	d.Apply(plan, serve.Options{Edits: edits}, 1)
	got, err := n.client(t).Allocate(t.Context(), allocate(id(0), id(1)))
	check(t, err)
	e, err := containeredits.For(plan.Resources[0].Devices, edits)
	check(t, err)
	want := &pluginapi.ContainerAllocateResponse{Envs: e.Env, Annotations: e.Annotations}
	for _, m := range e.Mounts {
		want.Mounts = append(want.Mounts, &pluginapi.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath})
	}
	for _, m := range e.Nodes {
		want.Devices = append(want.Devices, &pluginapi.DeviceSpec{HostPath: m.HostPath, ContainerPath: m.ContainerPath,
			Permissions: m.Permissions})
	}
	for _, name := range e.CDIDevices {
		want.CdiDevices = append(want.CdiDevices, &pluginapi.CDIDevice{Name: name})
	}
	if !proto.Equal(want, got.GetContainerResponses()[0]) {
		t.Errorf("a container gets %v, want %v", got, want)
	}
	for what, count := range map[string]int{"variables": len(want.Envs), "annotations": len(want.Annotations),
		"mounts": len(want.Mounts), "nodes": len(want.Devices), "CDI devices": len(want.CdiDevices)} {
		if count == 0 {
			t.Errorf("there are no %s to translate", what)
		}
	}
}

// An earlierProcess is the Registrar of a process beside an earlier one, which answers calls.
type earlierProcess struct {
	*kubelet.Directory
	mu     sync.Mutex // guards all following fields
	err    error      // of its answer
	called bool
}

func (e *earlierProcess) CallEarlier(ctx context.Context, name string,
	call func(context.Context, pluginapi.DevicePluginClient) error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.called = true; e.err != nil || name != gpu {
		return e.err
	}
	return call(ctx, earlierClient{})
}

// An earlierClient answers for the earlier process.
type earlierClient struct{ pluginapi.DevicePluginClient }

func (earlierClient) Allocate(context.Context, *pluginapi.AllocateRequest, ...grpc.CallOption) (
	*pluginapi.AllocateResponse, error) {
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{
		{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "earlier"}}}}, nil
}

func (earlierClient) GetPreferredAllocation(context.Context, *pluginapi.PreferredAllocationRequest,
	...grpc.CallOption) (*pluginapi.PreferredAllocationResponse, error) {
	return &pluginapi.PreferredAllocationResponse{ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{
		{DeviceIDs: []string{"earlier"}}}}, nil
}

// TestCallsAboutDevicesOfAnEarlierProcess go to that process if none of the devices is of the plan,
// and are answered here if that process does not answer. A device that no process may give is
// refused at once.
func TestCallsAboutDevicesOfAnEarlierProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	earlier := &earlierProcess{Directory: n.directory(t)}
	c := clocktesting.NewFakeClock(time.Now()) // no device leaves the list
	shared := id(1) + "::0"
	d := n.startSetOn(t, serve.Collaborators{Registrar: earlier, Accountant: n.account(t, c), Clock: c,
		Checkpoint: func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{Healthy: map[string][]string{gpu: {shared, "GPU-gone"}}}, nil
		}})
	d.offer(2)
	n.awaitAllocatable(t, 2)
	client := n.client(t)
	away, refuses := errors.New("nobody listens"), status.Error(codes.FailedPrecondition, "its GPU is not free yet")
	for name, tt := range map[string]struct {
		ids               string
		err               error
		asked, askedFirst bool // by Allocate, and by GetPreferredAllocation
		code              codes.Code
		says              string
	}{
		"none":                                {code: codes.InvalidArgument},
		"of the plan":                         {ids: id(0)},
		"of the earlier process":              {ids: shared, asked: true, askedFirst: true},
		"of both":                             {ids: shared + " " + id(0)},
		"unknown":                             {ids: "GPU-x", askedFirst: true, code: codes.NotFound, says: "GPU-x"},
		"of a GPU that is gone":               {ids: "GPU-gone", askedFirst: true, code: codes.FailedPrecondition},
		"the earlier process does not answer": {ids: shared, err: away, asked: true, askedFirst: true},
		"the earlier process refuses": {ids: shared, err: refuses, asked: true, askedFirst: true,
			code: codes.FailedPrecondition, says: "its GPU is not free yet"},
	} {
		calls := func(call string, want bool, do func() (from string, err error)) {
			earlier.mu.Lock()
			earlier.err, earlier.called = tt.err, false
			earlier.mu.Unlock()
			from, err := do()
			earlier.mu.Lock()
			defer earlier.mu.Unlock()
			if answered := want && tt.err == nil; earlier.called != want || err == nil && (from == "earlier") != answered {
				t.Errorf("%s: %s asks the earlier process: %v, want %v; the answer is %q, %v", name, call, earlier.called, want,
					from, err)
			}
		}
		ids := strings.Fields(tt.ids)
		calls("Allocate", tt.asked, func() (string, error) {
			r, err := client.Allocate(t.Context(), allocate(ids...))
			if status.Code(err) != tt.code || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s: Allocate() = %v, want %v %s", name, err, tt.code, tt.says)
			}
			if err != nil {
				return "", err
			}
			return r.GetContainerResponses()[0].GetEnvs()["NVIDIA_VISIBLE_DEVICES"], err
		})
		calls("GetPreferredAllocation", tt.askedFirst, func() (string, error) {
			r, err := client.GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
				ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: ids, AllocationSize: 1}}})
			if err != nil {
				return "", err
			}
			return r.GetContainerResponses()[0].GetDeviceIDs()[0], nil
		})
	}
}

// TestAPanicEndsTheCallAlone: the next call is answered, and a stream begins again.
func TestAPanicEndsTheCallAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	var streams, calls atomic.Int64
	d := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
		KeepsOneClient: func(string) bool {
			if streams.Add(1) == 1 {
				panic("stream out of range")
			}
			return false
		},
		MayGive: func([]resource.Device) error {
			if calls.Add(1) == 1 {
				panic("index out of range")
			}
			return nil
		}})
	d.offer(1)
	n.awaitAllocatable(t, 1)
	client := n.client(t)
	if _, err := client.Allocate(t.Context(), allocate(id(0))); status.Code(err) != codes.Internal ||
		!strings.Contains(err.Error(), "Allocate") {
		t.Errorf("a call that panics returns %v, want Internal", err)
	}
	_, err := client.Allocate(t.Context(), allocate(id(0)))
	check(t, err)
	for _, words := range []string{"stream out of range", "index out of range", "service_test.go"} {
		if !strings.Contains(d.log(), words) {
			t.Errorf("the log lacks %q:\n%s", words, d.log())
		}
	}
}

func TestOtherCalls(t *testing.T) {
	t.Parallel()
	n, _ := serving(t, standin.V137, clock.RealClock{}, 8)
	client := n.client(t)

	options, err := client.GetDevicePluginOptions(t.Context(), &pluginapi.Empty{})
	if err != nil || !options.GetGetPreferredAllocationAvailable() || options.GetPreStartRequired() {
		t.Errorf("GetDevicePluginOptions() = %v, %v", options, err)
	}
	if _, err := client.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: []string{"GPU-x"}}); err != nil {
		t.Errorf("PreStartContainer() without an inspection = %v", err)
	}
	prefer := func(available, required []string, size int32) ([]string, error) {
		response, err := client.GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: available, MustIncludeDeviceIDs: required, AllocationSize: size},
			},
		})
		if err != nil {
			return nil, err
		}
		return response.GetContainerResponses()[0].GetDeviceIDs(), nil
	}
	got, err := prefer([]string{id(5), id(3), id(1), "GPU-gone"}, []string{id(3)}, 2)
	if err != nil || len(got) != 2 || !slices.Contains(got, id(3)) {
		t.Errorf("GetPreferredAllocation() = %v, %v; want two devices, %s among them", got, err, id(3))
	}
	if _, err := prefer([]string{id(5)}, nil, 2); status.Code(err) != codes.InvalidArgument {
		t.Errorf("GetPreferredAllocation() of too few = %v, want InvalidArgument", err)
	}
}

func TestListsAreSortedAndSentOnlyWhenTheyChange(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	// Kubelet's account is not asked: a list that kubelet is slow to take in would be sent again.
	d := n.startDaemonWith(t, clock.RealClock{}, &liar{err: errors.New("not here")})
	d.offer(8)
	n.awaitAllocatable(t, 8)
	for range 10 {
		d.offer(8)
	}
	d.offer(8, 2)
	n.awaitAllocatable(t, 7)
	var lists []standin.Event
	for _, e := range n.Events(0) {
		if e.Kind == standin.Listed {
			lists = append(lists, e)
		}
	}
	if len(lists) != 2 {
		t.Errorf("%d lists, want 2", len(lists))
	}
	for _, list := range lists {
		if !slices.IsSortedFunc(list.Devices, func(a, b *pluginapi.Device) int { return strings.Compare(a.GetID(), b.GetID()) }) {
			t.Errorf("list is not sorted: %v", list.Devices)
		}
		if node := list.Devices[7].GetTopology().GetNodes()[0].GetID(); node != 1 {
			t.Errorf("NUMA node of the last GPU = %d, want 1", node)
		}
	}
}

// TestRequestsAreBounded: by what kubelet can ask about the longest list.
func TestRequestsAreBounded(t *testing.T) {
	t.Parallel()
	n, _ := serving(t, standin.V137, clock.RealClock{}, 8)
	for size, want := range map[int]codes.Code{2*resource.MaxList - 100: codes.NotFound,
		2 * resource.MaxList: codes.ResourceExhausted} {
		_, err := n.client(t).Allocate(t.Context(), &pluginapi.AllocateRequest{
			ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{strings.Repeat("x", size)}}},
		})
		if said := status.Convert(err).Message(); status.Code(err) != want || len(said) > 500 {
			t.Errorf("a request of %d bytes: %.100v, in %d bytes, want %v", size, err, len(said), want)
		}
	}
	if info, err := os.Stat(filepath.Join(n.dir, n.sockets(t)[0])); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v, want mode 0600", info.Mode(), err)
	}
}
