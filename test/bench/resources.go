package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var resourceFigures = []figure{
	{"plan for 8 GPUs × 1,000 replicas → published, 50 times", "under 50 ms", planManyReplicas},
	{"Allocate with envvar, beside an empty call", "p50 within 2 ×", allocateWith("--device-list-strategy=envvar")},
	{"Allocate with volume-mounts", "p50 within 2 ×", allocateWith("--device-list-strategy=volume-mounts")},
	{"Allocate with envvar and device specs", "p50 within 2 ×", allocateWith("--pass-device-specs")},
	{"Allocate with cdi-annotations", "p50 within 2 ×", allocateWith("--device-list-strategy=cdi-annotations")},
	{"Allocate with cdi-cri", "p50 within 2 ×", allocateWith("--device-list-strategy=cdi-cri")},
	{"Allocate with both CDI strategies", "p50 within 2 ×",
		allocateWith("--device-list-strategy=cdi-annotations,cdi-cri")},
	{"resident memory at 8,000 replicas", "under 60 MB", manyReplicasMemory},
	{"messages of a reload that changes 1 of 10 resources", "1", reload},
}

// manyReplicas shares each GPU a thousand times.
const manyReplicas = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1000}]}}\n"

func planManyReplicas(ctx context.Context, _ string) (string, error) {
	c, _, err := config.Sources{}.Resolve("", []byte(manyReplicas))
	if err != nil {
		return "", err
	}
	snapshot, err := scan(ctx, "dgx-h100")
	if err != nil {
		return "", err
	}
	directory, err := kubelet.NewDirectory(config.DefaultKubeletSocket, nil)
	if err != nil {
		return "", err
	}
	// A Set that does not run publishes as one that does; nobody reads.
	set := serve.NewServers(serve.Collaborators{
		Registrar: directory, Incarnation: feed.New(uint64(0)), Sockets: feed.New([]string(nil)), Clock: clock.RealClock{},
	})
	var took []time.Duration
	for i := range 50 {
		// so that every plan differs
		snapshot.GPUs[0].Health.State = []inventory.State{inventory.Healthy, inventory.Unhealthy}[i%2]
		began := time.Now()
		set.Apply(resource.New(snapshot, c.Resource), serve.Options{Edits: c.Edits}, 1)
		took = append(took, time.Since(began))
	}
	return spread(took), nil
}

// scan returns what the adapter sees of a simulated node.
func scan(ctx context.Context, profile string) (snapshot inventory.Snapshot, err error) {
	p, err := simulator.Load(profile)
	if err != nil {
		return inventory.Snapshot{}, err
	}
	n := simulator.New(p)
	defer n.Close()
	session, err := nvidia.New(nvidia.Options{Library: n.NVML(), Root: n.Root()}).Open(ctx)
	if err != nil {
		return inventory.Snapshot{}, err
	}
	defer func() { err = errors.Join(err, session.Close(ctx)) }()
	snapshot, err = session.Scan(ctx)
	snapshot.GPUs = slices.Clone(snapshot.GPUs)
	for i := range snapshot.GPUs { // which nobody has judged
		snapshot.GPUs[i].Health.State = inventory.Healthy
	}
	return snapshot, err
}

func allocateWith(args ...string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, daemon string) (_ string, err error) {
		n, err := registered(ctx, node.Setup{Daemon: daemon, Args: args})
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		if err := allHealthy(ctx, n, gpu, 8); err != nil { // with CDI, devices show once their spec is written
			return "", err
		}
		client, id, closeClient, err := dial(ctx, n)
		if err != nil {
			return "", err
		}
		defer closeClient()
		request := &pluginapi.AllocateRequest{
			ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}}}
		return beside(ctx, client, func() error { _, err := client.Allocate(ctx, request); return err })
	}
}

// allHealthy waits until kubelet holds so many devices of a resource for healthy.
func allHealthy(ctx context.Context, n *node.Node, resource string, want int) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return n.WaitFor(ctx, func() bool { return n.Allocatable(resource) == want })
}

func manyReplicasMemory(ctx context.Context, daemon string) (_ string, err error) {
	n, err := withFile(daemon, manyReplicas, "dgx-h100")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.StartDaemon(); err != nil {
		return "", err
	}
	if err := allHealthy(ctx, n, gpu, 8000); err != nil {
		return "", err
	}
	resident, err := rss(n.Running().Pid)
	return fmt.Sprintf("%.1f MB", float64(resident)/1e6), err
}

// withFile returns a node whose daemon, not started yet, has a configuration file: config.yaml in
// the node's folder.
func withFile(daemon, text, profile string) (*node.Node, error) {
	n, err := node.Open(node.Setup{Daemon: daemon, Profile: profile, Version: standin.V137})
	if err != nil {
		return nil, err
	}
	n.Args = append(n.Args, "--config-file", n.Path("config.yaml"))
	if err := os.WriteFile(n.Path("config.yaml"), []byte(text), 0o600); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// reload counts the lists that kubelet receives when the file changes one of ten resources.
func reload(ctx context.Context, daemon string) (_ string, err error) {
	tenResources := func(replicas int) string {
		var b strings.Builder
		b.WriteString("version: v1\nselectors:\n")
		for i := range 10 {
			fmt.Fprintf(&b, "- {indices: [\"%d\"], rename: gpu-%d", i, i)
			if i == 3 {
				fmt.Fprintf(&b, ", replicas: %d", replicas)
			}
			b.WriteString("}\n")
		}
		b.WriteString("- {indices: [\"10\", \"11\", \"12\", \"13\", \"14\", \"15\"], exclude: true}\n")
		return b.String()
	}
	n, err := withFile(daemon, tenResources(2), "dgx-2")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.StartDaemon(); err != nil {
		return "", err
	}
	for i := range 10 {
		listed, cancel := context.WithTimeout(ctx, patience)
		_, err := n.Next(listed, 0, standin.Is(standin.Listed, fmt.Sprintf("nvidia.com/gpu-%d", i)))
		cancel()
		if err != nil {
			return "", fmt.Errorf("gpu-%d: %w; the daemon's log ends with:\n%s", i, err, n.Logged())
		}
	}
	mark := n.Mark()
	if err := os.WriteFile(n.Path("config.yaml"), []byte(tenResources(4)), 0o600); err != nil {
		return "", err
	}
	if err := n.Running().Signal(syscall.SIGHUP); err != nil {
		return "", err
	}
	if err := allHealthy(ctx, n, "nvidia.com/gpu-3", 4); err != nil {
		return "", err
	}
	select { // whatever else the reload sends comes with it
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
	lists, others := 0, 0
	for _, e := range n.Events(mark) {
		if e.Kind == standin.Listed {
			lists++
			continue
		}
		others++
	}
	return fmt.Sprintf("%d list, %d other events at kubelet", lists, others), nil
}
