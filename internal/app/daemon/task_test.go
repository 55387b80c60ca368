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
)

// ends records the order in which tasks end.
type ends struct {
	mu    sync.Mutex // guards names
	names []string
}

// task returns a task that runs until ctx ends, needs a second to end, and returns err.
func (e *ends) task(name string, err error) daemon.Task {
	return daemon.Task{Name: name, Run: func(ctx context.Context) error {
		<-ctx.Done()
		time.Sleep(time.Second)
		e.mu.Lock()
		defer e.mu.Unlock()
		e.names = append(e.names, name)
		return err
	}}
}

func TestOutputsEndBeforeObservation(t *testing.T) {
	t.Parallel()
	failing := daemon.Task{Name: "failing", Run: func(context.Context) error {
		time.Sleep(time.Minute)
		return errors.New("it broke")
	}}
	finished := daemon.Task{Name: "finished", Run: func(context.Context) error { return nil }}
	late := errors.New("an error that comes after the end")
	for name, tt := range map[string]struct {
		observation, outputs []daemon.Task // besides one of each
		after                time.Duration
		want                 string
	}{
		"the context ends":     {[]daemon.Task{finished}, []daemon.Task{finished}, time.Hour, ""},
		"an output fails":      {nil, []daemon.Task{failing}, time.Minute, "failing: it broke"},
		"an observation fails": {[]daemon.Task{failing}, nil, time.Minute, "failing: it broke"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				var ended ends
				began := time.Now()
				err := daemon.RunTasks(ctx, lead.New(lead.Options{}), append(tt.observation, ended.task("observation", late)),
					append(tt.outputs, ended.task("output", late)))
				if took := time.Since(began); took > tt.after+2*time.Second {
					t.Errorf("ended after %s, want %s", took, tt.after)
				}
				if got := message(err); got != tt.want {
					t.Errorf("error %q, want %q", got, tt.want)
				}
				if diff := cmp.Diff([]string{"output", "observation"}, ended.names); diff != "" {
					t.Errorf("ends (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestTasksUnderTheLead: tasks under the lead run only while this process leads.
func TestTasksUnderTheLead(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan string, 2)
	task := func(name string, l bool) daemon.Task {
		return daemon.Task{Name: name, Lead: l, Run: func(ctx context.Context) error {
			ran <- name
			<-ctx.Done()
			return nil
		}}
	}
	dir := filepath.Join(t.TempDir(), "node")
	ended := make(chan error, 1)
	waiting := lead.New(lead.Options{Dir: dir})
	go func() {
		ended <- daemon.RunTasks(ctx, waiting, nil, []daemon.Task{task("always", false), task("lead", true)})
	}()
	if name := <-ran; name != "always" {
		t.Errorf("%s runs", name)
	}
	leading := make(chan error, 1)
	go func() { leading <- waiting.Run(ctx) }()
	if name := <-ran; name != "lead" {
		t.Errorf("%s runs", name)
	}
	cancel()
	if err := errors.Join(<-ended, <-leading); err != nil {
		t.Error(err)
	}
}

// TestOutputThatDoesNotEnd: the lead is released when the process ends, even with a stuck output.
func TestOutputThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	dir := filepath.Join(t.TempDir(), "node")
	first, next := lead.New(lead.Options{Dir: dir, Name: "a", Token: "a"}), lead.New(lead.Options{Dir: dir, Name: "b",
		Token: "b"})
	hangs := make(chan struct{})
	ended := make(chan error, 2)
	serving, end := context.WithCancel(ctx)
	go func() {
		ended <- daemon.RunTasks(serving, first, nil, []daemon.Task{
			{Name: "lead", Run: first.Run}, {Name: "hangs", Run: func(context.Context) error { <-hangs; return nil }},
		})
	}()
	await := func(l *lead.Lead) {
		for leads, changed := l.Leads().Latest(); !leads; leads, changed = l.Leads().Latest() {
			<-changed
		}
	}
	await(first)
	go func() { ended <- next.Run(ctx) }()
	end()
	await(next)
	close(hangs)
	stop()
	if err := errors.Join(<-ended, <-ended); err != nil {
		t.Error(err)
	}
}

// TestReadyWithTheLead: a process asks for the lead when everything else is ready. Tasks under the
// lead count when it leads.
func TestReadyWithTheLead(t *testing.T) {
	t.Parallel()
	never := daemon.Task{Lead: true, Ready: func(context.Context) (bool, string) {
		return false, "the driver is not registered"
	}}
	for dir, want := range map[string]string{
		"":          "the driver is not registered",
		t.TempDir(): "waiting for the lead of the node, held by another process",
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			r := daemon.NewReadiness(lead.New(lead.Options{Dir: dir}), []daemon.Task{never})
			if err := r.Run(ctx); err != nil {
				t.Error(err)
			}
			if got := r.Answer().Value(); got.Ready || got.Reason != want {
				t.Errorf("%+v, want %q", got, want)
			}
		})
	}
}

// TestDaemonWithoutOutputs: it runs until its context ends or an observation fails.
func TestDaemonWithoutOutputs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		var ended ends
		began := time.Now()
		if err := daemon.RunTasks(ctx, lead.New(lead.Options{}), []daemon.Task{ended.task("observation", nil)},
			nil); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took < time.Hour || len(ended.names) != 1 {
			t.Errorf("it lived for %v, and %q ended", took, ended.names)
		}
	})
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
