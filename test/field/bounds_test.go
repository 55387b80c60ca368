package field_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
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
func plugins(t *testing.T, folder string) *grpc.ClientConn {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(folder, "*gpu*.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets: %v, %v", sockets, err)
	}
	conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
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
