package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
)

// CheckFirstLook fails when the first look at the node does and the configuration wants the daemon to end then.
func CheckFirstLook(ctx context.Context, m *monitor.Monitor, configs *feed.Feed[config.Config]) error {
	err := m.First(ctx)
	if err == nil || ctx.Err() != nil {
		return nil
	}
	if configs.Value().FailOnInitError {
		// Not wrapped: that the library does not fit the kernel module is no reason for a new process in the place of one that
		// just began. It would find the same, and so would the one after it.
		return fmt.Errorf("%v; use --fail-on-init-error=false to wait for the driver instead", err) //nolint:errorlint // see above
	}
	klog.FromContext(ctx).Info("Waiting for the driver; nothing is offered until it is there", "reason", err.Error())
	return nil
}

// FollowHealth has the monitor judge by the health policy of every Config. It returns nil when ctx ends.
func FollowHealth(ctx context.Context, m *monitor.Monitor, configs *feed.Feed[config.Config]) error {
	var inForce *health.Policy
	for {
		c, changed := configs.Latest()
		if inForce == nil || !reflect.DeepEqual(c.Health, *inForce) {
			if err := m.Apply(ctx, c.Health); err != nil {
				return err
			}
			inForce = &c.Health
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// How long a process lives at least before it makes place for another: while a driver is being replaced, one after the other
// finds that its library and the kernel's module do not fit.
const (
	youth = 10 * time.Second
	// age is how long when that is all that it ever found: only a library that nobody saw come makes another better off.
	age = time.Minute
)

// FollowDriver fails when only a new process can talk to the driver: the error wraps inventory.ErrDriverReplaced. It
// returns nil when ctx ends.
func FollowDriver(ctx context.Context, m *monitor.Monitor) error {
	grown, old := time.After(youth), time.After(age)
	for {
		snapshot, looked := m.Snapshots().Latest()
		worked, err := replaced(ctx, m, snapshot)
		var due <-chan time.Time
		switch {
		case err == nil:
		case worked || !errors.Is(err, inventory.ErrDriverMismatch):
			due = grown
		default:
			due = old
		}
		select {
		case <-ctx.Done():
			return nil
		case <-due:
			return err
		case <-looked:
		}
	}
}

// replaced returns the error of the last look if it says that the driver was replaced under this process, and whether that ever
// worked for it.
func replaced(ctx context.Context, m *monitor.Monitor, s inventory.Snapshot) (worked bool, err error) {
	if s.Stale == "" {
		return true, nil
	}
	status, err := m.Status(ctx)
	if err != nil || !errors.Is(status.Err, inventory.ErrDriverReplaced) {
		return false, nil // the monitor cannot be reached when the daemon ends
	}
	return !status.Looked.IsZero(), status.Err
}
