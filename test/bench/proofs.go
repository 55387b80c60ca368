package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// proving calls take with the setup of a node on which CUDA is proven by a stand-in for libcuda.
func proving(ctx context.Context, daemon string, take func(node.Setup) (string, error)) (_ string, err error) {
	root, err := os.MkdirTemp("", "bench-cuda-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	if err := cuda.Build(ctx, root); err != nil {
		return "", err
	}
	return take(node.Setup{Daemon: daemon, Args: []string{"--validate", "--driver-root-ctr-path", root}})
}

func idleProven(ctx context.Context, daemon string) (string, error) {
	return proving(ctx, daemon, func(setup node.Setup) (string, error) { return idling(ctx, setup, 20*time.Second) })
}

// proofs measures how long proofs take by the times that the daemon shows.
func proofs(ctx context.Context, daemon string) (string, error) {
	return proving(ctx, daemon, func(setup node.Setup) (_ string, err error) {
		n, err := registered(ctx, setup)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		s, err := shownOf(ctx, n, func(s status.Status) bool {
			_, waits := s.Waits()
			return !waits && len(s.Steps) > 0
		})
		if err != nil {
			return "", err
		}
		return proofTimes(s), nil
	})
}

// shownOf returns the status of a node once that is as it should be.
func shownOf(ctx context.Context, n *node.Node, as func(status.Status) bool) (s status.Status, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := control.Call(ctx, n.ControlSocket(), "status", nil, &s); err != nil {
			return s, err
		}
		if as(s) {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return s, ctx.Err()
		case <-tick.C:
		}
	}
}

// proofTimes returns the times of a node that is ready.
func proofTimes(s status.Status) string {
	var all []time.Duration
	var memory int64
	for _, d := range s.Validation.Devices {
		all = append(all, time.Duration(d.Milliseconds)*time.Millisecond)
		memory = max(memory, d.MemoryBytes)
	}
	return fmt.Sprintf("%.2f s; a proof %s, %.0f MB", s.Steps[len(s.Steps)-1].Seconds-s.Steps[0].Seconds, spread(all),
		float64(memory)/1e6)
}
