package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var driverFigures = []figure{
	{"start → 7 of 8 GPUs Healthy, a call of one hangs", "within 20 s", hangingStart},
	{"start → 8 of 8 Healthy, each call takes 20 ms", "within 5 s, and Healthy throughout 20 s", slowStart},
	{"XID 48 → list at kubelet, a call of another GPU hangs", "as without it, under 10 ms", xidBesideHang},
	{"SIGTERM → exit, a silent connection to the plugin", "under 2 s", endBesideSilence},
}

// hang is the fault that a call on GPU 3 does not return.
var hang = simulator.Fault{Kind: simulator.KindHang, GPU: "3", Call: "DeviceGetFieldValues"}

// faulty returns a node, whose daemon is not started, with a machine to which faults have happened.
func faulty(daemon string, faults ...simulator.Fault) (*node.Node, error) {
	profile, err := simulator.Load("dgx-h100")
	if err != nil {
		return nil, err
	}
	profile.Faults = faults
	text, err := yaml.Marshal(profile)
	if err != nil {
		return nil, err
	}
	n, err := node.Open(node.Setup{Daemon: daemon, Version: standin.V137})
	if err != nil {
		return nil, err
	}
	n.Profile = n.Path("machine.yaml")
	if err := os.WriteFile(n.Profile, text, 0o600); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// healthyAfter starts the daemon and returns how long it took until kubelet had so many Healthy
// GPUs.
func healthyAfter(ctx context.Context, n *node.Node, count int) (time.Duration, error) {
	const within = time.Minute
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	began := time.Now()
	if err := n.StartDaemon(); err != nil {
		return 0, err
	}
	if err := n.WaitFor(ctx, func() bool { return n.Allocatable(gpu) == count }); err != nil {
		return 0, fmt.Errorf("kubelet has %d Healthy GPUs after %s: %w", n.Allocatable(gpu), within, err)
	}
	return time.Since(began), nil
}

func hangingStart(ctx context.Context, daemon string) (_ string, err error) {
	n, err := faulty(daemon, hang)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	took, err := healthyAfter(ctx, n, 7)
	return ms(took), err
}

func slowStart(ctx context.Context, daemon string) (_ string, err error) {
	const throughout = 20 * time.Second
	n, err := faulty(daemon, simulator.Fault{Kind: simulator.KindSlow, Delay: "20ms"})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	took, err := healthyAfter(ctx, n, 8)
	if err != nil {
		return "", err
	}
	watched, cancel := context.WithTimeout(ctx, throughout)
	defer cancel()
	stayed := "Healthy throughout"
	if n.WaitFor(watched, func() bool { return n.Allocatable(gpu) != 8 }) == nil {
		stayed = fmt.Sprintf("but %d Healthy then", n.Allocatable(gpu))
	}
	return ms(took) + ", " + stayed, nil
}

func xidBesideHang(ctx context.Context, daemon string) (_ string, err error) {
	n, err := faulty(daemon, hang)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if _, err := healthyAfter(ctx, n, 7); err != nil {
		return "", err
	}
	var took []time.Duration
	for _, index := range []string{"0", "1", "2", "4", "5", "6", "7"} {
		after, err := struck(ctx, n, simulator.Fault{Kind: simulator.KindXID, GPU: index, XID: 48})
		if err != nil {
			return "", err
		}
		took = append(took, after)
	}
	return spread(took), nil
}

func endBesideSilence(ctx context.Context, daemon string) (_ string, err error) {
	n, err := registered(ctx, node.Setup{Daemon: daemon})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	event, err := next(ctx, n, 0, standin.Registered)
	if err != nil {
		return "", err
	}
	silent, err := net.Dial("unix", event.Endpoint)
	if err != nil {
		return "", err
	}
	defer silent.Close()
	began := time.Now()
	if err := n.Running().Signal(syscall.SIGTERM); err != nil {
		return "", err
	}
	select {
	case <-n.Running().Ended():
		return ms(time.Since(began)), nil
	case <-time.After(3 * time.Minute):
		return "", errors.New("the daemon did not end within 3 minutes")
	}
}
