// Package lead elects the leader among the processes of this program on a node. During a roll-out
// two processes run, and both serve the kubelet. Only the leader writes state that they share: to the
// disk, to the API server and to the hardware.
//
// The processes of a node meet in one folder, where the leader listens on a socket. A process takes
// the lead by replacing the socket. Before each write the leader compares the socket on the disk
// with its own (Check): a process that was stopped for a while then notices the loss of the lead.
// The other processes are standbys: they stay connected to the socket and read the values published
// by the leader. A standby takes the lead when the leader hands over, exits, or does not answer for
// ten seconds.
//
// See ADR 55 for the reasons.
package lead

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

const (
	// tick is the interval between pings of a standby to the leader. A leader without a standby and
	// without a previous leader to wait for does nothing.
	tick = 2 * time.Second
	// maxMissedTicks is the number of ticks without an answer until a standby takes the lead. Ticks
	// count instead of time: a standby that was itself stopped has received nothing either.
	maxMissedTicks = 5
	// handOverTimeout limits the wait for the tasks of a tenure when the lead is handed over. The
	// kubelet waits 45 s for a call of the DRA driver.
	handOverTimeout = 45 * time.Second
	// exitTimeout limits the same wait when the process exits. Longer calls are forwarded to the next
	// leader.
	exitTimeout = 10 * time.Second
	// retryInterval is the interval of checks of a folder while another process takes the lead or
	// hands over.
	retryInterval = 50 * time.Millisecond
	// refusedInterval is the pause after a failure to take the lead.
	refusedInterval = time.Minute
)

// ErrNotLead is the error of a write by a process that does not lead.
var ErrNotLead = errors.New("another process of this program leads on this node now")

// Options configure a Lead.
type Options struct {
	// Dir is the folder in which the processes of a node meet. It is created if necessary, but not
	// the parent folder. With an empty Dir, this process always leads.
	Dir string
	// Name identifies this process to people. Token is greater than all earlier tokens.
	Name, Token string
	// Busy reports whether a hardware change started by this process is still running; nil means
	// never.
	Busy func() bool
	// Clock is used for waiting; nil means the real clock.
	Clock clock.WithTicker
}

// A Status describes the current leader as seen by one process.
type Status struct {
	// Leads is true if this process leads.
	Leads bool
	// Name is the name of the leader, and Since the time at which the leader took the lead. Both are
	// empty while unknown.
	Name  string
	Since time.Time
	// Later is true if the leader started later than this process. Then this process does not ask
	// for the lead.
	Later bool
	// Standbys is the number of processes waiting for the lead.
	Standbys int
	// PreviousLeader is the name of an earlier leader that may still change hardware, or "an
	// earlier process"; empty if there is none. Until then the leader changes no hardware.
	PreviousLeader string
	// Problem is why this process cannot take the lead, a sentence without a full stop; empty if
	// there is none.
	Problem string
}

// A Lead takes the lead of a node for its process, or waits for the lead. Create a Lead with New
// and call Run once.
type Lead struct {
	o            Options
	path         string // of the socket
	statuses     feed.Feed[Status]
	leads        feed.Feed[bool]
	tenures      feed.Feed[tenure]          // nil while the tasks of this process may not run
	runningTasks feed.Feed[[]*taskRun]      // running tasks, including late ones of an earlier tenure
	wantsLead    feed.Feed[bool]            // true once Ask was called
	received     feed.Feed[json.RawMessage] // from the leader
	shared       feed.Feed[json.RawMessage] // for the standbys

	retryAt <-chan time.Time // used by Run only: end of the wait after a failure to take the lead; nil without a wait
	// Used by Run only: the previous leader, or a process that may still change hardware, as named
	// by the leader.
	previous string

	mu         sync.Mutex  // guards leadership, and changes of statuses, leads, tenures and runningTasks
	leadership *leadership // nil while this process does not lead
}

