package reset_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
)

// TestWhatAnEarlierProcessLeft is shown once, and not after a restart of the node.
func TestWhatAnEarlierProcessLeft(t *testing.T) {
	t.Parallel()
	for boot, want := range map[string]reset.Phase{"boot": reset.PhaseInterrupted, "another": ""} {
		for phase, why := range map[string]string{"waiting": "before the GPUs were reset",
			"resetting": "judged by their readings"} {
			dir := t.TempDir()
			text := `{"version": 1, "gpus": ["GPU-a"], "since": "2026-01-01T00:00:00Z", "phase": "` + phase +
				`", "boot": "` + boot + `"}`
			if err := os.WriteFile(filepath.Join(dir, reset.File), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				r := newRig(dir)
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- r.Run(ctx) }()
				synctest.Wait()
				if s := r.Status().Value(); s.Phase != want || want != "" && !strings.Contains(s.Reason, why) {
					t.Errorf("%s in boot %s: status %+v", phase, boot, s)
				}
				r.free(t, dir)
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, reset.File), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(dir)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Run(ctx); err != nil || r.Status().Value().Phase != "" {
			t.Errorf("a damaged file: %v, %+v", err, r.Status().Value())
		}
	})
}

// TestNoteAfterDaemonStop leaves the note of a reset while the driver's program runs.
func TestNoteAfterDaemonStop(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(dir)
		r.run = func(context.Context, func()) error { return context.Canceled }
		if err := <-r.begin(t.Context(), 0, "0"); !errors.Is(err, context.Canceled) {
			t.Errorf("Reset() = %v", err)
		}
		next := newRig(dir)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = next.Run(ctx) }()
		synctest.Wait()
		if s := next.Status().Value(); s.Phase != reset.PhaseInterrupted {
			t.Errorf("the next one: %+v", s)
		}
		cancel()
	})
}

// TestLateNote: a reset without a timely note is refused. A late note is withdrawn, so
// the next process shows no reset that never ran. The same holds for a slow disk at the note of the
// second phase, and for a disk error.
func TestLateNote(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		inTime int // notes written in time
		fails  error
	}{
		"the first note": {}, "the second note": {inTime: 1},
		"the first note fails":  {fails: errors.New("no space left")},
		"the second note fails": {inTime: 1, fails: errors.New("no space left")},
	} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(dir)
			answer, notes := make(chan struct{}), 0
			r.write = func(path string, v any) error {
				if notes++; notes > test.inTime {
					<-answer
					if test.fails != nil {
						return test.fails
					}
				}
				return statefile.WriteState(path, v)
			}
			for range 2 { // the second reset finds the disk as busy as before
				if err := <-r.begin(t.Context(), 0, "0"); !errors.Is(err, statefile.ErrHangs) {
					t.Errorf("%s: Reset() = %v", name, err)
				}
			}
			if len(r.runs) > 0 {
				t.Errorf("%s: reset were %v", name, r.runs)
			}
			close(answer)
			r.free(t, dir)
			next := newRig(dir)
			go func() { _ = next.Run(t.Context()) }()
			synctest.Wait()
			if s := next.Status().Value(); s.Phase != "" {
				t.Errorf("%s: the next process shows %+v", name, s)
			}
			r.set(func() { r.write = nil })
			if err := <-r.begin(t.Context(), 0, "0"); err != nil {
				t.Errorf("%s: when the disk answers: %v", name, err)
			}
			r.free(t, dir)
		})
	}
}

// TestNoteWithoutCaller: a command that ends while the disk is slow leaves no note.
func TestNoteWithoutCaller(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(dir)
		answer := make(chan struct{})
		r.write = func(path string, v any) error { <-answer; return statefile.WriteState(path, v) }
		ctx, cancel := context.WithCancel(t.Context())
		outcome := r.begin(ctx, 0, "0")
		synctest.Wait()
		cancel()
		if err := <-outcome; !errors.Is(err, context.Canceled) {
			t.Errorf("Reset() = %v", err)
		}
		close(answer)
		r.free(t, dir)
	})
}

// TestNewLeaderDuringReset: a rolling update hands the lead over while the driver's program
// runs. The GPUs stay withdrawn in the new leader until the previous leader has reset them, is
// killed, or the lead is lost again.
func TestNewLeaderDuringReset(t *testing.T) {
	t.Parallel()
	for _, happens := range []string{"it ends", "it is killed", "the lead is lost"} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			earlier, later := newRig(dir), newRig(dir)
			over := make(chan struct{})
			earlier.run = func(context.Context, func()) error { <-over; return nil }
			outcome := earlier.begin(t.Context(), 0, "0")
			time.Sleep(time.Minute)
			later.previous.Publish("the earlier process")
			ctx, lose := context.WithCancel(t.Context())
			defer lose()
			go func() { _ = later.Run(ctx) }()
			time.Sleep(time.Minute)
			s := later.Status().Value()
			if s.Phase != reset.PhaseResetting || !strings.Contains(s.Reason, "the earlier process led before") ||
				later.Withheld("GPU-a") == nil {
				t.Errorf("%s: meanwhile %+v", happens, s)
			}
			later.set(func() {
				if !strings.Contains(later.withheld["GPU-a"], "it is being reset: ") {
					t.Errorf("%s: withheld %v", happens, later.withheld)
				}
			})
			want, why := reset.PhaseInterrupted, "the daemon ended during the reset"
			switch happens {
			case "it is killed":
				later.previous.Publish("")
			case "it ends":
				close(over)
				if err := <-outcome; err != nil {
					t.Error(err)
				}
				time.Sleep(time.Minute)
				later.previous.Publish("")
				why = "see the log of the previous leader"
			case "the lead is lost":
				lose()
				want, why = "", ""
			}
			synctest.Wait()
			if s := later.Status().Value(); s.Phase != want || !strings.Contains(s.Reason, why) {
				t.Errorf("%s: %+v", happens, s)
			}
			later.set(func() {
				if len(later.withheld) > 0 {
					t.Errorf("%s: withheld %v", happens, later.withheld)
				}
			})
			if happens != "it ends" {
				close(over)
				if err := <-outcome; err != nil {
					t.Error(err)
				}
			}
			earlier.free(t, dir)
		})
	}
}
