package field_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// most returns the most memory that the daemon ever had, in MB.
func (h *host) most() int {
	h.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.cmd.Process.Pid))
	if err != nil {
		h.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		var kB int
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kB); n == 1 {
			return kB / 1000
		}
	}
	h.t.Fatalf("no VmHWM in %s", status)
	return 0
}

// plugins connects to the only socket of a device plugin in a folder.
func plugins(t *testing.T, folder string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(folder, "*gpu*.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets: %v, %v", sockets, err)
	}
	conn, err := grpc.NewClient("unix://"+sockets[0],
		append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestLargeRequestsAtOnce: 60 requests of 8 MB do not take memory at the same time, and requests
// that never come keep none of them from being answered (E6).
func TestLargeRequestsAtOnce(t *testing.T) {
	t.Parallel()
	k, args := withKubelet(t)
	h := newHost(t, append(args, "--simulate=dgx-h100")...)
	has(t, k, "nvidia.com/gpu", 8)
	folder := filepath.Dir(k.Socket())
	silent := plugins(t, folder)
	for range 8 {
		d := &grpc.StreamDesc{ClientStreams: true}
		if _, err := silent.NewStream(t.Context(), d, pluginapi.DevicePlugin_GetPreferredAllocation_FullMethodName); err != nil {
			t.Fatal(err)
		}
	}
	ids := make([]string, 0, 200_000)
	for i := range cap(ids) {
		ids = append(ids, fmt.Sprintf("GPU-%032d::0", i))
	}
	request := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: ids, AllocationSize: 1},
	}}
	var calls sync.WaitGroup
	count := 60
	if raceDetector {
		count = 8 // for races alone: the figure is one of the plain program
	}
	for range count {
		client := pluginapi.NewDevicePluginClient(plugins(t, folder))
		calls.Go(func() { _, _ = client.GetPreferredAllocation(t.Context(), request) })
	}
	calls.Wait()
	most := h.most()
	t.Logf("the daemon had %d MB", most)
	if most > 300 && !raceDetector {
		t.Error("the daemon had more than 300 MB")
	}
	if _, status := h.do("ready"); status != 0 {
		t.Error("the daemon is not ready any more")
	}
}

// A stalling connection lets some bytes pass, and then none until it is closed.
type stalling struct {
	net.Conn
	left   int
	ended  chan struct{}
	ending sync.Once
}

func (c *stalling) Write(p []byte) (int, error) {
	if c.left -= len(p); c.left < 0 {
		<-c.ended
		return 0, net.ErrClosed
	}
	return c.Conn.Write(p)
}

func (c *stalling) Close() error {
	c.ending.Do(func() { close(c.ended) })
	return c.Conn.Close()
}

// TestLargeRequestsThatDoNotArrive: of 48 requests whose last bytes never come, four take memory at
// a time, and none of them keeps a whole one from being answered (E6).
func TestLargeRequestsThatDoNotArrive(t *testing.T) {
	if testing.Short() {
		t.Skip("each four of them wait for a second: make test-all runs it")
	}
	t.Parallel()
	k, args := withKubelet(t)
	h := newHost(t, append(args, "--simulate=dgx-h100")...)
	has(t, k, "nvidia.com/gpu", 8)
	folder := filepath.Dir(k.Socket())
	ids := make([]string, 0, 180_000)
	for i := range cap(ids) {
		ids = append(ids, fmt.Sprintf("GPU-%032d::0", i))
	}
	request := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: ids, AllocationSize: 1},
	}}
	var calls sync.WaitGroup
	for range 48 {
		conn := plugins(t, folder, grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(path, "unix://"))
			if err != nil {
				return nil, err
			}
			s := &stalling{Conn: c, left: 7_000_000, ended: make(chan struct{})}
			t.Cleanup(func() { _ = s.Close() })
			return s, nil
		}))
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			_, _ = pluginapi.NewDevicePluginClient(conn).GetPreferredAllocation(ctx, request)
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), poll.Limit)
	defer cancel()
	whole := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: slices.Collect(maps.Keys(k.Devices("nvidia.com/gpu"))), AllocationSize: 1},
	}}
	if _, err := pluginapi.NewDevicePluginClient(plugins(t, folder)).GetPreferredAllocation(ctx, whole); err != nil {
		t.Errorf("a whole request: %v", err)
	}
	calls.Wait()
	most := h.most()
	t.Logf("the daemon had %d MB", most)
	if most > 200 && !raceDetector {
		t.Error("the daemon had more than 200 MB")
	}
}
