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

// The time slices of GPUs outlive claims and processes. Before a time slice is set, a mark
// file is written. The mark is removed after the default is set again. So a claim that
// needs the default detects a time slice of an earlier claim, and a mark without a claim
// tells the daemon to reset the GPU. The mark contains the boot ID, because a restart of
// the node resets all GPUs.

const sliceSuffix = ".timeslice"

// setSlices sets the time slices of a claim on its GPUs, even if they were set before: the
// process that set them may have been killed.
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
			path := c.store.path(d.GPU, sliceSuffix)
			if err = statefile.Write(path, []byte(c.options.BootID), 0o600, nil); err == nil {
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

// resetSlice sets a GPU back to the default time slice if its time slice differs. The
// caller has the lock of the GPU.
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

// slicedGPUs returns the UUIDs of the GPUs with a time slice other than the default.
func (c *Claims) slicedGPUs() (gpus []string) {
	for _, name := range names(c.store.folder()) {
		if gpu, is := strings.CutSuffix(name, sliceSuffix); is {
			gpus = append(gpus, gpu)
		}
	}
	return gpus
}

// resetSlices resets the GPUs whose time slice no claim needs. Run retries a GPU that
// fails.
func (c *Claims) resetSlices(ctx context.Context, gpus []string) {
	for _, gpu := range gpus {
		if err := c.resetUnneeded(ctx, gpu); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Cannot reset the time slice of a GPU", "gpu", gpu, "reason", err.Error())
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

// setsTimeSlice reports whether a claim has GPUs with its own time slice.
func (r record) setsTimeSlice() bool {
	return slices.ContainsFunc(r.Devices, func(d recordDevice) bool { return d.Interval != 0 })
}
