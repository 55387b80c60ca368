package daemon

import (
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestLargeRequestsCostNoMemory: 60 requests of 8 MB fail at the plugin's socket, at once and one
// after the other, and at the control socket. The daemon is soon as small as before.
func TestLargeRequestsCostNoMemory(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	conn, err := grpc.NewClient("unix://"+filepath.Join(filepath.Dir(s.Socket()), s.sockets()[0]),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	rounds := 60
	if buildFlags != nil {
		// the race detector's own memory is larger: what the daemon has is not measured, and each round
		// takes seconds
		rounds = 3
	}
	large := strings.Repeat("x", 8_000_000)
	request := &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{large}}}}
	var atOnce sync.WaitGroup
	for range rounds {
		atOnce.Go(func() {
			_, err := v1beta1.NewDevicePluginClient(conn).Allocate(t.Context(), request, grpc.WaitForReady(true))
			if grpcstatus.Code(err) != codes.NotFound {
				t.Errorf("Allocate() = %.100v, want NotFound", err)
			}
		})
	}
	atOnce.Wait()
	for range rounds {
		_, err := v1beta1.NewDevicePluginClient(conn).Allocate(t.Context(), request, grpc.WaitForReady(true))
		if grpcstatus.Code(err) != codes.NotFound {
			t.Fatalf("Allocate() = %.100v, want NotFound", err)
		}
		if err := control.Call(t.Context(), s.ControlSocket(), "status", large, nil); err == nil ||
			errors.Is(err, control.ErrNoDaemon) {
			t.Fatalf("a large control request: %v", err)
		}
	}
	if buildFlags != nil {
		return
	}
	const limit = 60 << 10 // kB
	s.eventually("the daemon has less than 60 MB", func() bool {
		size := s.resident()
		if size < limit {
			t.Logf("the daemon has %d kB", size)
		}
		return size < limit
	})
	s.admit("work", 8)
}
