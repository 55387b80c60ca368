package lead

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
)

// A term is a time in which tasks work under the lead of this process.
type term struct {
	ctx context.Context //nolint:containedctx // a term is a context, and who works in it
	end context.CancelFunc
}

// A work is that of one task in a term.
type work struct {
	name string
	term *term
}

func newTerm() *term {
	t := &term{}
	t.ctx, t.end = context.WithCancel(context.Background())
	return t
}

// join notes that a task works in a term, until leave is called. It reports false if the term has ended.
func (l *Lead) join(t *term, name string) (leave func(), joined bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t == nil || t.ctx.Err() != nil {
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
func (l *Lead) stop(t *term) <-chan struct{} {
	l.terms.Publish(nil)
	l.mu.Lock()
	t.end()
	l.mu.Unlock()
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

// While runs a task in each term of this process, until ctx ends or the task fails. A task that returns nil has no more to do in that term.
// A task that does not end does not begin again: see Alive.
func (l *Lead) While(ctx context.Context, name string, task func(context.Context) error) error {
	for {
		t, changed := l.terms.Latest()
		if leave, joined := l.join(t, name); joined {
			running, stop := context.WithCancel(ctx)
			unlink := context.AfterFunc(t.ctx, stop) //nolint:contextcheck // the task ends with the term, too
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
	t, changed := l.terms.Latest()
	return t != nil, changed
}

// Alive returns an error if, until ctx ends, this process leads without a task of it, which has not ended since an earlier term.
func (l *Lead) Alive(ctx context.Context) error {
	for {
		now, changed := l.terms.Latest()
		working, ended := l.working.Latest()
		i := slices.IndexFunc(working, func(w *work) bool { return now != nil && w.term != now })
		if i < 0 {
			return nil
		}
		if !feed.AnyOf(ctx, changed, ended) {
			return fmt.Errorf("task %q has not ended since this process led before, so it does not begin again", working[i].name)
		}
	}
}
