package mps

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
)

// adjustClaims does the same for the daemons of claims. None waits for another one.
func (s *Supervisor) adjustClaims(ctx context.Context, gpus *exclusive, tasks map[string]*task) {
	wanted, ending, err := list(s.root)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read which MPS control daemons claims want", "reason", err.Error())
		return
	}
	for id, t := range tasks {
		if _, still := wanted[id]; !still && !t.ends {
			t.cancel()
		}
		select {
		case <-t.done:
			delete(tasks, id)
		default:
		}
	}
	for id, c := range wanted {
		if tasks[id] == nil && len(c.Devices) > 0 {
			tasks[id] = s.begin(ctx, gpus, c.group(id))
		}
	}
	for id, c := range ending {
		if tasks[id] == nil {
			tasks[id] = s.end(ctx, gpus, c.group(id), filepath.Join(s.root, claimsFolder, id))
		}
	}
}

// end begins a task that removes all of a claim whose daemon is not wanted any more. This process
// has ended the daemon, or an earlier one has left it behind.
func (s *Supervisor) end(ctx context.Context, gpus *exclusive, g Group, path string) *task {
	ctx, cancel := context.WithCancel(ctx)
	t := &task{cancel: cancel, done: make(chan struct{}), ends: true}
	d := &daemon{control: control{dir: path}, group: g, gpus: gpus}
	go func() {
		defer close(t.done)
		// The error is that of the context.
		_ = supervise.Run(ctx, backoff, func(ctx context.Context) error {
			if _, err := os.Lstat(path + endingSuffix); errors.Is(err, fs.ErrNotExist) {
				cancel() // all of it is removed, and it may be wanted anew
				return nil
			}
			if _, err := os.Lstat(path); err == nil {
				if err := d.endLeftover(ctx); err != nil {
					return err
				}
				if err := gpus.restore(ctx, g.Resource, g.exclusive()); err != nil {
					return err
				}
			}
			if err := os.RemoveAll(path); err != nil {
				return err
			}
			return statefile.Remove(path + endingSuffix)
		})
	}()
	return t
}

// forgetStarted removes the marks of daemons of claims that an earlier process has left: nobody
// watches these daemons.
func forgetStarted(root string) error {
	marks, err := filepath.Glob(filepath.Join(root, claimsFolder, "*", startedMark))
	for _, mark := range marks {
		err = errors.Join(err, statefile.Remove(mark))
	}
	return err
}
