package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var registrationFigures = []figure{
	{"process start → Register received, 20 starts", "under 50 ms", startToRegister},
	{"the same with metrics, in turn with another build", "median within 1.2 × the other", startBeside},
	{"kubelet.sock back → first full list, 100 restarts", "median under 10 ms, worst under 250 ms, once each",
		restartToList},
	{"stream dropped → full list, 300 rounds, rules of 1.36", "worst under 150 ms", dropToList(standin.V136)},
	{"stream dropped → full list, 300 rounds, rules of 1.37", "worst under 150 ms", dropToList(standin.V137)},
}

func startToRegister(ctx context.Context, daemon string) (string, error) {
	var took []time.Duration
	for range 20 {
		after, err := startOnce(ctx, daemon)
		if err != nil {
			return "", err
		}
		took = append(took, after)
	}
	return spread(took), nil
}

// startOnce returns how long it took from the start of a daemon until it registered.
func startOnce(ctx context.Context, daemon string, args ...string) (time.Duration, error) {
	n, err := node.Open(node.Setup{Daemon: daemon, Profile: "dgx-h100", Version: standin.V137, Args: args})
	if err != nil {
		return 0, err
	}
	return untilRegistering(ctx, n)
}

// untilRegistering starts the daemon of a node, returns how long it took until it registered, and
// closes the node.
func untilRegistering(ctx context.Context, n *node.Node) (time.Duration, error) {
	began := time.Now()
	err := n.StartDaemon()
	var event standin.Event
	if err == nil {
		event, err = next(ctx, n, 0, standin.Registering)
	}
	return event.Time.Sub(began), errors.Join(err, n.Close())
}

// besideBuild is the binary of another build of the daemon, without metrics; empty for the same one
// with metrics off.
var besideBuild string

// startBeside compares starts with metrics with those of another build without.
func startBeside(ctx context.Context, daemon string) (string, error) {
	at, err := loopback.Free(ctx)
	if err != nil {
		return "", err
	}
	var with, without []time.Duration
	for range 40 {
		after, err := startOnce(ctx, daemon, "--metrics-address", at)
		if err != nil {
			return "", err
		}
		with = append(with, after)
		if after, err = startOnce(ctx, cmp.Or(besideBuild, daemon)); err != nil {
			return "", err
		}
		without = append(without, after)
	}
	slices.Sort(with)
	slices.Sort(without)
	a, b := with[len(with)/2], without[len(without)/2]
	return fmt.Sprintf("median %s, the other %s: %.2f ×", ms(a), ms(b), float64(a)/float64(b)), nil
}

func restartToList(ctx context.Context, daemon string) (_ string, err error) {
	n, err := registered(ctx, node.Setup{Daemon: daemon})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	var took []time.Duration
	for range 100 {
		n.Stop()
		mark := n.Mark()
		if err := n.Resume(); err != nil {
			return "", err
		}
		back, err := n.Next(ctx, mark, standin.Is(standin.Started, ""))
		if err != nil {
			return "", err
		}
		listed, err := next(ctx, n, mark, standin.Listed)
		if err != nil {
			return "", err
		}
		if len(listed.Devices) != 8 {
			return "", fmt.Errorf("the first list has %d devices", len(listed.Devices))
		}
		took = append(took, listed.Time.Sub(back.Time))
	}
	registrations := 0
	for _, e := range n.Events(0) {
		if e.Kind == standin.Registering {
			registrations++
		}
	}
	return fmt.Sprintf("%s, %d registrations", spread(took), registrations-1), nil
}

func dropToList(v standin.Version) func(context.Context, string) (string, error) {
	return func(ctx context.Context, daemon string) (_ string, err error) {
		n, err := registered(ctx, node.Setup{Daemon: daemon, Version: v})
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		var took []time.Duration
		for round := range 300 {
			mark := n.Mark()
			began := time.Now()
			n.DropStream(gpu)
			listed, err := next(ctx, n, mark, standin.Listed)
			if err != nil {
				return "", err
			}
			took = append(took, listed.Time.Sub(began))
			pod := fmt.Sprint("pod-", round)
			if _, err := n.Admit(ctx, standin.Container{Pod: pod, Name: "main", Resource: gpu, Count: 1}); err != nil {
				return "", fmt.Errorf("round %d: %w", round, err)
			}
			n.Remove(pod)
		}
		return spread(took), nil
	}
}
