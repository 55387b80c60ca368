// Package daemon is what runs for long: the daemon that serves kubelet, the control daemons of MPS,
// and gpu-feature-discovery. It builds the real adapters and owners, and joins them to tasks. Tasks
// are in two groups: observation finds out what the node has and what its operator wants; outputs
// act on it. The tasks that only join others are here, too: the health policy, the replacement of
// the driver, the checks before a container starts, the calls at the control socket.
//
// Package cli runs it, and package cluster adds tasks to it.
package daemon

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
)

// A Task is something that lives as long as the daemon.
type Task struct {
	Name string
	// Run blocks until ctx ends, and then returns nil. An error ends the daemon. A task that has no
	// more to do may return nil before.
	Run func(ctx context.Context) error
	// Lead says that the task runs only while this process leads on the node: ctx ends when it does
	// not any more, and Run is called again when it does again. Ready counts only meanwhile.
	Lead bool
	// Ready reports whether the task is ready, with the reason where there is something to say. It may
	// wait until ctx ends. A task without it is always ready.
	Ready func(ctx context.Context) (ready bool, reason string)
	// Alive returns an error if the task is stuck: if its loop makes no round before ctx ends. A task
	// that waits for the driver or for kubelet is not stuck. A task without it is never stuck.
	Alive func(ctx context.Context) error
}

// RunTasks runs tasks until ctx ends, and then returns nil; it returns the error of the first task
// that failed. Outputs end first, also when an observation fails: what they need to end in good
// order is there until then. Tasks under the lead are outputs.
func RunTasks(ctx context.Context, l *lead.Lead, observation, outputs []Task) error {
	observing, stop := context.WithCancel(context.WithoutCancel(ctx))
	serving, end := context.WithCancel(ctx)
	defer end()
	var observers errgroup.Group
	for _, task := range observation {
		observers.Go(func() error {
			err := run(observing, task)
			if err != nil {
				end()
			}
			return err
		})
	}
	observers.Go(func() error {
		defer stop()
		servers, serving := errgroup.WithContext(serving)
		for _, task := range outputs {
			if run := task.Run; task.Lead {
				task.Run = func(ctx context.Context) error { return l.While(ctx, task.Name, run) }
			}
			servers.Go(func() error { return run(serving, task) })
		}
		// A daemon without outputs lives as long as one with them.
		servers.Go(func() error {
			<-serving.Done()
			return nil
		})
		return servers.Wait()
	})
	return observers.Wait()
}

// run runs one task. An error that comes after the end of ctx does not count.
func run(ctx context.Context, task Task) error {
	if err := task.Run(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("%s: %w", task.Name, err)
	}
	return nil
}
