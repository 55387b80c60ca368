package daemon

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// doctor is the command that finds out why a driver cannot be used.
const doctor = "gpu-device-plugin doctor"

// CheckFirstLook returns an error if the first scan of the node fails and the
// configuration makes the daemon end then. A library that does not fit the kernel module
// ends the daemon only if a new container may have a newer library: otherwise every
// restart finds the same until the node is restarted.
func CheckFirstLook(ctx context.Context, m *monitor.Monitor, configs *feed.Feed[config.Config]) error {
	err := m.First(ctx)
	if err == nil || ctx.Err() != nil {
		return nil
	}
	waits := errors.Is(err, inventory.ErrDriverMismatch) && !errors.Is(err, inventory.ErrOldLibrary)
	if configs.Value().FailOnInitError && !waits {
		// Not wrapped: the error must not start a new process, which would find the same library.
		return fmt.Errorf("%s; to find the cause, run: %s; to wait for the driver instead, use "+
			"--fail-on-init-error=false", err.Error(), doctor)
	}
	klog.FromContext(ctx).Info("Waiting for the driver; no GPU is offered until the driver is ready",
		"reason", err.Error(), "diagnose", doctor)
	return nil
}

// A policyFollower applies a health policy, like a monitor.
type policyFollower interface {
	Apply(ctx context.Context, p health.Policy) error
}

// FollowHealth applies the health policy of every Config to the monitor. It returns nil
// when ctx ends.
func FollowHealth(ctx context.Context, m policyFollower, configs *feed.Feed[config.Config]) error {
	var inForce *health.Policy
	for {
		c, changed := configs.Latest()
		if inForce == nil || !reflect.DeepEqual(c.Health, *inForce) {
			if err := m.Apply(ctx, c.Health); err != nil {
				return err
			}
			inForce = &c.Health
		}
		if !feed.WaitAny(ctx, changed) {
			return nil
		}
	}
}

// A process runs for a minimum time before a new process replaces it: while a driver is
// being replaced, every new process finds the same.
const (
	minUptime = 10 * time.Second
	// minUptimeUseless is the minimum time for a process whose library never fitted.
	minUptimeUseless = time.Minute
)

// FollowDriver returns an error if only a new process can talk to the driver. The error
// wraps inventory.ErrDriverReplaced. FollowDriver returns nil when ctx ends.
func FollowDriver(ctx context.Context, m *monitor.Monitor) error {
	long, veryLong := time.After(minUptime), time.After(minUptimeUseless)
	for {
		snapshot, snapshotChanged := m.Snapshots().Latest()
		worked, err := replaced(ctx, m, snapshot)
		var due <-chan time.Time
		switch {
		case err == nil:
		case worked || !errors.Is(err, inventory.ErrDriverMismatch):
			due = long
		default:
			due = veryLong
		}
		select {
		case <-ctx.Done():
			return nil
		case <-due:
			return err
		case <-snapshotChanged:
		}
	}
}

// replaced returns the error of the last scan if a new process may help, and whether the
// driver ever worked for this process. A new process cannot help if the library on disk
// does not fit the kernel module either.
func replaced(ctx context.Context, m *monitor.Monitor, s inventory.Snapshot) (worked bool, err error) {
	if s.Stale == "" {
		return true, nil
	}
	status, err := m.Status(ctx)
	switch {
	// the monitor cannot be reached when the daemon ends
	case err != nil || !errors.Is(status.Err, inventory.ErrDriverReplaced):
		return false, nil
	case errors.Is(status.Err, inventory.ErrDriverMismatch) && !errors.Is(status.Err, inventory.ErrOldLibrary):
		return false, nil
	}
	return !status.Looked.IsZero(), status.Err
}

// driverMismatch says that the driver's files do not fit the kernel module, and how to fix
// the mismatch; empty if they fit.
func driverMismatch(seen monitor.Status) string {
	if errors.Is(seen.Err, inventory.ErrDriverMismatch) {
		return seen.Err.Error()
	}
	return seen.Snapshot.Driver.Mismatch()
}
