package statefile_test

import (
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// A hanging disk delays no caller longer than the limit. Waiting work of a caller that gave up is
// not done later; hanging work is.
func TestDiskThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := statefile.NewDisk()
		if err := d.Do(t.Context(), time.Second, func() error { return io.EOF }); !errors.Is(err, io.EOF) {
			t.Errorf("work that fails: %v", err)
		}
		hangs, done := make(chan struct{}), false
		began := time.Now()
		if err := d.Do(t.Context(), time.Second, func() error { <-hangs; done = true; return nil }); !errors.Is(err,
			statefile.ErrHangs) {
			t.Errorf("work that hangs: %v", err)
		}
		if err := d.Do(t.Context(), time.Second,
			func() error { t.Error("done beside work that hangs"); return nil }); !errors.Is(err, statefile.ErrHangs) {
			t.Errorf("work after work that hangs: %v", err)
		}
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("two limits of a second took %v", took)
		}
		close(hangs)
		if err := d.Do(t.Context(), time.Second, func() error { return nil }); err != nil || !done {
			t.Errorf("work after that: %v; the work that hung is done: %v", err, done)
		}
	})
}
