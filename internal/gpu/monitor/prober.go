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

// closeTimeout is the longest wait for a session to close at the end of the daemon. The daemon has
// two seconds for the whole shutdown.
const closeTimeout = time.Second

// maxRescans is the maximum number of restarts of a look after the driver's GPUs changed since the
// session was opened.
const maxRescans = 3

// A look is the result of one health check of the node.
type look struct {
	sessionOpened time.Time // when the session of the look was opened; zero without a session
	snapshot      inventory.Snapshot
	readings      []readResult
	err           error // error of the scan
	newSession    bool  // the session was opened for this look; unwatched has the GPUs without events
	unwatched     []inventory.LeftOut
	sessionClosed bool // the session was closed instead of a look
	sessionPinned bool // another session is requested, but a hanging call keeps this session open
	// clearedGPUs are the GPUs, by UUID, whose memory error counts were cleared by a driverCall before
	// they were read.
	clearedGPUs []string
}

// A driverCall calls the driver during a look, between the scan and the readings.
type driverCall func(context.Context, Session, *look)

// A readResult is the result of reading a GPU of the look's Snapshot.
type readResult struct {
	inventory.Reading
	err error // error of the reading
}

// A prober runs looks, one at a time. It owns the session, and a goroutine that waits for the
// session's events.
type prober struct {
	monitor *Monitor
	start   func(func() error) // starts a goroutine of the monitor

	session       Session // nil without a session
	sessionOpened time.Time
	listener      *eventListener
	isNew         bool // no look was made in this session yet
	isOutdated    bool // to be replaced by another session when no call hangs
	isUnusable    bool // the session failed and is not closed yet
	openPending   bool // an abandoned call may still open a session
}

// look runs a look with the driverCalls. With reopen it uses a new session, now or when no call
// hangs any more. With retry it also calls the paused GPUs.
func (e *prober) look(ctx context.Context, reopen, retry bool, driverCalls []driverCall) look {
	var l look
	l.snapshot, l.err = e.scan(ctx, reopen, retry)
	for again := 0; again < maxRescans && errors.Is(l.err, inventory.ErrNewSession); again++ {
		e.isUnusable = true
		l.snapshot, l.err = e.scan(ctx, true, false)
	}
	if l.err != nil {
		e.isUnusable = e.isUnusable || !errors.Is(l.err, inventory.ErrNoAnswer)
		return l
	}
	l.sessionOpened = e.sessionOpened
	for _, run := range driverCalls {
		run(ctx, e.session, &l)
	}
	l.readings = make([]readResult, len(l.snapshot.GPUs))
	for i, g := range l.snapshot.GPUs {
		l.readings[i].Reading, l.readings[i].err = e.session.Read(ctx, g.UUID)
	}
	l.newSession, e.isNew = e.isNew, false
	l.unwatched, l.sessionPinned = e.session.Unwatched(), e.isOutdated
	return l
}

// runSessionless runs the functions that need to run without a session, or passes the reason for
// the open session to each of them.
func (e *prober) runSessionless(ctx context.Context, all []sessionless) {
	for _, s := range all {
		s.run(ctx, e.closeUnlessHeld(ctx, s.keeps))
	}
}

// closeUnlessHeld closes the session; with keeps, only if no GPU loses settings. The error says why
// the session stays open.
func (e *prober) closeUnlessHeld(ctx context.Context, keeps bool) error {
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
		return errors.New("the driver resets the GPU for this, and this process's session must stay open: " + lost)
	}
	return e.close(ctx, closePatience)
}

// scan scans the node in the current session, or in a new one.
func (e *prober) scan(ctx context.Context, reopen, retry bool) (inventory.Snapshot, error) {
	e.isOutdated = e.isOutdated || reopen
	// A session with a hanging call cannot be closed, but still shows the other GPUs.
	if e.session != nil && (e.isUnusable || e.isOutdated && !e.session.Hanging()) {
		if err := e.close(ctx, closePatience); err != nil && (e.isUnusable || !errors.Is(err, inventory.ErrNoAnswer)) {
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

// open opens a session and starts to listen to its events.
func (e *prober) open(ctx context.Context) error {
	session, err := e.monitor.options.Driver.Open(ctx)
	e.openPending = errors.Is(err, inventory.ErrNoAnswer)
	if err != nil {
		return err
	}
	e.session, e.sessionOpened, e.isNew, e.isUnusable, e.isOutdated = session, time.Now(), true, false, false
	l := &eventListener{monitor: e.monitor, session: session, closed: make(chan struct{})}
	e.listener = l
	e.start(func() error {
		l.run(ctx)
		return nil
	})
	return nil
}

// close closes the session, if any. After an error it must be called again; after
// inventory.ErrNoAnswer the session is usable until then.
func (e *prober) close(ctx context.Context, timeout time.Duration) error {
	if e.openPending {
		if err := e.open(ctx); errors.Is(err, inventory.ErrNoAnswer) {
			return err
		}
	}
	if e.session == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	e.listener.isClosing.Store(true)
	if err := e.session.Close(ctx); err != nil {
		e.listener.isClosing.Store(false)
		e.isUnusable = e.isUnusable || !errors.Is(err, inventory.ErrNoAnswer)
		return err
	}
	close(e.listener.closed)
	e.session = nil
	return nil
}

// An eventListener passes the events of a session to the loop.
type eventListener struct {
	monitor   *Monitor
	session   Session
	isClosing atomic.Bool   // the session is being closed by the prober
	closed    chan struct{} // closed with the session
}

// run passes events until the session has no more, and reports their end while the session is in
// use. A session may still have events while it is being closed. A hanging wait does not end the
// events.
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
		case l.isClosing.Load() || errors.Is(err, inventory.ErrNoAnswer):
			select {
			case <-time.After(cmp.Or(l.monitor.options.Poll, defaultPoll)):
			case <-l.closed:
				return
			case <-ctx.Done():
				return
			}
		default:
			select {
			case l.monitor.eventErrors <- err:
			case <-l.closed:
			case <-ctx.Done():
			}
			return
		}
	}
}
