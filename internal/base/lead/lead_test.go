package lead_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// faster is the speed of the test clock relative to the real clock.
const faster = 10

// A fastClock shortens each wait. Real sockets do not work in the bubbles of testing/synctest.
type fastClock struct{ clock.RealClock }

func (fastClock) After(d time.Duration) <-chan time.Time { return time.After(d / faster) }

func (c fastClock) NewTicker(d time.Duration) clock.Ticker { return c.RealClock.NewTicker(d / faster) }

// A process is a Lead in this process.
type process struct {
	*lead.Lead
	stop func()
}

// start runs a Lead until the test ends. Names are tokens, too: they sort as the processes start.
func start(t *testing.T, dir, name string, busy func() bool) process {
	t.Helper()
	l := lead.New(lead.Options{Dir: dir, Name: name, Token: name, Busy: busy, Clock: fastClock{}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return process{l, stop}
}

func (p process) leads() bool { return p.Statuses().Value().Leads }

// folder returns a folder for the processes of a node. The processes create the folder.
func folder(t *testing.T) string {
	t.Helper()
	return filepath.Join(loopback.Folder(t), "node")
}

// TestLeadWithoutFolder: without a folder a process leads always, before and after Run.
func TestLeadWithoutFolder(t *testing.T) {
	t.Parallel()
	l := lead.New(lead.Options{Name: "a"})
	if s := l.Statuses().Value(); !s.Leads || s.Name != "a" || l.Check() != nil {
		t.Errorf("state %+v, check %v", s, l.Check())
	}
	ran := false
	ctx, cancel := context.WithCancel(t.Context())
	if err := l.While(ctx, "task", func(context.Context) error { ran = true; cancel(); return nil }); err != nil ||
		!ran {
		t.Errorf("ran: %v, error: %v", ran, err)
	}
	if err := l.Run(ctx); err != nil {
		t.Error(err)
	}
}

// TestFirstProcessLeads: a process that starts alone leads at once; the next process knows the
// leader, receives its values, and does not lead.
func TestFirstProcessLeads(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := start(t, dir, "a", nil)
	poll.Until(t, "a leads", a.leads)
	a.Publish(json.RawMessage(`{"x":1}`))
	b := start(t, dir, "b", nil)
	poll.Until(t, "b knows a", func() bool { return b.Statuses().Value().Name == "a" })
	poll.Until(t, "b hears a", func() bool { return string(b.Received().Value()) == `{"x":1}` })
	a.Publish(json.RawMessage(`[]`))
	poll.Until(t, "b hears a again", func() bool { return string(b.Received().Value()) == `[]` })
	if s := b.Statuses().Value(); s.Leads || s.Since.IsZero() || !errors.Is(b.Check(), lead.ErrNotLead) {
		t.Errorf("state of b %+v, check %v", s, b.Check())
	}
	if s := a.Statuses().Value(); s.Standbys != 1 || a.Check() != nil {
		t.Errorf("state of a %+v, check %v", s, a.Check())
	}
	b.stop()
	poll.Until(t, "a has no standby", func() bool { return a.Statuses().Value().Standbys == 0 })
}

// TestHandOver: a process that started later gets the lead when it asks, once the tasks of the
// tenure have ended; a process that started earlier gets the lead only after the leader's exit.
func TestHandOver(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := start(t, dir, "a", nil)
	finish := make(chan struct{})
	terms := make(chan string, 10)
	go func() {
		_ = a.While(t.Context(), "task", func(ctx context.Context) error {
			terms <- "begin"
			<-ctx.Done()
			terms <- "stop"
			<-finish
			terms <- "end"
			return errors.New("what comes after the end does not count")
		})
	}()
	poll.Until(t, "a leads", a.leads)
	<-terms
	a.Ask() // nobody is there to be asked
	b := start(t, dir, "b", nil)
	poll.Until(t, "b knows a", func() bool { return b.Statuses().Value().Name == "a" })
	b.Ask()
	if got := <-terms; got != "stop" || b.leads() || a.Check() != nil {
		t.Fatalf("task: %s; b leads: %v; check of a: %v", got, b.leads(), a.Check())
	}
	close(finish)
	poll.Until(t, "b leads", b.leads)
	if got := <-terms; got != "end" || a.Check() == nil || b.Check() != nil {
		t.Errorf("task: %s; checks: a %v, b %v", got, a.Check(), b.Check())
	}
	poll.Until(t, "a waits for b", func() bool {
		return a.Statuses().Value().Name == "b" && b.Statuses().Value().Standbys == 1
	})
	poll.Until(t, "b may change hardware", func() bool { return b.Statuses().Value().PreviousLeader == "" })
	b.stop()
	poll.Until(t, "a leads again", a.leads)
	if got := <-terms; got != "begin" {
		t.Errorf("task: %s", got)
	}
}

// TestPublishedValuesOfEachTenure: after its tenure, a process ignores values received before, and
// publishes no values of an earlier tenure.
func TestPublishedValuesOfEachTenure(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := start(t, dir, "a", nil)
	poll.Until(t, "a leads", a.leads)
	a.Publish(json.RawMessage(`"of a"`))
	b := start(t, dir, "b", nil)
	poll.Until(t, "b hears a", func() bool { return string(b.Received().Value()) == `"of a"` })
	b.Ask()
	poll.Until(t, "b leads", b.leads)
	c := start(t, dir, "c", nil)
	poll.Until(t, "c knows b", func() bool { return c.Statuses().Value().Name == "b" })
	c.Ask()
	poll.Until(t, "c leads", c.leads)
	poll.Until(t, "a and b wait for c", func() bool {
		return a.Statuses().Value().Name == "c" && b.Statuses().Value().Name == "c"
	})
	if heard := b.Received().Value(); heard != nil {
		t.Errorf("b has led since it heard %s", heard)
	}
	c.stop()
	poll.Until(t, "b leads: it started later", b.leads)
	poll.Until(t, "a waits for b", func() bool { return a.Statuses().Value().Name == "b" })
	b.stop() // only now: otherwise a hand-over to b, once begun, could go to any process
	poll.Until(t, "a leads again", a.leads)
	d := start(t, dir, "d", nil)
	poll.Until(t, "d knows a", func() bool { return d.Statuses().Value().Name == "a" })
	heard, said := d.Received().Latest()
	if heard == nil {
		select {
		case <-said:
			heard = d.Received().Value()
		case <-time.After(50 * time.Millisecond):
		}
	}
	if heard != nil {
		t.Errorf("d hears %s, of an earlier term", heard)
	}
}

// TestHandOverWithStuckTask delays a hand-over for 45 s at most.
func TestHandOverWithStuckTask(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := start(t, dir, "a", nil)
	stuck := make(chan struct{})
	defer close(stuck)
	go func() { _ = a.While(t.Context(), "task", func(context.Context) error { <-stuck; return nil }) }()
	poll.Until(t, "a leads", a.leads)
	b := start(t, dir, "b", nil)
	b.Ask()
	poll.Until(t, "b leads", b.leads)
	if previous := b.Statuses().Value().PreviousLeader; previous != "a" {
		t.Errorf("former %q", previous)
	}
}

// TestHandOverDuringHardwareChange: the previous leader holds the hardware until the end of the
// change, even after a hand-over.
func TestHandOverDuringHardwareChange(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	var mu sync.Mutex
	busy := true
	a := start(t, dir, "a", func() bool { mu.Lock(); defer mu.Unlock(); return busy })
	poll.Until(t, "a leads", a.leads)
	b := start(t, dir, "b", nil)
	b.Ask()
	poll.Until(t, "b leads", b.leads)
	poll.Until(t, "a waits for b", func() bool { return a.Statuses().Value().Name == "b" })
	poll.Until(t, "b may not change hardware", func() bool { return b.Statuses().Value().PreviousLeader == "a" })
	mu.Lock()
	busy = false
	mu.Unlock()
	poll.Until(t, "b may change hardware", func() bool { return b.Statuses().Value().PreviousLeader == "" })
}

// TestLeadNeedsLock: without a lock nobody leads, because other processes could not know that this
// process may change hardware.
func TestLeadNeedsLock(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	if err := os.MkdirAll(filepath.Join(dir, "lead.lock"), 0o700); err != nil { // not a file, so the lock fails
		t.Fatal(err)
	}
	a := start(t, dir, "a", nil)
	poll.Until(t, "a says why it cannot lead", func() bool { return a.Statuses().Value().Problem != "" })
	if a.leads() || a.Check() == nil {
		t.Error("a leads")
	}
	if err := os.Remove(filepath.Join(dir, "lead.lock")); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "a leads", a.leads)
}

// TestLateTask: a late task does not start again when its process leads again, and the process is
// not alive then.
func TestLateTask(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := start(t, dir, "a", nil)
	stuck := make(chan struct{})
	begins := make(chan struct{}, 2)
	go func() {
		_ = a.While(t.Context(), "claims", func(context.Context) error { begins <- struct{}{}; <-stuck; return nil })
	}()
	<-begins
	alive := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		return a.Alive(ctx)
	}
	if err := alive(); err != nil {
		t.Error(err)
	}
	b := start(t, dir, "b", nil)
	b.Ask()
	poll.Until(t, "b leads", b.leads)
	if err := alive(); err != nil {
		t.Errorf("while b leads: %v", err)
	}
	b.stop()
	poll.Until(t, "a leads again", a.leads)
	poll.Until(t, "a is not alive", func() bool {
		err := alive()
		return err != nil && strings.Contains(err.Error(), `"claims"`)
	})
	close(stuck)
	<-begins
	if err := alive(); err != nil {
		t.Error(err)
	}
}

