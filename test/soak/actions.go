package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// An action is something that happens to a node. It returns an error only if the test itself cannot
// go on.
type action struct {
	name   string
	weight int
	// ending says that it ends the daemon's process, or puts another program in its place.
	ending bool
	do     func(s *stage, ctx context.Context) error
}

func actions() []action {
	return []action{
		{"a GPU falls ill", 40, false, (*stage).fallIll},
		{"a GPU is repaired", 30, false, (*stage).repairOne},
		{"a GPU is unplugged", 7, false, (*stage).unplug},
		{"a GPU is plugged in", 9, false, (*stage).plugIn},
		{"a GPU is divided", 14, false, (*stage).divide},
		{"the configuration changes", 3, false, (*stage).reconfigure},
		{"the configuration is spoiled", 6, false, (*stage).spoil},
		{"SIGHUP", 5, false, (*stage).hangUp},
		{"kubelet restarts", 4, false, (*stage).restartKubelet},
		{"kubelet's socket is created again", 2, false, (*stage).recreateSocket},
		{"streams break", 2, false, (*stage).dropStreams},
		{"Register does not work", 2, false, (*stage).refuseRegister},
		{"quiesce", 2, false, (*stage).quiesce},
		{"the driver is unloaded", 1, false, (*stage).unloadDriver},
		{"the event wait does not work", 3, false, (*stage).breakEvents},
		{"hostile connections", 8, false, (*stage).hostile},
		{"hostile control requests", 8, false, (*stage).hostileControl},
		{"questions", 10, false, (*stage).ask},
		{"scrapes", 20, false, (*stage).scrapes},
		{"the control socket is removed", 2, false, (*stage).removeControlSocket},
		{"a plugin socket is removed", 2, false, (*stage).removePluginSocket},
		{"the daemon is stopped for a while", 2, false, (*stage).freeze},
		{"a second daemon that is killed", 2, false, (*stage).secondDaemon},
		{"the daemon is rolled out", 4, true, (*stage).rollOut},
		{"the daemon restarts", 5, true, (*stage).restartDaemon},
		{"the driver is replaced", 2, true, (*stage).replaceDriver},
	}
}

// pick returns one of the GPUs for which fits holds; nil if there is none.
func (s *stage) pick(fits func(g *gpu) bool) *gpu {
	s.mu.Lock()
	defer s.mu.Unlock()
	var fit []*gpu
	for _, g := range s.gpus {
		if fits(g) {
			fit = append(fit, g)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return fit[s.random.IntN(len(fit))]
}

// between returns a random duration.
func (s *stage) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.random.Int64N(int64(most-least)+1))
}

// hanging reports whether a call hangs.
func (s *stage) hanging() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.gpus, func(g *gpu) bool { return g.problem != nil && g.problem.hangs })
}

func (s *stage) fallIll(ctx context.Context) error {
	hanging := s.hanging()
	g := s.pick(func(g *gpu) bool { return g.problem == nil && !g.removed })
	if g == nil {
		return nil
	}
	var fit []*problem
	for _, a := range problems {
		if !(a.whole && len(g.parts) > 0) && !(a.hangs && hanging) {
			fit = append(fit, a)
		}
	}
	a := fit[s.random.IntN(len(fit))]
	s.note("%v: %s", g, a.name)
	if !a.harmless {
		s.disturb(g)
	}
	s.mu.Lock()
	g.problem, g.since = a, time.Now()
	s.mu.Unlock()
	err := s.inject(ctx, a.on(g)...)
	if !a.harmless {
		s.settle(a.seen, g)
	}
	return err
}

func (s *stage) repairOne(ctx context.Context) error {
	g := s.pick(func(g *gpu) bool { return g.problem != nil && g.problem.hangs })
	if g == nil || s.random.IntN(2) == 0 { // while a call hangs, little can be said of other GPUs
		g = s.pick(func(g *gpu) bool { return g.problem != nil })
	}
	if g == nil {
		return nil
	}
	return s.repair(ctx, g)
}

// repair ends what is wrong with a GPU.
func (s *stage) repair(ctx context.Context, g *gpu) error {
	a := g.problem
	s.note("%v is repaired of: %s", g, a.name)
	changed := []*gpu{g}
	if a.hangs { // what happened to others meanwhile may be found now
		for _, o := range s.gpus {
			if o != g && o.settled.After(g.since) {
				changed = append(changed, o)
			}
		}
	}
	if a.harmless {
		changed = nil
	} else {
		s.disturb(changed...)
	}
	err := s.inject(ctx, simulator.Fault{Kind: simulator.KindRestore, GPU: fmt.Sprint(g.slot)})
	s.mu.Lock()
	g.problem = nil
	s.mu.Unlock()
	if err == nil && a.alone && !s.hanging() {
		err = s.lookAgain(ctx)
	}
	within := recoveryTime
	if a.alone {
		within = 2 * recoveryTime
	}
	if len(changed) > 0 {
		s.settle(within, changed...)
	}
	return err
}

// lookAgain has the daemon ask all GPUs.
func (s *stage) lookAgain(ctx context.Context) error {
	s.disturb()
	defer s.settle(soon)
	quiesce := func(ctx context.Context) error { return s.call(ctx, "quiesce", allocating{true}) }
	if err := node.Poll(ctx, 30*time.Second*s.options.slack, nil, quiesce); err != nil {
		s.violate("quiesce, to have all GPUs asked: %v", err)
	}
	if err := s.call(ctx, "resume", struct{}{}); err != nil {
		s.violate("resume: %v", err)
	}
	return nil
}

