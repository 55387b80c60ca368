package mps

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// claimFiles makes files of claims in a new root, each with a text, and returns the root.
func claimFiles(t *testing.T, texts map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, text := range texts {
		path := filepath.Join(root, claimsFolder, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const wantsA = `{"devices":[{"uuid":"GPU-a"}]}`

// TestWaitingForADaemon ends with the reason when waiting on makes no sense. The test is the
// supervisor of the root.
func TestWaitingForADaemon(t *testing.T) {
	t.Parallel()
	wanted := ClaimDaemon{Devices: []ClaimDevice{{UUID: "GPU-a"}}}
	for _, tt := range []struct {
		name   string
		before map[string]string
		end    bool // the call is about the end of a daemon
		then   func(root string, unlock, cancel func()) error
		want   string // in the error; empty if there is to be none
	}{
		{"it serves", nil, false, func(root string, _, _ func()) error {
			dir := filepath.Join(root, ClaimDir("uid"))
			return errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, startedMark), nil, 0o600))
		}, ""},
		{"it cannot be started", nil, false, func(root string, _, _ func()) error {
			dir := filepath.Join(root, ClaimDir("uid"))
			return errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, failedMark), []byte("GPU is lost"),
				0o600))
		}, "GPU is lost"},
		{"the supervisor ends", nil, false, func(_ string, unlock, _ func()) error { unlock(); return nil },
			"mps-control-daemon does not run on this node"},
		{"it is given back", nil, false, func(root string, _, _ func()) error {
			return os.Rename(filepath.Join(root, ClaimDir("uid.json")), filepath.Join(root, ClaimDir("uid.ending")))
		}, "was released"},
		{"time is over", nil, false, func(_ string, _, cancel func()) error { cancel(); return nil },
			"is being started; stopped waiting for"},
		{"an earlier one is being ended", map[string]string{"uid.ending": wantsA}, false,
			func(root string, _, _ func()) error {
				return os.Remove(filepath.Join(root, ClaimDir("uid.ending")))
			}, "is being started; stopped waiting for"},
		{"an earlier one does not end", map[string]string{"uid.ending": wantsA}, false,
			func(root string, _, cancel func()) error {
				cancel()
				if _, err := os.Stat(filepath.Join(root, ClaimDir("uid.json"))); err == nil {
					return errors.New("it is asked for before the earlier one has ended")
				}
				return nil
			}, "of an earlier claim has not ended yet"},
		{"one that is wanted and ended at once", map[string]string{"uid.json": wantsA, "uid.ending": wantsA}, false,
			func(root string, _, _ func()) error {
				return os.Remove(filepath.Join(root, ClaimDir("uid.ending")))
			}, "is being started; stopped waiting for"},
		{"its end, without a supervisor", map[string]string{"uid.json": wantsA, "uid/x": ""}, true,
			func(_ string, unlock, _ func()) error { unlock(); return nil }, "may still run"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			root := claimFiles(t, tt.before)
			unlock, err := lockRoot(root)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			answer := make(chan error, 1)
			go func() {
				if tt.end {
					answer <- NewClaimDaemons(root).End(ctx, "uid")
				} else {
					answer <- NewClaimDaemons(root).Start(ctx, "uid", wanted)
				}
			}()
			poll.Until(t, "it is asked for", func() bool { // or the end of the daemon
				wanted, ending, err := list(root)
				return err == nil && len(wanted)+len(ending) == 1 && len(ending["uid"].Devices)+
					len(wanted["uid"].Devices) == 1
			})
			if err := tt.then(root, unlock, cancel); err != nil {
				t.Error(err)
			}
			if tt.before != nil && strings.Contains(tt.want, "is being started") {
				poll.Until(t, "it is asked for after the end of the earlier one", func() bool {
					_, err := os.Stat(filepath.Join(root, ClaimDir("uid.json")))
					return err == nil
				})
				cancel()
			}
			if err := <-answer; (err == nil) != (tt.want == "") || err != nil &&
				!strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if _, err := os.Stat(filepath.Join(root, ClaimDir("uid.json"))); err != nil &&
				strings.Contains(tt.want, "is being started") {
				t.Error("it is not wanted although it may still serve")
			}
			unlock()
			if err := NewClaimDaemons(root).Stop("uid"); err != nil {
				t.Error(err)
			}
			// A process just forked by another test has a copy of the lock until it starts its own program.
			poll.Until(t, "who gives a daemon back leaves the lock of the supervisor",
				func() bool { return !isSupervised(root) })
		})
	}
}

