package mig_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// With a hanging state directory, GPUs are advertised unchanged after some seconds, and the layout
// is applied when the disk responds.
func TestHangingDisk(t *testing.T) {
	for name, atStart := range map[string]bool{"at the start": true, "later": false} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				var answer func()
				hang := func(o *mig.Controller) {
					answer = o.HangDisk()
					t.Cleanup(answer)
				}
				if atStart {
					r.built = hang
				}
				r.start()
				if !atStart {
					r.reaches(mig.StateNone)
					hang(r.controller)
				}
				r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
				s := r.until("fails", allFailed)
				r.passes(10 * time.Second)
				if !strings.Contains(s.Reason, "the disk does not answer") || len(r.offered()) != 4 {
					t.Errorf("%s; offered: %v", s.Reason, r.devices())
				}
				answer()
				r.reaches(mig.StateSuccess)
				if !strings.Contains(r.journal(), "3g.40gb") {
					t.Errorf("the journal: %s", r.journal())
				}
			})
		})
	}
}

// Without a directory for the journal, GPUs are advertised unchanged.
func TestNoStateDirectory(t *testing.T) {
	t.Parallel()
	for name, dir := range map[string]string{"none": "", "refused": "/dev/null/state"} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				r.start(func(o *mig.Options) { o.StateDir = dir })
				r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
				s := r.until("fails", allFailed)
				if !strings.Contains(s.Reason, "the journal cannot be written") || len(r.offered()) != 4 {
					t.Errorf("%s; offered: %v", s.Reason, r.devices())
				}
			})
		})
	}
}

// allFailed reports whether all GPUs that support MIG have failed.
func allFailed(s mig.Status) bool {
	return len(s.GPUs) == 3 && !slices.ContainsFunc(s.GPUs, func(g mig.GPU) bool { return g.Phase != mig.PhaseFailed })
}

// If the disk rejects writes, GPUs are advertised unchanged.
func TestUnwritableJournal(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		if err := os.Mkdir(filepath.Join(r.dir, "mig.json"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(r.dir, "mig.json", "file"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		r.start()
		synctest.Wait()
		if err := os.MkdirAll(filepath.Join(r.dir, "mig.json", "x"), 0o700); err != nil { // it was set aside
			t.Fatal(err)
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"})
		r.until("says so", func(s mig.Status) bool { return strings.Contains(s.Reason, "the journal cannot be written") })
		if g := r.Snapshots().Value().GPUs[0]; g.MIG != inventory.MIGDisabled {
			t.Error("the mode was set without a journal")
		}
		if s := r.until("fails", allFailed); len(r.offered()) != 4 {
			t.Errorf("%s; offered: %v", s.Reason, r.devices())
		}
		if err := os.RemoveAll(filepath.Join(r.dir, "mig.json")); err != nil {
			t.Fatal(err)
		}
		r.reaches(mig.StateSuccess)
	})
}
