package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var clusterFigures = []figure{
	{"gpu-node-agent with all on, start → Register, in turn", "medians: within 1.3 × gpu-device-plugin", agentStart},
	{"gpu-node-agent with all on, idle for 20 s, 8 GPUs", "under 50 MB", agentIdle},
	{"the same, with 7 of the GPUs in slices", "under 60 MB", agentOfClaims},
	{"requests to the API server in 20 s, without claims", "one list and one watch of the node; few writes",
		agentRequests},
	{"label nvidia.com/mig.config → success, 8 idle GPUs, with their devices at kubelet", "any within 3 s",
		labelToSuccess},
	{"gpu-node-agent, stripped", "under 30 MB", agentSize},
}

// nodeAgent is the other program of the same build.
func nodeAgent(daemon string) string { return filepath.Join(filepath.Dir(daemon), "gpu-node-agent") }

// withCluster runs take with a stand-in API server that has the node, and the arguments that switch
// all on.
func withCluster(
	ctx context.Context, take func(s *apiserver.Server, args []string) (string, error),
) (_ string, err error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	configs := filepath.Join(dir, "configs")
	if err := errors.Join(os.Mkdir(configs, 0o700), os.WriteFile(filepath.Join(configs, "a"), []byte("version: v1\n"),
		0o600)); err != nil {
		return "", err
	}
	s, err := apiserver.Start(dir)
	if err != nil {
		return "", err
	}
	defer s.Stop()
	if err := s.ChangeNode("node", func(n *corev1.Node) {
		n.Labels = map[string]string{"nvidia.com/device-plugin.config": "a"}
	}); err != nil {
		return "", err
	}
	at, err := loopback.Free(ctx)
	if err != nil {
		return "", err
	}
	return take(s, []string{
		"--kubeconfig", s.Kubeconfig(), "--node-name", "node", "--node-config-dir", configs, "--metrics-address", at,
		"--node-labels=node", "--node-events=pods", "--node-condition", "--node-taint",
	})
}

// agentStart compares starts of both programs, in turn, both with metrics. The node has had a
// configuration before.
func agentStart(ctx context.Context, daemon string) (string, error) {
	at, err := loopback.Free(ctx)
	if err != nil {
		return "", err
	}
	return withCluster(ctx, func(_ *apiserver.Server, args []string) (string, error) {
		var with, without []time.Duration
		var ratios []float64
		for range 40 {
			n, err := node.Open(node.Setup{Daemon: nodeAgent(daemon), Profile: "dgx-h100", Version: standin.V137, Args: args})
			if err != nil {
				return "", err
			}
			err = errors.Join(os.Mkdir(n.Path("state"), 0o700),
				os.WriteFile(n.Path("state/node-config.json"), []byte(`{"version": 1, "file": "a"}`), 0o600))
			if err != nil {
				return "", errors.Join(err, n.Close())
			}
			after, err := untilRegistering(ctx, n)
			if err != nil {
				return "", err
			}
			with = append(with, after)
			if after, err = startOnce(ctx, daemon, "--metrics-address", at); err != nil {
				return "", err
			}
			without = append(without, after)
			// A machine that is busy for a while makes both of a pair slower.
			ratios = append(ratios, float64(with[len(with)-1])/float64(after))
		}
		slices.Sort(with)
		slices.Sort(without)
		slices.Sort(ratios)
		middle := len(ratios) / 2
		return fmt.Sprintf("%s, gpu-device-plugin %s; of the pairs %.2f ×", ms(with[middle]), ms(without[middle]),
			ratios[middle]), nil
	})
}

func agentIdle(ctx context.Context, daemon string) (string, error) {
	return withCluster(ctx, func(_ *apiserver.Server, args []string) (string, error) {
		return idling(ctx, node.Setup{Daemon: nodeAgent(daemon), Args: args}, 20*time.Second)
	})
}

// agentOfClaims is agentIdle on a node of which kubelet and the API server know a driver for
// claims.
func agentOfClaims(ctx context.Context, daemon string) (string, error) {
	return withCluster(ctx, func(s *apiserver.Server, args []string) (string, error) {
		registry := filepath.Join(s.Dir(), "plugins_registry")
		split := []byte("version: v1\ndra: {mode: split, gpus: {indices: [1, 2, 3, 4, 5, 6, 7]}}\n")
		if err := errors.Join(os.Mkdir(registry, 0o700), os.WriteFile(filepath.Join(s.Dir(), "configs", "a"), split,
			0o600)); err != nil {
			return "", err
		}
		kubelet := plugins.Start(plugins.Options{Dir: registry})
		defer kubelet.Stop()
		args = append(args, "--kubelet-root", s.Dir())
		used, err := idling(ctx, node.Setup{Daemon: nodeAgent(daemon), Args: args}, 20*time.Second)
		if err != nil {
			return "", err
		}
		if all := s.Slices(); len(all) != 1 || len(all[0].Spec.Devices) != 7 {
			return "", fmt.Errorf("the API server has %d slices, want one with 7 GPUs", len(all))
		}
		return used, nil
	})
}

// agentRequests counts what an idle daemon asks of the API server, its start included.
func agentRequests(ctx context.Context, daemon string) (string, error) {
	return withCluster(ctx, func(s *apiserver.Server, args []string) (string, error) {
		if _, err := idling(ctx, node.Setup{Daemon: nodeAgent(daemon), Args: args}, 20*time.Second); err != nil {
			return "", err
		}
		reads := 0
		for request, count := range s.Requests() {
			if !request.IsWrite() {
				reads += count
			}
		}
		return fmt.Sprintf("%d reads, %d writes", reads, s.Writes()), nil
	})
}

func agentSize(ctx context.Context, daemon string) (string, error) {
	return size(ctx, nodeAgent(daemon))
}

// labelToSuccess measures how long a node with 8 idle GPUs takes from the label that names a MIG
// layout to the label that says success, with the devices at kubelet.
func labelToSuccess(ctx context.Context, daemon string) (string, error) {
	return withCluster(ctx, func(s *apiserver.Server, args []string) (_ string, err error) {
		n, err := node.Open(node.Setup{
			Daemon: nodeAgent(daemon), Profile: "dgx-h100", Version: standin.V137,
			Args: append(args, "--mig-enabled", "--mig-label", "--mig-strategy=mixed"),
		})
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		if err := n.StartDaemon(); err != nil {
			return "", err
		}
		const whole, third = "nvidia.com/gpu", "nvidia.com/mig-3g.40gb"
		if err := n.WaitFor(ctx, func() bool { return n.Allocatable(whole) == 8 }); err != nil {
			return "", err
		}
		var times []time.Duration
		for i := range 20 {
			layout, resource := "all-balanced", third
			if i%2 == 1 {
				layout, resource = "all-disabled", whole
			}
			began := time.Now()
			if err := s.ChangeNode("node", func(n *corev1.Node) { n.Labels["nvidia.com/mig.config"] = layout }); err != nil {
				return "", err
			}
			if err := n.WaitFor(ctx, func() bool { return n.Allocatable(resource) == 8 }); err != nil {
				return "", err
			}
			for said := ""; said != "success"; {
				object, err := s.Node("node")
				if err != nil {
					return "", err
				}
				said = object.Labels["nvidia.com/mig.config.state"]
				select {
				case <-ctx.Done():
					return "", fmt.Errorf("the node says %q of layout %s: %w", said, layout, ctx.Err())
				case <-time.After(time.Millisecond):
				}
			}
			times = append(times, time.Since(began))
		}
		return spread(times), nil
	})
}
