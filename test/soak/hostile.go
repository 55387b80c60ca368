package main

import (
	"bytes"
	"context"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// pluginSockets returns the paths of the sockets beside kubelet's own.
func (s *stage) pluginSockets() []string {
	entries, err := os.ReadDir(filepath.Dir(s.Socket()))
	if err != nil {
		return nil
	}
	var paths []string
	for _, e := range entries {
		if e.Type() == fs.ModeSocket && e.Name() != filepath.Base(s.Socket()) {
			paths = append(paths, filepath.Join(filepath.Dir(s.Socket()), e.Name()))
		}
	}
	return paths
}

// hostile connects to the plugin sockets and says nothing, or nonsense. Nothing may come of it.
func (s *stage) hostile(ctx context.Context) error {
	sockets := s.pluginSockets()
	if len(sockets) == 0 {
		return nil
	}
	socket := sockets[s.random.IntN(len(sockets))]
	how, hold := s.random.IntN(4), s.between(0, 5*time.Second)
	s.note("hostile connections, kind %d, for %s", how, short(hold))
	if how == 3 {
		s.allocateNonsense(ctx, socket)
		return nil
	}
	for range 1 + s.random.IntN(20) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err != nil {
			return nil // the socket has gone meanwhile
		}
		time.AfterFunc(hold, func() { _ = conn.Close() })
		switch how {
		case 1:
			_, _ = conn.Write([]byte("GET / HTTP/1.1\r\nHost: kubelet\r\n\r\n"))
		case 2:
			_, _ = conn.Write(append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
				bytes.Repeat([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}, 1000)...))
		}
	}
	return nil
}

// allocateNonsense asks a plugin for devices that it does not have.
func (s *stage) allocateNonsense(ctx context.Context, socket string) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	client := v1beta1.NewDevicePluginClient(conn)
	for _, id := range []string{"", "GPU-0", strings.Repeat("x", 1<<20), "GPU-\xff", "../../etc/passwd", "::0"} {
		answer, err := client.Allocate(ctx, &v1beta1.AllocateRequest{
			ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{id}}},
		})
		if err == nil {
			s.violate("Allocate of %.40q was answered with %.200v", id, answer)
		}
		_, _ = client.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{
			ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: []string{id, id}, MustIncludeDeviceIDs: []string{"y"}, AllocationSize: -1},
			},
		})
		_, _ = client.PreStartContainer(ctx, &v1beta1.PreStartContainerRequest{DevicesIds: []string{id}})
	}
}

// hostileControl sends nonsense to the control socket. Nothing may come of it.
func (s *stage) hostileControl(ctx context.Context) error {
	daemons := s.running()
	if len(daemons) == 0 {
		return nil
	}
	socket := daemons[0].ControlSocket()
	how, hold := s.random.IntN(6), s.between(0, 8*time.Second)
	s.note("hostile control requests, kind %d, for %s", how, short(hold))
	texts := []string{
		"", "{", "\x00\x01\x02", strings.Repeat("[", 100_000), `{"call":"` + strings.Repeat("x", 1<<20) + `"}`,
	}
	if how < len(texts) {
		for range 1 + s.random.IntN(12) {
			conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
			if err != nil {
				break // it has too many already, or was removed
			}
			go func() { // the daemon may read none of it
				_ = conn.SetDeadline(time.Now().Add(hold))
				_, _ = conn.Write([]byte(texts[how]))
			}()
			time.AfterFunc(hold, func() { _ = conn.Close() })
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for call, arguments := range map[string]any{
		"status": "nonsense", "no such call": nil, "quiesce": 7,
		"health.clear": map[string]any{"gpu": "99"}, "ready": []int{1},
		"simulate.inject": simulator.Fault{Kind: "nonsense"},
	} {
		if err := control.Call(ctx, socket, call, arguments, nil); err == nil && call != "health.clear" {
			s.violate("the control call %s with %v succeeded", call, arguments)
		}
	}
	return nil
}

// ask asks each daemon how it is. It has to answer, whatever hangs.
func (s *stage) ask(ctx context.Context) error {
	s.note("questions")
	for _, n := range s.running() {
		for range 1 + s.random.IntN(10) {
			if err := s.callOne(ctx, n, "status", struct{}{}, nil); err != nil && ctx.Err() == nil {
				s.violate("a daemon does not tell its status: %v", err)
			}
		}
		if err := s.ready(ctx, n); err != nil && ctx.Err() == nil {
			s.violate("a daemon that was ready is not: %v", err)
		}
	}
	return nil
}

func (s *stage) removeControlSocket(ctx context.Context) error {
	s.note("the control socket is removed")
	for _, n := range s.running() {
		_ = os.Remove(n.ControlSocket()) // it may be gone
		ready := func(ctx context.Context) error { return s.ready(ctx, n) }
		if err := node.Poll(ctx, soon*s.options.slack, nil, ready); err != nil && ctx.Err() == nil {
			s.violate("the control socket was removed and does not come back: %v", err)
		}
	}
	return nil
}

func (s *stage) removePluginSocket(context.Context) error {
	sockets := s.pluginSockets()
	if len(sockets) == 0 {
		return nil
	}
	s.note("a plugin socket is removed")
	s.disturb()
	defer s.settle(2 * soon)
	return os.RemoveAll(sockets[s.random.IntN(len(sockets))])
}