// New returns the Lead of a process.
func New(o Options) *Lead {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	if o.Busy == nil {
		o.Busy = func() bool { return false }
	}
	l := &Lead{o: o, path: filepath.Join(o.Dir, socketName)}
	if o.Dir == "" {
		l.set(func(s *Status) { *s = Status{Leads: true, Name: o.Name, Since: o.Clock.Now()} })
		l.tenures.Publish(make(tenure))
	}
	return l
}

// IsTaken reports whether a process leads in the folder dir. It changes nothing.
func IsTaken(ctx context.Context, dir string) bool {
	conn, listening := dial(ctx, filepath.Join(dir, socketName))
	if conn != nil {
		_ = conn.Close() // only the connection itself matters
	}
	return listening
}

// Statuses returns the feed of the current leader.
func (l *Lead) Statuses() *feed.Feed[Status] { return &l.statuses }

// Leads returns the feed of whether this process leads. When the value becomes false, all tasks of
// the tenure have ended, except after a loss of the lead.
func (l *Lead) Leads() *feed.Feed[bool] { return &l.leads }

// Ask makes this process ask for the lead from now on, unless the leader started later. Call Ask
// when this process can serve at least as much as the leader.
func (l *Lead) Ask() {
	if !l.wantsLead.Value() {
		l.wantsLead.Publish(true)
	}
}

// Publish sends a value to the standbys, in place of the last value.
func (l *Lead) Publish(value json.RawMessage) { l.shared.Publish(value) }

// Received returns the feed of the values published by the leader while this process is a standby.
// The value is nil before the first value arrives, and again after this process has led. While this
// process leads, the last value stays.
func (l *Lead) Received() *feed.Feed[json.RawMessage] { return &l.received }

// Check returns ErrNotLead if this process does not lead now. It reads the disk. Call Check before
// each write reserved to the leader.
func (l *Lead) Check() error {
	if l.o.Dir == "" {
		return nil
	}
	l.mu.Lock()
	o := l.leadership
	l.mu.Unlock()
	if o == nil {
		return ErrNotLead
	}
	if identityOf(l.path) != o.socket.identity {
		o.drop()
		return ErrNotLead
	}
	return nil
}

// set changes the status and publishes it.
func (l *Lead) set(change func(*Status)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.statuses.Value()
	now := before
	if change(&now); now != before {
		l.statuses.Publish(now)
		if now.Leads != before.Leads {
			l.leads.Publish(now.Leads)
		}
	}
}

// Run takes the lead, or waits for the lead, until ctx ends. It then waits for the tasks of the
// tenure, at most 10 s, gives up the lead, and returns nil.
func (l *Lead) Run(ctx context.Context) error {
	if l.o.Dir == "" {
		<-ctx.Done()
		return nil
	}
	for ctx.Err() == nil {
		current := identityOf(l.path)
		var previous *link
		if current != (identity{}) {
			var may bool
			if may, previous = l.standBy(ctx, current); !may {
				l.sleep(ctx, retryInterval)
				continue
			}
		}
		s, err := l.take(ctx, current)
		previous.close() // makes the previous leader check its lead
		switch {
		case err == nil:
			l.lead(ctx, s)
		case errors.Is(err, errTaken):
			l.sleep(ctx, retryInterval)
		default:
			l.reportProblem(ctx, err)
			l.sleep(ctx, tick)
		}
	}
	return nil
}

// reportProblem publishes why this process cannot take the lead, logs each new reason once, and
// delays the next request for the lead.
func (l *Lead) reportProblem(ctx context.Context, err error) {
	if l.statuses.Value().Problem != err.Error() {
		klog.FromContext(ctx).Info("Cannot take the lead of the node", "reason", err.Error())
	}
	l.set(func(s *Status) { s.Problem = err.Error() })
	l.retryAt = l.o.Clock.After(refusedInterval)
}

func (l *Lead) sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-l.o.Clock.After(d):
	}
}
