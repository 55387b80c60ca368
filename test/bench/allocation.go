package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var allocationFigures = []figure{
	{"Choice of GPUs, dgx-1, slowest size", "20 µs", choiceOf(profileGraph("dgx-1"))},
	{"Choice of GPUs, dgx-h100, slowest size", "20 µs", choiceOf(profileGraph("dgx-h100"))},
	{"Choice of GPUs, dgx-2, slowest size", "250 µs", choiceOf(profileGraph("dgx-2"))},
	{"Choice of GPUs, 16 with random links, slowest size", "250 µs", choiceOf(randomGraph(16))},
	{"Choice of GPUs, 32 with random links, slowest size", "2 ms", choiceOf(randomGraph(32))},
	{"GetPreferredAllocation, dgx-1, all sizes", "p99 within 1.5 × a no-op with the message", prefer("dgx-1", 0, "")},
	{"GetPreferredAllocation, dgx-2, all sizes", "p99 within 2 × a no-op with the message", prefer("dgx-2", 0, "")},
	{"GetPreferredAllocation, 8 × 1000 replicas, 8 wanted", "p99 within 1.3 × a no-op with the message",
		prefer("dgx-h100", 8, manyReplicas)},
	{"GetPreferredAllocation, 8 × 7 MIG devices, 4 wanted", "p99 within 1.5 × a no-op with the message",
		prefer("h100-mig-1g", 4, migSingle)},
}

// migSingle offers MIG devices of one size as GPUs.
const migSingle = "version: v1\nflags: {migStrategy: single}\n"

// choiceOf measures the choice among all GPUs of a graph, at every size.
func choiceOf(build func(context.Context) (*topology.Graph, error)) func(context.Context, string) (string, error) {
	return func(ctx context.Context, _ string) (string, error) {
		g, err := build(ctx)
		if err != nil {
			return "", err
		}
		var slowest []time.Duration
		size, exact := 0, true
		for n := range g.Len() + 1 {
			times := make([]time.Duration, 0, 200)
			for range cap(times) {
				began := time.Now()
				choice, _ := g.Choose(topology.Request{Available: g.Everything(), Size: n})
				times = append(times, time.Since(began))
				exact = exact && choice.Exact
			}
			slices.Sort(times)
			if n == 0 || times[len(times)/2] > slowest[len(slowest)/2] {
				slowest, size = times, n
			}
		}
		return fmt.Sprintf("median %.1f µs, p99 %.1f µs at size %d; all exact: %t",
			micros(slowest[len(slowest)/2]), micros(slowest[len(slowest)*99/100]), size, exact), nil
	}
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// profileGraph returns the graph of a simulated machine, as the daemon sees it.
func profileGraph(name string) func(context.Context) (*topology.Graph, error) {
	return func(ctx context.Context) (*topology.Graph, error) {
		snapshot, err := scan(ctx, name)
		return topology.New(snapshot.GPUs), err
	}
}

// randomGraph returns a graph in which every pair has its own number of NVLinks.
func randomGraph(n int) func(context.Context) (*topology.Graph, error) {
	return func(context.Context) (*topology.Graph, error) {
		r := rand.New(rand.NewPCG(1, uint64(n)))
		gpus := make([]inventory.GPU, n)
		for i := range gpus {
			gpus[i] = inventory.GPU{UUID: fmt.Sprintf("GPU-%02d", i), Index: i}
			for j := range i {
				gpus[i].Links = append(gpus[i].Links, inventory.Link{
					Peer: gpus[j].UUID, PeerIndex: j, NVLinks: max(0, r.IntN(9)-3), NVLinkVersion: 3,
					PCIe: inventory.PCIeSingle + inventory.PCIePath(r.IntN(5)),
				})
			}
		}
		return topology.New(gpus), nil
	}
}

// prefer measures GetPreferredAllocation on a simulated machine, with everything available. Size 0
// stands for all sizes in turn. The call it is held against brings the same message to a process
// that answers nothing.
func prefer(profile string, size int, configFile string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, daemon string) (_ string, err error) {
		folder, err := os.MkdirTemp("", "bench")
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
		setup := node.Setup{Daemon: daemon, Profile: profile}
		if configFile != "" {
			path := filepath.Join(folder, "config.yaml")
			if err := os.WriteFile(path, []byte(configFile), 0o600); err != nil {
				return "", err
			}
			setup.Args = []string{"--config-file", path}
		}
		n, err := registered(ctx, setup)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		listed, err := next(ctx, n, 0, standin.Listed)
		if err != nil {
			return "", err
		}
		client, _, closeClient, err := dial(ctx, n)
		if err != nil {
			return "", err
		}
		defer closeClient()
		idle, closeIdle, err := startIdle(ctx, filepath.Join(folder, "idle.sock"))
		if err != nil {
			return "", err
		}
		defer closeIdle()

		var requests []*pluginapi.PreferredAllocationRequest
		for wanted := 1; wanted <= len(listed.Devices); wanted++ {
			if size == 0 || size == wanted {
				container := &pluginapi.ContainerPreferredAllocationRequest{AllocationSize: int32(wanted)}
				for _, d := range listed.Devices {
					container.AvailableDeviceIDs = append(container.AvailableDeviceIDs, d.GetID())
				}
				requests = append(requests, &pluginapi.PreferredAllocationRequest{
					ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{container},
				})
			}
		}
		ask := func(c pluginapi.DevicePluginClient) func(i int) error {
			return func(i int) error {
				_, err := c.GetPreferredAllocation(ctx, requests[i%len(requests)])
				return err
			}
		}
		return inTurn(ask(idle), ask(client))
	}
}

// startIdle starts this program as a plugin that answers nothing (see serveIdle), and returns a
// client of it.
func startIdle(ctx context.Context, socket string) (_ pluginapi.DevicePluginClient, done func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	process := exec.CommandContext(ctx, self, "-idle", socket)
	process.Stderr = os.Stderr
	if err := process.Start(); err != nil {
		return nil, nil, err
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	done = func() {
		if conn != nil {
			_ = conn.Close()
		}
		_ = process.Process.Kill()
		_ = process.Wait()
	}
	if err != nil {
		done()
		return nil, nil, err
	}
	client := pluginapi.NewDevicePluginClient(conn)
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if _, err := client.GetDevicePluginOptions(waiting, &pluginapi.Empty{}, grpc.WaitForReady(true)); err != nil {
		done()
		return nil, nil, fmt.Errorf("reach the idle plugin: %w", err)
	}
	return client, done, nil
}

// idlePlugin answers every question with nothing.
type idlePlugin struct {
	pluginapi.UnimplementedDevicePluginServer
}

func (idlePlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (idlePlugin) GetPreferredAllocation(context.Context, *pluginapi.PreferredAllocationRequest) (
	*pluginapi.PreferredAllocationResponse, error,
) {
	return &pluginapi.PreferredAllocationResponse{}, nil
}

// serveIdle serves an idle plugin until the process is killed.
func serveIdle(ctx context.Context, socket string) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, idlePlugin{})
	return server.Serve(listener)
}
