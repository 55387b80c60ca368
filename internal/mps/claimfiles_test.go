package mps_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const wantsA = `{"devices":[{"uuid":"GPU-a"}]}`

// write writes the files of claims, each with a text.
func (n *node) write(texts map[string]string) {
	n.t.Helper()
	for name, text := range texts {
		path := n.path(mps.ClaimDir(name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			n.t.Fatal(err)
		}
	}
}

// lock makes the test the supervisor of the node.
func (n *node) lock() (unlock func()) {
	n.t.Helper()
	lock, err := statefile.TakeLock(n.path(".lock"))
	if err != nil {
		n.t.Fatal(err)
	}
	return lock.Close
}

// TestWaitingForADaemon ends with the reason when waiting on makes no sense. The test is the
// supervisor.
func TestWaitingForADaemon(t *testing.T) {
	t.Parallel()
	const starts = "is being started; stopped waiting for"
	file := func(suffix string) string { return mps.ClaimDir("uid" + suffix) }
	earlierEnds := func(n *node, _, _ func()) error { return os.Remove(n.path(file(".ending"))) }
	for name, tt := range map[string]struct {
		before map[string]string
		isEnd  bool // the call is about the end of a daemon
		then   func(n *node, unlock, cancel func()) error
		want   string // in the error; empty if there is to be none
	}{
		"it serves": {nil, false,
			func(n *node, _, _ func()) error { n.write(map[string]string{"uid/.started": ""}); return nil }, ""},
		"it cannot be started": {nil, false, func(n *node, _, _ func()) error {
			n.write(map[string]string{"uid/.failed": "GPU is lost"})
			return nil
		}, "GPU is lost"},
		"the supervisor ends": {nil, false, func(_ *node, unlock, _ func()) error { unlock(); return nil },
			"mps-control-daemon does not run on this node"},
		"it is given back": {nil, false, func(n *node, _, _ func()) error {
			return os.Rename(n.path(file(".json")), n.path(file(".ending")))
		}, "was released"},
		"time is over":                  {nil, false, func(_ *node, _, cancel func()) error { cancel(); return nil }, starts},
		"an earlier one is being ended": {map[string]string{"uid.ending": wantsA}, false, earlierEnds, starts},
		"an earlier one does not end": {map[string]string{"uid.ending": wantsA}, false,
			func(n *node, _, cancel func()) error {
				cancel()
				if n.has(file(".json")) {
					return errors.New("it is asked for before the earlier one has ended")
				}
				return nil
			}, "of an earlier claim has not ended yet"},
		"one that is wanted and ended at once": {map[string]string{"uid.json": wantsA, "uid.ending": wantsA}, false,
			earlierEnds, starts},
		"its end, without a supervisor": {map[string]string{"uid.json": wantsA, "uid/x": ""}, true,
			func(_ *node, unlock, _ func()) error { unlock(); return nil }, "may still run"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.write(tt.before)
			unlock, daemons := n.lock(), mps.NewClaimDaemons(n.root)
			ctx, cancel := context.WithTimeout(t.Context(), poll.Limit)
			defer cancel()
			answer := make(chan error, 1)
			go func() {
				if tt.isEnd {
					answer <- daemons.End(ctx, "uid")
				} else {
					answer <- daemons.Start(ctx, "uid", mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: "GPU-a"}}})
				}
			}()
			n.until("the daemon is requested, or its end", func() bool { return n.has(file(".json")) != n.has(file(".ending")) })
			if err := tt.then(n, unlock, cancel); err != nil {
				t.Error(err)
			}
			if tt.before != nil && tt.want == starts {
				n.until("it is requested after the end of the earlier one", func() bool { return n.has(file(".json")) })
				cancel()
			}
			if err := <-answer; (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if !n.has(file(".json")) && tt.want == starts {
				t.Error("it is not wanted although it may still serve")
			}
			unlock()
			if err := daemons.Stop("uid"); err != nil {
				t.Error(err)
			}
			// A process just forked by another test has a copy of the lock until it starts its own program.
			n.until("Stop leaves the lock of the supervisor", func() bool { return !mps.IsSupervised(n.root) })
		})
	}
}

// TestClaimsThatCannotBeListed: each call says so.
func TestClaimsThatCannotBeListed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if err := os.WriteFile(n.path("claims"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	defer n.lock()()
	c := mps.NewClaimDaemons(n.root)
	_, all := c.All()
	for name, err := range map[string]error{
		"All": all, "Stop": c.Stop("uid"), "End": c.End(t.Context(), "uid"),
		"Start": c.Start(t.Context(), "uid", mps.ClaimDaemon{}),
	} {
		if err == nil || !strings.Contains(err.Error(), "not a directory") {
			t.Errorf("%s: %v, want that claims is not a directory", name, err)
		}
	}
}

// TestListOfClaims: an unreadable file has no devices, and a file renamed meanwhile is skipped.
func TestListOfClaims(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := func(want map[string][]string) {
		t.Helper()
		all, err := mps.NewClaimDaemons(n.root).All()
		if diff := cmp.Diff(want, all); err != nil || diff != "" {
			t.Errorf("all: %v (-want +got):\n%s", err, diff)
		}
	}
	list(map[string][]string{})
	n.write(map[string]string{
		"good.json": wantsA, "released.ending": wantsA, "odd.json": `{"devices":[{"uuid":"GPU-a"}],"exclusive":3}`,
		"large.ending": strings.Repeat(" ", 1<<20) + wantsA, "good/.started": "", "other": "",
	})
	if err := os.Symlink("gone", n.path(mps.ClaimDir("renamed.json"))); err != nil {
		t.Fatal(err)
	}
	list(map[string][]string{"good": {"GPU-a"}, "released": {"GPU-a"}, "odd": nil, "large": nil})
}

// TestMarksOfDaemonsThatNobodyWatches: a supervisor removes the marks that an earlier one left
// before it works. A mark that cannot be removed delays no other mark.
func TestMarksOfDaemonsThatNobodyWatches(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write(map[string]string{"a/.started": "", "b/.started/full": "", "c/.started": "", "d/.failed": ""})
	n.supervise()
	n.until("the other marks are removed", func() bool {
		return !n.has(mps.ClaimDir("a/.started")) && !n.has(mps.ClaimDir("c/.started"))
	})
	if !n.has(mps.ClaimDir("b/.started")) || !n.has(mps.ClaimDir("d/.failed")) || n.has(".ready") {
		t.Error("ready with the mark of a daemon that nobody watches, or the reason of a failure is removed")
	}
	if err := os.Remove(n.path(mps.ClaimDir("b/.started/full"))); err != nil {
		t.Fatal(err)
	}
	n.untilReady()
	if n.has(mps.ClaimDir("b/.started")) {
		t.Error("ready with the mark of a daemon that nobody watches")
	}
}
