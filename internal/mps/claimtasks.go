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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps/exclusive"
)

// adjustClaims starts and stops the daemons of claims. No daemon waits for another.
func (s *Supervisor) adjustClaims(ctx context.Context, gpus *exclusive.GPUs, tasks map[string]*task) {
	wanted, ending, err := list(s.root)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read which MPS control daemons the claims request",
			"reason", err.Error())
		return
	}
	for id, t := range tasks {
		if _, still := wanted[id]; !still && !t.isEnding {
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

// end starts a task that removes a released claim. Either this process has already stopped the
// daemon of the claim, or an earlier process left the daemon behind.
func (s *Supervisor) end(ctx context.Context, gpus *exclusive.GPUs, g Group, path string) *task {
	ctx, cancel := context.WithCancel(ctx)
	t := &task{cancel: cancel, done: make(chan struct{}), isEnding: true}
	d := &daemon{control: control{dir: path}, group: g, gpus: gpus}
	go func() {
		defer close(t.done)
		// Run returns only the error of ctx.
		_ = supervise.Run(ctx, backoff, func(ctx context.Context) error {
			if _, err := os.Lstat(path + endingSuffix); errors.Is(err, fs.ErrNotExist) {
				cancel() // everything is removed, and a new claim may use the ID
				return nil
			}
			if _, err := os.Lstat(path); err == nil {
				if err := d.endLeftover(ctx); err != nil {
					return err
				}
				if err := gpus.Restore(ctx, g.Resource, g.exclusive()); err != nil {
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

// removeStartedMarks removes the started marks that an earlier process left in the folders of claims,
// because no process watches the daemons of these marks.
func removeStartedMarks(root string) error {
	marks, err := filepath.Glob(filepath.Join(root, claimsFolder, "*", startedMark))
	for _, mark := range marks {
		err = errors.Join(err, statefile.Remove(mark))
	}
	return err
}
