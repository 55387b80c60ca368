package faults

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// A fault is what can happen to a node, and what has to come of it.
type fault struct {
	name    string
	machine machine
	// inject is what happens to the node, do what else has to be done, or waited for, for the fault to
	// have happened.
	inject []simulator.Fault
	do     deed
	// place is what happens to the node's files, before the daemon starts or while it runs.
	place deed
	// refused is a pattern of what the daemon logs when it does not start because of the fault.
	refused string
	// run is what comes of it while the daemon runs, start if it happened before the daemon starts;
	// nil if it is not played so.
	run, start *outcome
	// then are the repair and what else is done; their outcomes are the same in both plays.
	then []act
}

// A machine is what the daemon runs on, and how.
type machine struct {
	profile  string   // dgx-h100 if empty
	args     []string // of the daemon
	config   string   // what is in its configuration file; there is none if empty
	replicas int      // how many devices kubelet has for each of the node's; one if 0
	unread   bool     // its standard error is a pipe that nobody reads
	mute     bool     // it starts without its control socket; unmute ends that
}

// An act is something that is done and its outcome.
type act struct {
	deed
	outcome
}

// A deed is something that is done to a node.
type deed struct {
	name string
	do   func(ctx context.Context, s *stage) error
}

// An outcome is what kubelet and the daemon's status have to show.
type outcome struct {
	// within is how long it may take, atOnce if 0; hold is how long it must stay so then.
	within, hold time.Duration
	// bad are the devices that are Unhealthy, by index, and all says that every one is; the others are
	// Healthy.
	bad []string
	all bool
	// gone are devices of the node that kubelet does not have, or GPUs of which it has no MIG device;
	// none says that it has no device.
	gone []string
	none bool
	// leaving says that kubelet has, as Unhealthy, also those devices that the node had before the
	// deed and no longer has.
	leaving bool
	// says are patterns of what the status says then of devices, by index, and of the node, at "".
	says map[string]string
}

const (
	// atOnce is for what an event tells, or a look that an event brings about: milliseconds, and some
	// for a busy machine.
	atOnce = time.Second
	// starting is how long the daemon may take to start and to look at the node.
	starting = 3 * time.Second
	// polled is for what only the next poll can find.
	polled = 6 * time.Second
	// recoveryTime is for two polls of a node that is not well: a recovery must be seen twice.
	recoveryTime = 12 * time.Second
	// reopened is for a driver that did not let itself be opened to be tried again.
	reopened = 17 * time.Second
	// suspicion is longer than a device may be Suspect without a verdict.
	suspicion = 6 * time.Second
)

// What the recurring outcomes are.
var (
	good  = outcome{within: recoveryTime}
	stays = outcome{hold: suspicion}
)

// bad is the outcome in which one device is Unhealthy, for a reason that the status gives.
func bad(within time.Duration, device, says string) *outcome {
	return &outcome{within: within, bad: []string{device}, says: map[string]string{device: says}}
}

// read is an outcome that stays until the GPU's readings were taken, too: a recovery is known by
// what they were before it.
func read(o *outcome) *outcome {
	o.hold = atOnce
	return o
}

// still is the outcome of what repairs nothing.
func still(device, says string) outcome {
	o := *bad(atOnce, device, says)
	o.hold = recoveryTime
	return o
}

// unmoved is the outcome of what is only counted.
func unmoved(says map[string]string) *outcome {
	o := stays
	o.says = says
	return &o
}

// inject is the deed that makes faults happen.
func inject(faults ...simulator.Fault) deed {
	var names []string
	for _, f := range faults {
		names = append(names, nameOf(f))
	}
	return deed{strings.Join(names, ", "), func(ctx context.Context, s *stage) error {
		for _, f := range faults {
			if err := s.call(ctx, "simulate.inject", f, nil); err != nil {
				return err
			}
		}
		return nil
	}}
}

// nameOf names a fault for people, by the words with which it can be injected by hand.
func nameOf(f simulator.Fault) string {
	name := string(f.Kind)
	for _, word := range []string{f.Action, f.Call, f.Return, f.Driver, f.State, f.Event, strings.Join(f.Profiles, "+")} {
		if word != "" {
			name += " " + word
		}
	}
	if f.XID != 0 {
		name += fmt.Sprintf(" %d", f.XID)
	}
	if f.GPU != "" {
		name += " on " + f.GPU
	}
	return name
}

// restored repairs what happened to the GPU on which most of it does, or to the whole node.
var (
	restored    = act{inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"}), good}
	restoredAll = act{inject(simulator.Fault{Kind: simulator.KindRestore}), good}
)

// command is the deed of an operator who runs a command.
func command(args ...string) deed {
	return deed{strings.Join(args, " "), func(ctx context.Context, s *stage) error { return s.Do(ctx, args...) }}
}

// cleared is an operator's word for a device.
func cleared(device string) act { return act{command("health", "clear", "--gpu", device), outcome{}} }

// wait is the deed of doing nothing.
var wait = deed{"time goes by", func(context.Context, *stage) error { return nil }}

// both is the deed of doing one thing, then another.
func both(first, then deed) deed {
	return deed{strings.TrimSpace(first.name + " " + then.name), func(ctx context.Context, s *stage) error {
		if err := first.do(ctx, s); err != nil {
			return err
		}
		return then.do(ctx, s)
	}}
}

// restart is the deed of starting the daemon again on a machine that things have happened to.
func restart(name string, faults ...simulator.Fault) deed {
	return deed{name, func(ctx context.Context, s *stage) error {
		if err := s.StopDaemon(); err != nil {
			return err
		}
		return s.start(ctx, faults)
	}}
}
