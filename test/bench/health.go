package main

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var healthFigures = []figure{
	{"XID 48 → list at kubelet, 56 rounds", "under 10 ms", xidToList(48)},
	{"XID 79 → list at kubelet, 56 rounds", "under 10 ms", xidToList(79)},
	{"XID 95 → list at kubelet, 56 rounds", "under 10 ms", xidToList(95)},
	{"XID 119 (its verdict is asked for) → list", "verdict poll + 10 ms, never over 5 s", xidToList(119)},
	{"cure of XID 48 → Healthy at kubelet", "within 2 fast polls (10 s)", untilHealthy},
	{"lost GPU, no event → list at kubelet", "within a slow poll (30 s)", lostWithoutEvent},
	{"GPU unplugged → list at kubelet", "within a second", hotPlug(simulator.KindRemove)},
	{"GPU plugged in again → list at kubelet", "within a second", hotPlug(simulator.KindAdd)},
	{"polling of 16 GPUs and events, CPU over 40 s", "under 2 ms a second", pollingCost},
	{"allocations of one look at 16 GPUs, scan and readings", "close to none", lookAllocations},
}

// struck injects a fault and returns when it was sent and when kubelet received the next list.
func struck(ctx context.Context, n *node.Node, f simulator.Fault) (time.Duration, error) {
	mark := n.Mark()
	began := time.Now()
	if err := control.Call(ctx, n.ControlSocket(), "simulate.inject", f, nil); err != nil {
		return 0, err
	}
	listed, err := nextList(ctx, n, mark, time.Minute)
	return listed.Sub(began), err
}

// xidToList measures from before the fault is sent to the daemon until the list that follows is
// received: the control socket's share is in the figure.
func xidToList(xid uint64) func(context.Context, string) (string, error) {
	return func(ctx context.Context, daemon string) (_ string, err error) {
		var took []time.Duration
		for range 7 { // a GPU that was struck stays Unhealthy for seconds, so each node serves for 8 rounds
			n, err := registered(ctx, node.Setup{Daemon: daemon})
			if err != nil {
				return "", err
			}
			for index := range 8 {
				var after time.Duration
				if after, err = struck(ctx, n, simulator.Fault{Kind: simulator.KindXID, GPU: fmt.Sprint(index),
					XID: xid}); err != nil {
					break
				}
				took = append(took, after)
			}
			if err = errors.Join(err, n.Close()); err != nil {
				return "", err
			}
		}
		return spread(took), nil
	}
}

func untilHealthy(ctx context.Context, daemon string) (_ string, err error) {
	n, err := registered(ctx, node.Setup{Daemon: daemon})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	var took []time.Duration
	for index := range 3 {
		if _, err := struck(ctx, n, simulator.Fault{Kind: simulator.KindXID, GPU: fmt.Sprint(index), XID: 48}); err != nil {
			return "", err
		}
		recovery, err := struck(ctx, n, simulator.Fault{Kind: simulator.KindRestore, GPU: fmt.Sprint(index)})
		if err != nil {
			return "", err
		}
		took = append(took, recovery)
	}
	return spread(took), nil
}

func lostWithoutEvent(ctx context.Context, daemon string) (_ string, err error) {
	n, err := registered(ctx, node.Setup{Daemon: daemon})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	took, err := struck(ctx, n, simulator.Fault{Kind: simulator.KindLost, GPU: "5"})
	return ms(took), err
}

// hotPlug unplugs a GPU and plugs it in again, and returns how long the one that is asked for took.
func hotPlug(kind simulator.Kind) func(context.Context, string) (string, error) {
	return func(ctx context.Context, daemon string) (_ string, err error) {
		n, err := registered(ctx, node.Setup{Daemon: daemon})
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		took, err := struck(ctx, n, simulator.Fault{Kind: simulator.KindRemove, GPU: "5"})
		if err == nil && kind == simulator.KindAdd {
			took, err = struck(ctx, n, simulator.Fault{Kind: kind, GPU: "5"})
		}
		return ms(took), err
	}
}

func pollingCost(ctx context.Context, daemon string) (string, error) {
	return idling(ctx, node.Setup{Daemon: daemon, Profile: "dgx-2"}, 40*time.Second) // at least one slow poll
}

func lookAllocations(ctx context.Context, _ string) (_ string, err error) {
	profile, err := simulator.Load("dgx-2")
	if err != nil {
		return "", err
	}
	n := simulator.New(profile)
	defer n.Close()
	session, err := nvidia.New(nvidia.Options{Library: n.NVML(), Root: n.Root()}).Open(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, session.Close(ctx)) }()
	result := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			snapshot, err := session.Scan(ctx)
			if err != nil {
				b.Fatal(err)
			}
			for _, g := range snapshot.GPUs {
				if _, err := session.Read(ctx, g.UUID); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
	return fmt.Sprintf("%d allocations, %.1f kB, %.3f ms, the simulator's included",
		result.AllocsPerOp(), float64(result.AllocedBytesPerOp())/1e3, float64(result.NsPerOp())/1e6), nil
}