// TestProcessExit: the exit waits for the tasks of the tenure, for 10 s at most, and only then does
// a standby have the lead. The standby is not asked before.
func TestProcessExit(t *testing.T) {
	t.Parallel()
	for what, stuck := range map[string]bool{"tasks end": false, "a task does not end": true} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			dir := folder(t)
			a := start(t, dir, "a", nil)
			finish, ended := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(ended)
				_ = a.While(t.Context(), "task", func(context.Context) error { <-finish; return nil })
			}()
			poll.Until(t, "a leads", a.leads)
			b := start(t, dir, "b", nil)
			poll.Until(t, "b knows a", func() bool { return b.Statuses().Value().Name == "a" })
			stopped := make(chan struct{})
			go func() { defer close(stopped); a.stop() }()
			_, changed := b.Leads().Latest()
			select {
			case <-changed:
				t.Fatal("b leads before the tasks of a have ended")
			case <-time.After(50 * time.Millisecond):
			}
			if !stuck {
				close(finish)
			}
			<-stopped
			poll.Until(t, "b leads", b.leads)
			if previous := b.Statuses().Value().PreviousLeader; stuck && previous == "" {
				t.Error("b may change hardware")
			}
			if stuck {
				close(finish)
			}
		})
	}
}

// TestTaskFailure ends While, and nothing else.
func TestTaskFailure(t *testing.T) {
	t.Parallel()
	a := start(t, folder(t), "a", nil)
	failed := errors.New("failed")
	if err := a.While(t.Context(), "task", func(context.Context) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("error %v", err)
	}
	if !a.leads() {
		t.Error("it leads no more")
	}
}

