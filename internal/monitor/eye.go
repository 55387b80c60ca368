package monitor

import (
	"context"
	"errors"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// closeTimeout is how long a session may take to close when the daemon ends, which has two seconds for all of its end.
const closeTimeout = time.Second

// maxAgain is how often a look begins again because the driver's GPUs changed since its session was opened.
const maxAgain = 3

// A look is what came of looking at the node once.
type look struct {
	opened    time.Time // when the session was opened that the look was made in; zero if there is none
	snapshot  inventory.Snapshot
	readings  []answer
	err       error // why there is no snapshot
	first     bool  // the session was opened for this look; unwatched lists its GPUs that give no events
	unwatched []inventory.LeftOut
	released  bool // the session was closed, instead
	// cleared are the GPUs, by UUID, whose counts of memory errors an errand cleared before they were read.
	cleared []string
}

// An errand is something to do with the driver in the course of a look, between its scan and its readings.
type errand func(context.Context, Session, *look)

// An answer is how a GPU of the look's Snapshot answered.
type answer struct {
	inventory.Reading
	err error // why there is no Reading
}

// An eye looks at the node: it keeps the session, and a goroutine that waits for its events. It is used by one look at
// a time.
type eye struct {
	monitor *Monitor
	start   func(func() error) // starts a goroutine of the monitor's

	session Session // nil while there is none
	opened  time.Time
	ending  func() // says that the end of the session's events will be our doing
	fresh   bool   // nobody has looked in this session yet
	blind   bool   // the session is of no use any more, but is not closed yet
}

// look looks at the node and runs errands on the way; with reopen, in a new session.
func (e *eye) look(ctx context.Context, reopen bool, errands []errand) look {
	var l look
	l.snapshot, l.err = e.scan(ctx, reopen)
	for again := 0; again < maxAgain && errors.Is(l.err, inventory.ErrNewSession); again++ {
		l.snapshot, l.err = e.scan(ctx, true)
	}
	if l.err != nil {
		e.blind = e.blind || !errors.Is(l.err, inventory.ErrNoAnswer)
		return l
	}
	ctx, cancel := context.WithTimeout(ctx, e.timeout())
	defer cancel()
	l.opened = e.opened
	for _, run := range errands {
		run(ctx, e.session, &l)
	}
	l.readings = make([]answer, len(l.snapshot.GPUs))
	for i, g := range l.snapshot.GPUs {
		l.readings[i].Reading, l.readings[i].err = e.session.Read(ctx, g.UUID)
	}
	l.first, e.fresh = e.fresh, false
	l.unwatched = e.session.Unwatched()
	return l
}

// scan scans the node in the session there is, or in a new one.
func (e *eye) scan(ctx context.Context, reopen bool) (inventory.Snapshot, error) {
	if e.session != nil && (reopen || e.blind) {
		if err := e.close(ctx, e.monitor.options.LookTimeout); err != nil {
			return inventory.Snapshot{}, err
		}
	}
	if e.session == nil {
		if err := e.open(ctx); err != nil {
			return inventory.Snapshot{}, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, e.timeout())
	defer cancel()
	return e.session.Scan(ctx)
}

// timeout is how long the driver may take for a look now.
func (e *eye) timeout() time.Duration {
	if e.fresh {
		return e.monitor.options.OpenTimeout
	}
	return e.monitor.options.LookTimeout
}

// open opens a session and begins to wait for its events.
func (e *eye) open(ctx context.Context) error {
	opening, cancel := context.WithTimeout(ctx, e.monitor.options.OpenTimeout)
	defer cancel()
	session, err := e.monitor.options.Driver.Open(opening)
	if err != nil {
		return err
	}
	e.session, e.opened, e.fresh, e.blind = session, e.monitor.options.Clock.Now(), true, false
	used, ending := context.WithCancel(ctx)
	e.ending = ending
	e.start(func() error {
		e.listen(ctx, used, session)
		return nil
	})
	return nil
}

// listen hands the session's events to the loop until the session has no more of them. While it is being closed it may
// still have some. That they end is news only while the session is used.
func (e *eye) listen(ctx, used context.Context, session Session) {
	for {
		event, err := session.Next(ctx)
		if err != nil && used.Err() != nil {
			return
		}
		if err != nil {
			select {
			case e.monitor.broken <- err:
			case <-used.Done():
			}
			return
		}
		select {
		case e.monitor.events <- event:
		case <-ctx.Done():
			return
		}
	}
}

// close closes the session, if there is one. After an error the session is of no use, and close has to be called again.
func (e *eye) close(ctx context.Context, timeout time.Duration) error {
	if e.session == nil {
		return nil
	}
	e.blind = true
	e.ending()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := e.session.Close(ctx); err != nil {
		return err
	}
	e.session = nil
	return nil
}
