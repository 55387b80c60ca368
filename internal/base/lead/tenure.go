package lead

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// A tenure is a period of tasks under the lead of this process. The channel is closed when the
// tasks must end.
type tenure chan struct{}

// A taskRun is the run of one task in a tenure.
type taskRun struct {
	name   string
	tenure tenure
}

// join records that a task runs in a tenure until leave is called. It returns false if the tenure
// has ended.
func (l *Lead) join(t tenure, name string) (leave func(), joined bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t == nil || t != l.tenures.Value() {
		return nil, false
	}
	w := &taskRun{name, t}
	l.runningTasks.Publish(append(slices.Clone(l.runningTasks.Value()), w))
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		others := slices.DeleteFunc(slices.Clone(l.runningTasks.Value()),
			func(other *taskRun) bool { return other == w })
		l.runningTasks.Publish(others)
	}, true
}

// endTenure ends a tenure. The returned channel is closed when all tasks of the tenure have ended.
func (l *Lead) endTenure(t tenure) <-chan struct{} {
	l.mu.Lock()
	l.tenures.Publish(nil)
	l.mu.Unlock()
	close(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		works := func(w *taskRun) bool { return w.tenure == t }
		for all, changed := l.runningTasks.Latest(); slices.ContainsFunc(all, works); all,
			changed = l.runningTasks.Latest() {
			<-changed
		}
	}()
	return done
}

// While runs a task in each tenure of this process until ctx ends or the task fails. A nil result
// ends the task for this tenure. A task that does not end is not started again: see Alive.
func (l *Lead) While(ctx context.Context, name string, task func(context.Context) error) error {
	for {
		t, changed := l.tenures.Latest()
		if leave, joined := l.join(t, name); joined {
			running, stop := context.WithCancel(ctx)
			go func() {
				feed.WaitAny(running, t)
				stop()
			}()
			err := task(running)
			ended := running.Err() != nil
			stop()
			leave()
			if err != nil && !ended {
				return err
			}
		}
		if !feed.WaitAny(ctx, changed) {
			return nil
		}
	}
}

// Tenure reports whether tasks may run under the lead of this process. The channel is closed when
// the answer changes. The answer becomes false before Leads does.
func (l *Lead) Tenure() (working bool, changed <-chan struct{}) {
	t, changed := l.tenures.Latest()
	return t != nil, changed
}

// Alive waits, while this process leads, for tasks of an earlier tenure. At the end of ctx, the
// error names a remaining task.
func (l *Lead) Alive(ctx context.Context) error {
	for {
		t, changed := l.tenures.Latest()
		working, tasksChanged := l.runningTasks.Latest()
		i := slices.IndexFunc(working, func(w *taskRun) bool { return t != nil && w.tenure != t })
		if i < 0 {
			return nil
		}
		if !feed.WaitAny(ctx, changed, tasksChanged) {
			return fmt.Errorf("task %q of an earlier tenure has not ended, so it is not started again", working[i].name)
		}
	}
}
