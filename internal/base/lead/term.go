package lead

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// A term is a time in which tasks work under the lead of this process. It is closed when they are
// to end.
type term chan struct{}

// A work is that of one task in a term.
type work struct {
	name string
	term term
}

// join notes that a task works in a term, until leave is called. It reports false if the term has
// ended.
func (l *Lead) join(t term, name string) (leave func(), joined bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t == nil || t != l.terms.Value() {
		return nil, false
	}
	w := &work{name, t}
	l.working.Publish(append(slices.Clone(l.working.Value()), w))
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.working.Publish(slices.DeleteFunc(slices.Clone(l.working.Value()), func(other *work) bool { return other == w }))
	}, true
}

// stop ends a term, and returns what is closed when all of its tasks have ended.
func (l *Lead) stop(t term) <-chan struct{} {
	l.mu.Lock()
	l.terms.Publish(nil)
	l.mu.Unlock()
	close(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		works := func(w *work) bool { return w.term == t }
		for all, changed := l.working.Latest(); slices.ContainsFunc(all, works); all, changed = l.working.Latest() {
			<-changed
		}
	}()
	return done
}

// While runs a task in each term of this process, until ctx ends or the task fails. A task that
// returns nil has no more to do in that term. A task that does not end does not begin again: see
// Alive.
func (l *Lead) While(ctx context.Context, name string, task func(context.Context) error) error {
	for {
		t, changed := l.terms.Latest()
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

// Term reports whether tasks are to work under the lead of this process, and returns what is closed
// when that changes. It ends before Leads becomes false.
func (l *Lead) Term() (working bool, changed <-chan struct{}) {
	t, changed := l.terms.Latest()
	return t != nil, changed
}

// Alive waits, while this process leads, for tasks that have not ended since an earlier term. If
// ctx ends before, the error names one.
func (l *Lead) Alive(ctx context.Context) error {
	for {
		t, changed := l.terms.Latest()
		working, ended := l.working.Latest()
		i := slices.IndexFunc(working, func(w *work) bool { return t != nil && w.term != t })
		if i < 0 {
			return nil
		}
		if !feed.WaitAny(ctx, changed, ended) {
			return fmt.Errorf("task %q has not ended since this process led before, so it does not begin again", working[i].name)
		}
	}
}
