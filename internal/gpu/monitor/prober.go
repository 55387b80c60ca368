package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// closeTimeout is how long a session may take to close when the daemon ends, which has two seconds
// for all of its end.
const closeTimeout = time.Second

// maxAgain is how often a look begins again because the driver's GPUs changed since its session was
// opened.
const maxAgain = 3

// A look is the result of looking at the node once.
type look struct {
	opened    time.Time // when the session was opened that the look was made in; zero if there is none
	snapshot  inventory.Snapshot
	readings  []readResult
	err       error // why there is no snapshot
	first     bool  // the session was opened for this look; unwatched lists its GPUs that give no events
	unwatched []inventory.LeftOut
	released  bool // the session was closed, instead
	pinned    bool // another session is wanted, and a call that hangs keeps this one open
	// cleared are the GPUs, by UUID, whose counts of memory errors a driverCall cleared before they
	// were read.
	cleared []string
}

// A driverCall asks something of the driver during a look, between its scan and its readings.
type driverCall func(context.Context, Session, *look)

// A readResult is what reading a GPU of the look's Snapshot has returned.
type readResult struct {
	inventory.Reading
	err error // why there is no Reading
}

// A prober looks at the node. It keeps the session, and a goroutine that waits for its events. One
// look uses it at a time.
type prober struct {
	monitor *Monitor
	start   func(func() error) // starts a goroutine of the monitor's

	session  Session // nil while there is none
	opened   time.Time
	listener *eventListener
	fresh    bool // nobody has looked in this session yet
	outdated bool // another session is to take its place, when no call hangs
	unusable bool // the session has failed and is not closed yet
	awaited  bool // a session may still be opened by a call that was not waited for
}

// look looks at the node and runs driverCalls on the way; with reopen, in a new session, now or
// when no call hangs any more; with retry, GPUs that are left alone are asked, too.
func (e *prober) look(ctx context.Context, reopen, retry bool, driverCalls []driverCall) look {
	var l look
	l.snapshot, l.err = e.scan(ctx, reopen, retry)
	for again := 0; again < maxAgain && errors.Is(l.err, inventory.ErrNewSession); again++ {
		e.unusable = true
		l.snapshot, l.err = e.scan(ctx, true, false)
	}
	if l.err != nil {
		e.unusable = e.unusable || !errors.Is(l.err, inventory.ErrNoAnswer)
		return l
	}
	l.opened = e.opened
	for _, run := range driverCalls {
		run(ctx, e.session, &l)
	}
	l.readings = make([]readResult, len(l.snapshot.GPUs))
	for i, g := range l.snapshot.GPUs {
		l.readings[i].Reading, l.readings[i].err = e.session.Read(ctx, g.UUID)
	}
	l.first, e.fresh = e.fresh, false
	l.unwatched, l.pinned = e.session.Unwatched(), e.outdated
	return l
}

// without runs what needs that there is no session, or tells it why there is one.
func (e *prober) without(ctx context.Context, all []sessionless) {
	for _, s := range all {
		s.run(ctx, e.leave(ctx, s.keeps))
	}
}

// leave closes the session; with keeps, only if no GPU loses settings. The error says why it stays.
func (e *prober) leave(ctx context.Context, keeps bool) error {
	if e.session == nil {
		return e.close(ctx, closePatience)
	}
	if e.session.Hanging() {
		return fmt.Errorf("close the session: a call has not returned: %w", inventory.ErrNoAnswer)
	}
	if !keeps {
		return e.close(ctx, closePatience)
	}
	lost, err := e.session.LostByClose(ctx)
	switch {
	case err != nil:
		return err
	case lost != "":
		return errors.New("the GPU is reset for it, for which this process's session has to be closed, and it is not: " +
			lost)
	}
	return e.close(ctx, closePatience)
}

// scan scans the node in the session there is, or in a new one.
func (e *prober) scan(ctx context.Context, reopen, retry bool) (inventory.Snapshot, error) {
	e.outdated = e.outdated || reopen
	// A session of which a call hangs cannot be closed, and it still shows the other GPUs.
	if e.session != nil && (e.unusable || e.outdated && !e.session.Hanging()) {
		if err := e.close(ctx, closePatience); err != nil && (e.unusable || !errors.Is(err, inventory.ErrNoAnswer)) {
			return inventory.Snapshot{}, err
		}
	}
	if e.session == nil {
		if err := e.open(ctx); err != nil {
			return inventory.Snapshot{}, err
		}
	} else if retry {
		if err := e.session.Retry(ctx); err != nil {
			return inventory.Snapshot{}, err
		}
	}
	return e.session.Scan(ctx)
}

// open opens a session and begins to wait for its events.
func (e *prober) open(ctx context.Context) error {
	session, err := e.monitor.options.Driver.Open(ctx)
	e.awaited = errors.Is(err, inventory.ErrNoAnswer)
	if err != nil {
		return err
	}
	e.session, e.opened, e.fresh, e.unusable, e.outdated = session, time.Now(), true, false, false
	l := &eventListener{monitor: e.monitor, session: session, closed: make(chan struct{})}
	e.listener = l
	e.start(func() error {
		l.run(ctx)
		return nil
	})
	return nil
}

// close closes the session, if there is one. After an error it has to be called again; if that was
// inventory.ErrNoAnswer, the session can be used until then.
func (e *prober) close(ctx context.Context, timeout time.Duration) error {
	if e.awaited {
		if err := e.open(ctx); errors.Is(err, inventory.ErrNoAnswer) {
			return err
		}
	}
	if e.session == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	e.listener.ending.Store(true)
	if err := e.session.Close(ctx); err != nil {
		e.listener.ending.Store(false)
		e.unusable = e.unusable || !errors.Is(err, inventory.ErrNoAnswer)
		return err
	}
	close(e.listener.closed)
	e.session = nil
	return nil
}

// An eventListener hands the events of a session to the loop.
type eventListener struct {
	monitor *Monitor
	session Session
	ending  atomic.Bool   // the end of the session's events will be our doing
	closed  chan struct{} // closed when the session is
}

// run ends when the session has no more events: that is news only while the session is used. While
// it is being closed it may still have some. A wait that hangs is the end of nothing.
func (l *eventListener) run(ctx context.Context) {
	for {
		event, err := l.session.Next(ctx)
		switch {
		case err == nil:
			select {
			case l.monitor.events <- event:
			case <-ctx.Done():
				return
			}
		case ctx.Err() != nil:
			return
		case l.ending.Load() || errors.Is(err, inventory.ErrNoAnswer):
			select {
			case <-time.After(cmp.Or(l.monitor.options.Poll, defaultPoll)):
			case <-l.closed:
				return
			case <-ctx.Done():
				return
			}
		default:
			select {
			case l.monitor.broken <- err:
			case <-l.closed:
			case <-ctx.Done():
			}
			return
		}
	}
}
