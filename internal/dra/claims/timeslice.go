package claims

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// The time slices of GPUs outlive claims and processes. Before one is set, a mark says so, and it
// stays until the default is set again. So a claim that wants the default finds out that an earlier
// one left another, and whoever finds a mark that no claim needs sets the GPU back. The mark has
// the boot ID: a restart of the node sets all GPUs back.

const sliceSuffix = ".timeslice"

// setSlices sets the time slices that a claim wants on its GPUs, also if they have been set for it
// before: the process that did so may have been killed.
func (c *Claims) setSlices(ctx context.Context, locks *heldLocks, r record) error {
	needed := func(d recordDevice) bool {
		_, err := os.Lstat(c.store.path(d.GPU, sliceSuffix))
		return !d.AdminAccess && (d.Interval != 0 || err == nil)
	}
	if !slices.ContainsFunc(r.Devices, needed) {
		return nil
	}
	if err := locks.gpus(ctx, r.gpus()); err != nil {
		return causedError{CauseLate, err}
	}
	for _, d := range r.Devices {
		var err error
		switch {
		case d.AdminAccess:
		case d.Interval == 0:
			err = c.resetSlice(ctx, d.GPU)
		default:
			if err = c.mayChange(); err != nil {
				break
			}
			c.store.step()
			if err = statefile.Write(c.store.path(d.GPU, sliceSuffix), []byte(c.options.BootID), 0o600, nil); err == nil {
				c.store.step()
				err = c.options.SetTimeSlice(ctx, d.GPU, d.Interval)
			}
		}
		if err != nil {
			return causedError{CauseDriver, err}
		}
	}
	return nil
}

// resetSlice sets a GPU back to the default if it has another time slice. The caller has the lock
// of the GPU.
func (c *Claims) resetSlice(ctx context.Context, gpu string) error {
	path := c.store.path(gpu, sliceSuffix)
	boot, err := statefile.Read(path, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if former := len(boot) > 0 && c.options.BootID != "" && string(boot) != c.options.BootID; !former &&
		c.options.SetTimeSlice != nil {
		if err := c.mayChange(); err != nil {
			return err
		}
		if err := c.options.SetTimeSlice(ctx, gpu, 0); err != nil {
			return err
		}
	}
	c.store.step()
	return os.Remove(path)
}

// sliced returns the UUIDs of the GPUs that have another time slice than the default.
func (c *Claims) slicedGPUs() (gpus []string) {
	for _, name := range names(c.store.folder()) {
		if gpu, is := strings.CutSuffix(name, sliceSuffix); is {
			gpus = append(gpus, gpu)
		}
	}
	return gpus
}

// resetSlices sets those GPUs back whose time slice no claim needs any more. A GPU for which that
// fails is tried again by Run.
func (c *Claims) resetSlices(ctx context.Context, gpus []string) {
	for _, gpu := range gpus {
		if err := c.resetUnneeded(ctx, gpu); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Cannot set the time slice of a GPU back", "gpu", gpu, "reason", err.Error())
		}
	}
}

func (c *Claims) resetUnneeded(ctx context.Context, gpu string) error {
	locks := c.locks.beginBriefly()
	defer locks.end()
	if err := locks.gpus(ctx, []string{gpu}); err != nil {
		return err
	}
	for _, r := range c.all() {
		for _, d := range r.Devices {
			if d.GPU == gpu && d.Interval != 0 && !r.beforeRestart(c.options.BootID) {
				return nil
			}
		}
	}
	return c.resetSlice(ctx, gpu)
}

// slices reports whether a claim has GPUs with time slices of its own.
func (r record) setsTimeSlice() bool {
	return slices.ContainsFunc(r.Devices, func(d recordDevice) bool { return d.Interval != 0 })
}
