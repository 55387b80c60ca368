package main

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

func (s *stage) restartKubelet(ctx context.Context) error {
	down := s.between(0, 3*time.Second)
	away := s.random.IntN(4) == 0
	wiped := s.random.IntN(8) == 0
	s.note("kubelet is down for %s; the API server is away: %t; its folder is emptied if there is no pod: %t", short(down),
		away, wiped)
	s.disturb()
	defer s.settle(2 * soon)
	s.Stop()
	pause(ctx, down)
	s.mu.Lock()
	wiped = wiped && len(s.pods) == 0
	s.mu.Unlock()
	if wiped {
		if err := s.ReplaceDirectory(); err != nil {
			return err
		}
	}
	if away {
		s.SetPodsKnown(false)
		defer s.SetPodsKnown(true)
	}
	if err := s.Resume(); err != nil {
		return err
	}
	if away {
		pause(ctx, s.between(0, 10*time.Second))
	}
	return nil
}

func (s *stage) recreateSocket(context.Context) error {
	s.note("kubelet's socket is created again")
	s.disturb()
	defer s.settle(2 * soon)
	return s.RecreateSocket()
}

func (s *stage) dropStreams(context.Context) error {
	s.note("streams break")
	s.disturb()
	defer s.settle(soon)
	for resource := range s.Resources() {
		s.DropStream(resource)
	}
	return nil
}

func (s *stage) refuseRegister(ctx context.Context) error {
	modes := []standin.RegisterMode{standin.RegisterRefuses, standin.RegisterHangs, standin.RegisterConnects,
		standin.RegisterHangsUp}
	mode := modes[s.random.IntN(len(modes))]
	s.note("Register %v", mode)
	s.disturb()
	defer s.settle(6 * soon)
	s.SetRegister(mode)
	for resource := range s.Resources() {
		s.DropStream(resource)
	}
	pause(ctx, s.between(0, 6*time.Second))
	s.SetRegister(standin.RegisterAnswers)
	return nil
}

func (s *stage) freeze(ctx context.Context) error {
	d := s.between(200*time.Millisecond, 4*time.Second)
	s.note("the daemon is stopped for %s", short(d))
	s.disturb()
	defer s.settle(2 * soon)
	s.signal(syscall.SIGSTOP)
	defer s.signal(syscall.SIGCONT)
	pause(ctx, d)
	return nil
}

// first returns the daemon that is there when only one is.
func (s *stage) first() *node.Node { return s.running()[0] }

func (s *stage) secondDaemon(ctx context.Context) error {
	s.note("a second daemon comes, and is killed")
	s.disturb()
	defer s.settle(5 * soon)
	second, err := s.startDaemon(ctx)
	if err != nil {
		return err
	}
	pause(ctx, s.between(0, 5*time.Second))
	return s.stopDaemon(second, []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[s.random.IntN(2)])
}

func (s *stage) rollOut(ctx context.Context) error {
	old := s.first()
	signal := []syscall.Signal{syscall.SIGTERM, syscall.SIGTERM, syscall.SIGKILL}[s.random.IntN(3)]
	s.note("the daemon is rolled out; the old one ends by %v", signal)
	s.disturb()
	defer s.settle(5 * soon)
	second, err := s.startDaemon(ctx)
	if err != nil {
		return err
	}
	s.awaitReady(ctx, second)
	pause(ctx, s.between(0, 3*time.Second))
	return s.stopDaemon(old, signal)
}

// awaitReady waits until a daemon is ready.
func (s *stage) awaitReady(ctx context.Context, n *node.Node) {
	err := node.Poll(ctx, 30*time.Second*s.options.slack, nil, func(ctx context.Context) error { return s.ready(ctx, n) })
	if err != nil && ctx.Err() == nil {
		s.violate("a daemon that was started is not ready: %v", err)
	}
}

func (s *stage) ready(ctx context.Context, n *node.Node) error {
	var answer struct {
		Ready  bool
		Reason string
	}
	if err := s.callOne(ctx, n, "ready", struct{}{}, &answer); err != nil {
		return err
	}
	if !answer.Ready {
		return errors.New(answer.Reason)
	}
	return nil
}

func (s *stage) restartDaemon(ctx context.Context) error {
	signal := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[s.random.IntN(2)]
	down := s.between(0, 3*time.Second)
	s.note("the daemon ends by %v, and starts after %s", signal, short(down))
	s.disturb()
	defer s.settle(5 * soon)
	if err := s.stopDaemon(s.first(), signal); err != nil {
		return err
	}
	pause(ctx, down)
	n, err := s.startDaemon(ctx)
	if err != nil {
		return err
	}
	s.awaitReady(ctx, n)
	return nil
}

// replaceDriver installs another driver; the daemon puts a new program of itself in its place.
func (s *stage) replaceDriver(ctx context.Context) error {
	if s.hanging() {
		return nil
	}
	s.note("the driver is replaced")
	s.disturb()
	defer s.settle(5 * soon)
	if err := s.writeProfile(); err != nil {
		return err
	}
	mark := s.Mark()
	if err := s.call(ctx, "simulate.inject", simulator.Fault{Kind: simulator.KindDriver,
		Driver: "580.105.08"}); err != nil {
		return err
	}
	// A process makes place for another when it is ten seconds old, and at its next look.
	waiting, cancel := context.WithTimeout(ctx, 60*time.Second*s.options.slack)
	defer cancel()
	if _, err := s.Next(waiting, mark, func(e standin.Event) bool { return e.Kind == standin.Registered }); err != nil &&
		ctx.Err() == nil {
		s.violate("the driver was replaced, and nothing was registered again")
	}
	s.awaitReady(ctx, s.first())
	return nil
}