// TestClaimsThatCannotBeListed: nothing is done about them, and who asks is told.
func TestClaimsThatCannotBeListed(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, claimsFolder), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	unlock, err := lockRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	c := NewClaimDaemons(root)
	_, all := c.All()
	for name, err := range map[string]error{
		"All": all, "Stop": c.Stop("uid"), "End": c.End(t.Context(), "uid"), "Start": c.Start(t.Context(), "uid",
			ClaimDaemon{}),
	} {
		if err == nil || !strings.Contains(err.Error(), "not a directory") {
			t.Errorf("%s: %v, want that claims is not a directory", name, err)
		}
	}
	tasks := map[string]*task{"uid": {cancel: func() { t.Error("the daemon of a claim is ended") }}}
	NewSupervisor(root, nil, nil).adjustClaims(t.Context(), nil, tasks)
}

// TestListOfClaims: an unreadable file has no devices, and a file renamed meanwhile is skipped.
func TestListOfClaims(t *testing.T) {
	t.Parallel()
	root := claimFiles(t, map[string]string{
		"good.json": wantsA, "given-back.ending": wantsA, "odd.json": `{"devices":[{"uuid":"GPU-a"}],"exclusive":3}`,
		"large.ending": strings.Repeat(" ", maxClaim) + wantsA, "good/.started": "", "other": "",
	})
	if err := os.Symlink("gone", filepath.Join(root, ClaimDir("renamed.json"))); err != nil {
		t.Fatal(err)
	}
	a := ClaimDaemon{Devices: []ClaimDevice{{UUID: "GPU-a"}}}
	wanted, ending, err := list(root)
	if diff := cmp.Diff(map[string]ClaimDaemon{"good": a, "odd": {}}, wanted); err != nil || diff != "" {
		t.Errorf("wanted: %v (-want +got):\n%s", err, diff)
	}
	if diff := cmp.Diff(map[string]ClaimDaemon{"given-back": a, "large": {}}, ending); diff != "" {
		t.Errorf("ending (-want +got):\n%s", diff)
	}
	all, err := NewClaimDaemons(root).All()
	if diff := cmp.Diff(map[string][]string{"good": {"GPU-a"}, "given-back": {"GPU-a"}, "odd": nil, "large": nil},
		all); err != nil || diff != "" {
		t.Errorf("all: %v (-want +got):\n%s", err, diff)
	}
	if all, err := NewClaimDaemons(t.TempDir()).All(); err != nil || len(all) != 0 {
		t.Errorf("all of a root without claims: %v, %v", all, err)
	}
}

// TestTasksOfClaims: tasks of released claims stop, except tasks that remove leftovers.
func TestTasksOfClaims(t *testing.T) {
	t.Parallel()
	root := claimFiles(t, map[string]string{"wanted.json": wantsA, "ending.ending": wantsA, "odd.json": "{",
		"back.json": wantsA})
	over := make(chan struct{})
	close(over)
	var cancelled []string
	tasks := map[string]*task{}
	for name, t := range map[string]task{
		"wanted": {}, "given back": {}, "ending": {isEnding: true}, "back": {isEnding: true}, "over": {done: over},
		"removed": {done: over, isEnding: true},
	} {
		t.cancel = func() { cancelled = append(cancelled, name) }
		tasks[name] = &t
	}
	NewSupervisor(root, nil, nil).adjustClaims(t.Context(), nil, tasks)
	slices.Sort(cancelled)
	if diff := cmp.Diff([]string{"given back", "over"}, cancelled); diff != "" {
		t.Errorf("tasks that are ended (-want +got):\n%s", diff)
	}
	var left []string
	for name := range tasks {
		left = append(left, name)
	}
	slices.Sort(left)
	if diff := cmp.Diff([]string{"back", "ending", "given back", "wanted"}, left); diff != "" {
		t.Errorf("tasks that there are (-want +got):\n%s", diff)
	}
}

