package cudacheck_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
)

// hang makes the rig's disk hang, until the returned function is called.
func (r *rig) hang() (answer func()) {
	if r.disk == nil {
		r.disk = statefile.NewDisk()
	}
	hangs := make(chan struct{})
	go func() { _ = r.disk.Do(context.Background(), time.Hour, func() error { <-hangs; return nil }) }()
	synctest.Wait()
	return func() { close(hangs) }
}

// TestNoReadWithoutProofs: a hanging disk delays no start, and the file is not
// accessed until proofs are wanted.
func TestNoReadWithoutProofs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 1)
		r.disk = statefile.NewDisk()
		r.start(t, "boot")
		time.Sleep(time.Second)
		r.stop()
		r.configs.Publish(config.Config{})
		answer, began := r.hang(), time.Now()
		r.start(t, "boot")
		equal(t, "the start takes", time.Duration(0), time.Since(began))
		time.Sleep(time.Minute)
		answer()
		equal(t, "known", cudacheck.Records(nil), r.Records().Value())
		r.configs.Publish(config.Config{Live: config.Live{Validate: true}})
		time.Sleep(time.Minute)
		equal(t, "proofs", map[string]int{"GPU-0": 1}, r.times())
		equal(t, "held", 0, len(r.unproven()))
	})
}

// TestHangingDisk: an unsaved verdict is saved when the disk answers. While the file wrongly
// says that CUDA is proven on a device, the device is not tried.
func TestHangingDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 2)
		r.disk = statefile.NewDisk()
		r.set(func() { r.busy["GPU-1"] = errors.New("in use by pod p") })
		r.start(t, "boot")
		time.Sleep(time.Second)
		saved, err := os.ReadFile(filepath.Join(dir, cudacheck.File))
		if err != nil {
			t.Fatal(err)
		}
		answer := r.hang()
		r.set(func() { r.fails["GPU-0"] = wrong; delete(r.busy, "GPU-1") })
		r.change(func(s *inventory.Snapshot) { s.GPUs[0].Reset = time.Now() })
		time.Sleep(time.Minute)
		equal(t, "proofs while it hangs", map[string]int{"GPU-0": 1, "GPU-1": 1}, r.times())
		now := r.Status().Value()
		equal(t, "unsaved", statefile.ErrHangs.Error(), now.Unsaved)
		const why = "an earlier verdict is still on the disk:the disk does not answer"
		equal(t, "waits", map[string]string{"GPU-0": why}, now.Waiting)
		same, err := os.ReadFile(filepath.Join(dir, cudacheck.File))
		equal(t, "the file while it hangs", string(saved), string(same))
		if err != nil {
			t.Error(err)
		}

		answer()
		time.Sleep(time.Minute)
		equal(t, "held when it answers", map[string]string{"GPU-0": wrong.Error()}, r.unproven())
		equal(t, "unsaved", "", r.Status().Value().Unsaved)
		r.stop()
		r.start(t, "boot")
		equal(t, "held after a restart", map[string]string{"GPU-0": wrong.Error()}, r.unproven())
	})
}