// TestRemovedSocket: the process notices before a write, and takes the lead again unless another
// process has the lead.
func TestRemovedSocket(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := start(t, dir, "a", nil)
	poll.Until(t, "a leads", a.leads)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := a.Check(); !errors.Is(err, lead.ErrNotLead) {
		t.Errorf("check: %v", err)
	}
	poll.Until(t, "a leads again", func() bool { return a.leads() && a.Check() == nil })
}

// TestLeadTakenByStandby: the standby closes the connection, so the previous leader notices the
// loss even without a write.
func TestLeadTakenByStandby(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := start(t, dir, "a", nil)
	poll.Until(t, "a leads", a.leads)
	standby, err := net.Dial("unix", filepath.Join(dir, "lead.sock"))
	if err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "a has a standby", func() bool { return a.Statuses().Value().Standbys == 1 })
	other, err := net.Listen("unix", filepath.Join(dir, "other.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := os.Rename(filepath.Join(dir, "other.sock"), filepath.Join(dir, "lead.sock")); err != nil {
		t.Fatal(err)
	}
	_, changed := a.Leads().Latest()
	if err := standby.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(poll.Limit):
		t.Error("a still leads")
	}
}

// TestUnwritableFolder: nobody leads, and the status says why; a process that leads continues while
// a later process cannot take over.
func TestUnwritableFolder(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file instead of the folder; root may write everywhere
		t.Fatal(err)
	}
	a := start(t, dir, "a", nil)
	poll.Until(t, "a says why", func() bool { return a.Statuses().Value().Problem != "" })
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "a leads", a.leads)
	terms := make(chan struct{}, 10)
	go func() {
		_ = a.While(t.Context(), "task", func(context.Context) error { terms <- struct{}{}; return nil })
	}()
	<-terms
	if err := os.MkdirAll(filepath.Join(dir, "lead.new", "in the way"), 0o700); err != nil { // no socket can be made
		t.Fatal(err)
	}
	b := start(t, dir, "b", nil)
	b.Ask()
	poll.Until(t, "b knows a", func() bool { return b.Statuses().Value().Name == "a" })
	poll.Until(t, "b says why it cannot", func() bool { return b.Statuses().Value().Problem != "" })
	if !a.leads() || a.Check() != nil || len(terms) > 0 {
		t.Errorf("a leads: %v; %d new terms", a.leads(), len(terms))
	}
	if err := os.RemoveAll(filepath.Join(dir, "lead.new")); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "b leads", b.leads)
}