// TestClaimEndIsRetried until the mode of the GPU is restored. Until then the claim's files stay.
func TestClaimEndIsRetried(t *testing.T) {
	t.Parallel()
	root := claimFiles(t, map[string]string{"uid.ending": wantsA, "uid/pipe/x": ""})
	mark := filepath.Join(root, exclusiveMark)
	if err := os.WriteFile(mark, []byte("GPU-a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	modes := &failingModes{}
	modes.failures.Store(2)
	modes.check = func() {
		for _, name := range []string{"uid.ending", "uid"} {
			if _, err := os.Stat(filepath.Join(root, ClaimDir(name))); err != nil {
				t.Errorf("before the GPU is set back: %v", err)
			}
		}
	}
	g := ClaimDaemon{Devices: []ClaimDevice{{UUID: "GPU-a"}}, Exclusive: true}.group("uid")
	ended := NewSupervisor(root, nil, nil).end(t.Context(), newExclusive(modes, mark), g,
		filepath.Join(root, ClaimDir("uid")))
	poll.Until(t, "the end", func() bool {
		select {
		case <-ended.done:
			return true
		default:
			return false
		}
	})
	for _, name := range []string{"uid.ending", "uid"} {
		if _, err := os.Stat(filepath.Join(root, ClaimDir(name))); err == nil {
			t.Errorf("%s is left", name)
		}
	}
	if modes.mode != inventory.ComputeDefault || modes.failures.Load() >= 0 {
		t.Errorf("the GPU is in mode %v, after %d failures less than wanted", modes.mode, modes.failures.Load())
	}
	wait := NewSupervisor(root, nil, nil).end(t.Context(), newExclusive(modes, mark), g,
		filepath.Join(root, ClaimDir("none")))
	<-wait.done // there is nothing to end
}

// failingModes is a GPU whose mode cannot be set some times.
type failingModes struct {
	failures atomic.Int32
	mode     inventory.ComputeMode
	check    func()
}

func (m *failingModes) SetComputeMode(
	_ context.Context, _ string, mode inventory.ComputeMode,
) (inventory.ComputeMode, error) {
	m.check()
	if m.failures.Add(-1) >= 0 {
		return 0, errors.New("not now")
	}
	before := m.mode
	m.mode = mode
	return before, nil
}

// TestMarksOfDaemonsThatNobodyWatches are removed, each, and who cannot is told so.
func TestMarksOfDaemonsThatNobodyWatches(t *testing.T) {
	t.Parallel()
	root := claimFiles(t, map[string]string{"a/.started": "", "b/.started/full": "", "c/.started": "", "d/.failed": ""})
	if err := removeStartedMarks(root); err == nil || !strings.Contains(err.Error(), "b/.started") {
		t.Errorf("forgetStarted() = %v, want an error of b", err)
	}
	left, err := filepath.Glob(filepath.Join(root, claimsFolder, "*", ".*"))
	want := []string{filepath.Join(root, ClaimDir("b"), startedMark), filepath.Join(root, ClaimDir("d"), failedMark)}
	if diff := cmp.Diff(want, left); err != nil || diff != "" {
		t.Errorf("marks that are left: %v (-want +got):\n%s", err, diff)
	}
}
