package lead

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
)

// A work is that of one task in a term, which is a time in which tasks work under the lead of this process.
type work struct {
	name string
	term context.Context //nolint:containedctx // a term is a context
}

// join notes that a task works in a term, until leave is called. It reports false if the term has ended.
func (l *Lead) join(term context.Context, name string) (leave func(), joined bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if term == nil || term.Err() != nil {
		return nil, false
	}
	w := &work{name, term}
	l.working.Publish(append(slices.Clone(l.working.Value()), w))
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.working.Publish(slices.DeleteFunc(slices.Clone(l.working.Value()), func(other *work) bool { return other == w }))
	}, true
}

// stop ends a term, and returns what is closed when all of its tasks have ended.
func (l *Lead) stop(term context.Context, end func()) <-chan struct{} {
	l.terms.Publish(nil)
	l.mu.Lock()
	end()
	l.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		works := func(w *work) bool { return w.term == term }
		for all, changed := l.working.Latest(); slices.ContainsFunc(all, works); all, changed = l.working.Latest() {
			<-changed
		}
	}()
	return done
}

// While runs a task in each term of this process, until ctx ends or the task fails. A task that returns nil has no more to do in that term.
// A task that does not end does not begin again: see Alive.
func (l *Lead) While(ctx context.Context, name string, task func(context.Context) error) error {
	for {
		term, changed := l.terms.Latest()
		if leave, joined := l.join(term, name); joined {
			running, stop := context.WithCancel(ctx)
			unlink := context.AfterFunc(term, stop) //nolint:contextcheck // the task ends with the term, too
			err := task(running)
			ended := running.Err() != nil
			unlink()
			stop()
			leave()
			if err != nil && !ended {
				return err
			}
		}
		if !feed.AnyOf(ctx, changed) {
			return nil
		}
	}
}

// Term reports whether tasks are to work under the lead of this process, and returns what is closed when that changes. It ends before
// Leads becomes false.
func (l *Lead) Term() (working bool, changed <-chan struct{}) {
	term, changed := l.terms.Latest()
	return term != nil, changed
}

// Alive waits, while this process leads, for tasks that have not ended since an earlier term. It returns an error that names one if ctx ends
// before.
func (l *Lead) Alive(ctx context.Context) error {
	for {
		term, changed := l.terms.Latest()
		working, ended := l.working.Latest()
		i := slices.IndexFunc(working, func(w *work) bool { return term != nil && w.term != term })
		if i < 0 {
			return nil
		}
		if !feed.AnyOf(ctx, changed, ended) {
			return fmt.Errorf("task %q has not ended since this process led before, so it does not begin again", working[i].name)
		}
	}
}
