package daemon_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestStuck: tasks are asked concurrently, and tasks without an answer are named.
func TestStuck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		alive := func(after time.Duration) func(context.Context) error {
			return func(ctx context.Context) error {
				select {
				case <-time.After(after):
					return nil
				case <-ctx.Done():
					return errors.New("no answer")
				}
			}
		}
		l := daemon.NewLiveness(lead.New(lead.Options{}), []daemon.Task{{Name: "a", Alive: alive(time.Hour)}, {Name: "b"},
			{Name: "c", Alive: alive(4 * time.Second)}},
			[]daemon.Task{{Name: "d", Alive: alive(time.Hour)}})
		began := time.Now()
		if diff := cmp.Diff([]string{"a: no answer", "d: no answer"}, l.Stuck(t.Context())); diff != "" {
			t.Errorf("stuck (-want +got):\n%s", diff)
		}
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("the answer took %s", took)
		}
	})
}

// TestAliveDuringHandOver: a task under the lead ends with its tenure and is not stuck, while other
// tasks take their time to end.
func TestAliveDuringHandOver(t *testing.T) {
	t.Parallel()
	ctx, end := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer end()
	dir := filepath.Join(t.TempDir(), "node")
	late, began := make(chan struct{}), make(chan struct{}, 3)
	pulse := supervise.NewPulse()
	tasks := []daemon.Task{
		{Name: "late", Lead: true, Run: func(context.Context) error { began <- struct{}{}; <-late; return nil }},
		{Name: "loop", Lead: true, Alive: pulse.Check, Run: func(ctx context.Context) error {
			for began <- struct{}{}; ; {
				select {
				case pulse.Heartbeat() <- struct{}{}:
				case <-ctx.Done():
					return nil
				}
			}
		}},
	}
	leads := lead.New(lead.Options{Dir: dir, Name: "a", Token: "a"})
	running.Go(func() { _ = leads.Run(ctx) })
	running.Go(func() { _ = daemon.RunTasks(ctx, leads, nil, tasks) })
	<-began
	<-began
	isAlive := func(while string) {
		t.Helper()
		poll.Until(t, "no task is stuck while "+while, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			return daemon.NewLiveness(leads, tasks).Stuck(ctx) == nil
		})
	}
	isAlive("it leads")
	next := lead.New(lead.Options{Dir: dir, Name: "b", Token: "b"})
	next.Ask()
	_, changed := leads.Tenure()
	running.Go(func() { _ = next.Run(ctx) })
	<-changed
	if isAlive("it hands the lead over"); !leads.Leads().Value() {
		t.Error("another one leads before the late task has ended")
	}
	close(late)
	for leads, changed := next.Leads().Latest(); !leads; leads, changed = next.Leads().Latest() {
		<-changed
	}
	isAlive("another one leads")
}
