// Package daemon contains the long-running programs: the daemon that serves the kubelet,
// the runner of the MPS control daemons, and gpu-feature-discovery. It creates the real
// adapters and owners, and joins them to tasks in two groups. Observation finds out the
// state of the node and the settings of its operator, and outputs act on the results.
// Tasks that only join others are also here: the health policy, the replacement of the
// driver, the checks before a container starts, and the calls at the control socket.
//
// Package cli runs the programs, and package cluster adds tasks.
package daemon

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
)

// A Task is an activity that lives as long as the daemon.
type Task struct {
	Name string
	// Run blocks until ctx ends, and then returns nil. An error ends the daemon. A
	// finished task may return nil earlier.
	Run func(ctx context.Context) error
	// Lead is true if the task runs only while this process leads on the node: ctx ends with the
	// lead, and Run is called again when the process leads again. Ready counts only meanwhile.
	Lead bool
	// Ready reports whether the task is ready, with a reason if there is something to say.
	// It may wait until ctx ends. A task without Ready is always ready.
	Ready func(ctx context.Context) (ready bool, reason string)
	// Alive returns an error if the task is stuck: if its loop makes no round before ctx
	// ends. A task that waits for the driver or for the kubelet is not stuck. A task
	// without Alive is never stuck.
	Alive func(ctx context.Context) error
}

// RunTasks runs tasks until ctx ends, and then returns nil; it returns the error of the
// first failed task. Outputs end first, even after a failed observation, so that they can
// still use the observation while they end. Tasks under the lead are outputs.
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
		// A daemon without outputs lives as long as any other.
		servers.Go(func() error {
			<-serving.Done()
			return nil
		})
		return servers.Wait()
	})
	return observers.Wait()
}

// run runs one task. It ignores errors after the end of ctx.
func run(ctx context.Context, task Task) error {
	if err := task.Run(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("%s: %w", task.Name, err)
	}
	return nil
}
