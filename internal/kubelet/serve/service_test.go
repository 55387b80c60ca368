package serve_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

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
		"a repeated ID":  {[][]string{{id(0), id(0)}}, nil, codes.InvalidArgument, id(0) + " is asked for twice"},
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

func TestOtherCalls(t *testing.T) {
	t.Parallel()
	n, _ := serving(t, standin.V137, clock.RealClock{}, 8)
	client := n.client(t)

	options, err := client.GetDevicePluginOptions(t.Context(), &pluginapi.Empty{})
	if err != nil || !options.GetGetPreferredAllocationAvailable() || options.GetPreStartRequired() {
		t.Errorf("GetDevicePluginOptions() = %v, %v", options, err)
	}
	if _, err := client.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: []string{id(0)}}); err != nil {
		t.Errorf("PreStartContainer() = %v", err)
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
