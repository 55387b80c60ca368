package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// A driver returns an error, or has no GPU.
type driver struct {
	monitor.Session // for all other methods

	mu  sync.Mutex // guards err
	err error
}

func (d *driver) answer() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

func (d *driver) become(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

func (d *driver) Open(context.Context) (monitor.Session, error) {
	err := d.answer()
	return d, err
}

func (d *driver) Scan(context.Context) (inventory.Snapshot, error) {
	return inventory.Snapshot{}, d.answer()
}

func (d *driver) Next(ctx context.Context) (inventory.Event, error) {
	<-ctx.Done()
	return inventory.Event{}, ctx.Err()
}

func (d *driver) Retry(context.Context) error { return nil }

func (d *driver) Hanging() bool { return false }

func (d *driver) Unwatched() []inventory.LeftOut { return nil }

func (d *driver) Close(context.Context) error { return nil }

// TestReplacementOfTheProcess: another process has another library to talk to the driver, if there
// is one.
func TestReplacementOfTheProcess(t *testing.T) {
	t.Parallel()
	const change = 20 * time.Second
	replaced := fmt.Errorf("%w: its library is another one now", inventory.ErrDriverReplaced)
	for name, tt := range map[string]struct {
		first, then error
		from, to    time.Duration // when the process ends; 0 for never
	}{
		"a driver that stays":                     {nil, nil, 0, 0},
		"a driver that goes away":                 {nil, inventory.ErrNoDriver, 0, 0},
		"a driver that is not there":              {inventory.ErrNoDriver, inventory.ErrNoDriver, 0, 0},
		"a library that was replaced at once":     {replaced, replaced, 10 * time.Second, 10 * time.Second},
		"a module that becomes another one":       {nil, inventory.ErrDriverMismatch, 0, 0},
		"a module that becomes a newer one":       {nil, inventory.ErrOldLibrary, change, change + 30*time.Second},
		"a module that is another one, and stays": {inventory.ErrDriverMismatch, inventory.ErrDriverMismatch, 0, 0},
		"a module that is a newer one, and stays": {inventory.ErrOldLibrary, inventory.ErrOldLibrary, time.Minute,
			time.Minute},
		"a library that is replaced by one that is": {inventory.ErrDriverMismatch, replaced, change, change + 15*time.Second},
		"a module that comes to fit":                {inventory.ErrDriverMismatch, nil, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), klog.Logger{}), 10*time.Minute)
				d := &driver{err: tt.first}
				m := monitor.New(monitor.Options{Driver: d, Policy: health.Default()})
				ended := make(chan error, 1)
				go func() { ended <- m.Run(ctx) }()
				time.AfterFunc(change, func() { d.become(tt.then) })
				start := time.Now()
				err := daemon.FollowDriver(ctx, m)
				switch after := time.Since(start); {
				case tt.to == 0 && err != nil:
					t.Errorf("the process ends after %s: %v", after, err)
				case tt.to != 0 && (!errors.Is(err, inventory.ErrDriverReplaced) || after < tt.from || after > tt.to):
					t.Errorf("after %s: %v, want the end between %s and %s", after, err, tt.from, tt.to)
				}
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