// allocating are the arguments of quiesce.
type allocating struct {
	Allocate bool `json:"allocate"`
}

func (s *stage) unplug(ctx context.Context) error {
	g := s.pick(func(g *gpu) bool { return g.problem == nil && !g.removed })
	if g == nil || s.hanging() {
		return nil
	}
	s.note("%v is unplugged", g)
	s.disturb(g)
	s.mu.Lock()
	g.removed = true
	s.mu.Unlock()
	err := s.inject(ctx, simulator.Fault{Kind: simulator.KindRemove, GPU: fmt.Sprint(g.slot)})
	s.settle(soon, g)
	return err
}

func (s *stage) plugIn(ctx context.Context) error {
	g := s.pick(func(g *gpu) bool { return g.removed })
	if g == nil || s.hanging() {
		return nil
	}
	return s.plug(ctx, g)
}

func (s *stage) plug(ctx context.Context, g *gpu) error {
	s.note("%v is plugged in", g)
	s.disturb(g)
	s.mu.Lock()
	g.removed = false
	s.mu.Unlock()
	err := s.inject(ctx, simulator.Fault{Kind: simulator.KindAdd, GPU: fmt.Sprint(g.slot)})
	s.settle(recoveryTime, g)
	return err
}

func (s *stage) divide(ctx context.Context) error {
	g := s.pick(func(g *gpu) bool {
		// a driver divides no MIG device that is in use
		return g.problem == nil && !g.removed && (len(g.parts) == 0 || !s.heldLocked(g))
	})
	if g == nil || s.hanging() {
		return nil
	}
	return s.layOut(ctx, g, layouts[s.random.IntN(len(layouts))])
}

// heldLocked reports whether a pod holds a GPU or a part of it.
func (s *stage) heldLocked(g *gpu) bool {
	for _, pod := range s.pods {
		if slices.ContainsFunc(pod, func(h held) bool { return h.slot == g.slot }) {
			return true
		}
	}
	return false
}

// layOut gives a GPU another layout of MIG devices.
func (s *stage) layOut(ctx context.Context, g *gpu, layout []string) error {
	s.note("%v is divided into %v", g, layout)
	s.disturb(g)
	err := s.inject(ctx, simulator.Fault{Kind: simulator.KindMIG, GPU: fmt.Sprint(g.slot), Profiles: layout})
	s.mu.Lock()
	g.layout, g.parts = layout, s.mirror.List()[g.slot].MIG
	for _, part := range g.parts {
		s.owners[part.UUID] = g.slot
	}
	s.mu.Unlock()
	s.settle(unheld, g)
	return err
}

func (s *stage) quiesce(ctx context.Context) error {
	if s.hanging() {
		return nil
	}
	allocate := s.random.IntN(2) == 0
	s.note("quiesce, allocate: %t", allocate)
	s.disturb()
	defer s.settle(2 * soon)
	if err := s.call(ctx, "quiesce", allocating{allocate}); err != nil {
		s.violate("quiesce: %v", err)
	}
	if !allocate {
		err := node.Poll(ctx, soon*s.options.slack, nil, func(context.Context) error {
			for resource, q := range s.Resources() {
				if q.Allocatable > 0 {
					return fmt.Errorf("%s has %d allocatable devices", resource, q.Allocatable)
				}
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			s.violate("quiesced: %v", err)
		}
	}
	pause(ctx, s.between(0, 3*time.Second))
	if err := s.call(ctx, "resume", struct{}{}); err != nil {
		s.violate("resume: %v", err)
	}
	return nil
}

// repairAll ends everything that is wrong with the machine, but for GPUs that are unplugged.
func (s *stage) repairAll(ctx context.Context) error {
	err := s.inject(ctx, simulator.Fault{Kind: simulator.KindRestore})
	s.mu.Lock()
	for _, g := range s.gpus {
		g.problem = nil
	}
	s.mu.Unlock()
	return err
}

func (s *stage) unloadDriver(ctx context.Context) error {
	if s.hanging() {
		return nil
	}
	away := s.between(0, 18*time.Second)
	s.note("the driver is unloaded for %s", short(away))
	s.disturb()
	defer s.settle(2 * recoveryTime)
	if err := s.inject(ctx, simulator.Fault{Kind: simulator.KindDriver, Driver: "missing"}); err != nil {
		return err
	}
	pause(ctx, away)
	return s.repairAll(ctx)
}

func (s *stage) breakEvents(ctx context.Context) error {
	if s.hanging() {
		return nil
	}
	faults := []simulator.Fault{
		failing("EventSetWait", "UNKNOWN"), failing("EventSetWait", "GPU_IS_LOST"), {Kind: simulator.KindHang,
			Call: "EventSetWait"},
	}
	f := faults[s.random.IntN(len(faults))]
	s.note("the event wait: %s %s", f.Kind, f.Return)
	// Healthy GPUs stay so: what happens to them is found by polls alone, so nothing happens to them.
	if err := s.inject(ctx, f); err != nil {
		return err
	}
	pause(ctx, s.between(time.Second, 15*time.Second))
	ill := s.ill()
	if len(ill) > 0 {
		s.disturb(ill...)
		defer s.settle(3*recoveryTime, ill...)
	}
	return s.repairAll(ctx)
}

// ill returns the GPUs that are not well.
func (s *stage) ill() []*gpu {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ill []*gpu
	for _, g := range s.gpus {
		if !g.good() {
			ill = append(ill, g)
		}
	}
	return ill
}
