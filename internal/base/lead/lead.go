// Package lead says which process of this program decides on a node. During a roll-out two of them
// run, and both serve kubelet. Only the process that leads writes: to the disk, to the API server
// and to the hardware.
//
// The processes of a node meet in one folder. The process that leads listens there on a socket. A
// process that takes the lead puts a socket of its own in that place. A process that was stopped
// compares the socket with its own before it writes again (Check), and so finds that it has lost
// the lead. The other processes are standbys: they stay connected to the socket and read what the
// leading process tells. A standby takes the lead when it is handed over, when the leading process
// ends, or when that process does not answer for ten seconds.
//
// Package daemon builds it. ADR 55 has the reasons.
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
	// tick is how often a standby asks whether the process that leads is there. A process that has
	// neither a standby nor a former lead to wait for does nothing.
	tick = 2 * time.Second
	// silence is how many ticks without an answer there are before a standby takes the lead. Ticks are
	// counted, not time: a standby that was stopped itself has heard nothing either.
	silence = 5
	// finish is how long the tasks of a term may take to end when the lead is handed over. Kubelet
	// gives a call of the DRA driver 45 s.
	finish = 45 * time.Second
	// leaving is that time when the process ends. Calls that last longer are forwarded to the next
	// lead.
	leaving = 10 * time.Second
	// pause is the time between two looks at a folder in which another process is taking the lead or
	// handing it over.
	pause = 50 * time.Millisecond
	// refusedPause is the time until a process that could not take the lead tries again.
	refusedPause = time.Minute
)

// ErrNotLead is the error of a write by a process that does not lead.
var ErrNotLead = errors.New("another process of this program leads on this node now")

// Options are those of a Lead.
type Options struct {
	// Dir is the folder in which the processes of a node meet. It is made if it does not exist; its
	// parent folder is not. Without one, this process leads always.
	Dir string
	// Name says to people which process this is. Token is greater than those of all processes that
	// started before.
	Name, Token string
	// Busy reports whether something that this process has begun at the hardware has not ended; nil
	// for never.
	Busy func() bool
	// Clock is the clock to wait by; nil means the real one.
	Clock clock.WithTicker
}

// A Status says who leads.
type Status struct {
	// Leads says that this process does.
	Leads bool
	// Name is the name of the process that leads, Since since when; empty as long as that is not
	// known.
	Name  string
	Since time.Time
	// Later says that the process that leads started later than this one, which does not ask it for
	// the lead.
	Later bool
	// Standbys is how many processes wait for the lead of this one.
	Standbys int
	// Former is a process that led before this one and may still change hardware: its name, or "an
	// earlier process"; empty if there is none. While there is one, the process that leads changes no
	// hardware.
	Former string
	// Problem is why this process cannot take the lead, a sentence without a full stop; empty if it
	// can.
	Problem string
}

// A Lead takes the lead of a node for its process, or waits for it. Make it with New. Run is called
// once.
type Lead struct {
	o        Options
	path     string // of the socket
	statuses feed.Feed[Status]
	leads    feed.Feed[bool]
	terms    feed.Feed[term]            // nil while no task of this process is to work
	working  feed.Feed[[]*work]         // tasks, also those of an earlier term that have not ended
	asked    feed.Feed[bool]            // whether this process may ask for the lead
	heard    feed.Feed[json.RawMessage] // from the process that leads
	told     feed.Feed[json.RawMessage] // to the standbys

	refused <-chan time.Time // Run's own: when this process may ask again after it could not take the lead; nil for now
	former  string           // Run's own: who led before this process, or holds the hardware still as that one said

	mu     sync.Mutex // guards office, and changes of statuses, leads, terms and working
	office *office    // nil while this process does not lead
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
		l.terms.Publish(make(term))
	}
	return l
}

// IsTaken reports whether a process leads that meets the others in a folder. It changes nothing.
func IsTaken(ctx context.Context, dir string) bool {
	conn, there := dial(ctx, filepath.Join(dir, socketName))
	if conn != nil {
		_ = conn.Close() // it was only to be there
	}
	return there
}

// Statuses returns the feed of who leads.
func (l *Lead) Statuses() *feed.Feed[Status] { return &l.statuses }

// Leads returns the feed of whether this process does. When it becomes false, all tasks of the term
// have ended, unless the lead was lost.
func (l *Lead) Leads() *feed.Feed[bool] { return &l.leads }

// Ask makes this process ask for the lead from now on. Call it when this process could serve no
// less than the process that leads. A process that started later is not asked.
func (l *Lead) Ask() {
	if !l.asked.Value() {
		l.asked.Publish(true)
	}
}

// Tell tells the standbys a value, in place of the one before.
func (l *Lead) Tell(value json.RawMessage) { l.told.Publish(value) }

// Heard returns the feed of what the process that leads tells, as long as this one is a standby. It
// is nil before the first value, and again when this process has led; it keeps the last one while
// this process leads.
func (l *Lead) Heard() *feed.Feed[json.RawMessage] { return &l.heard }

// Check returns ErrNotLead if this process does not lead now. It looks at the disk. It is called
// before each write that only the process that leads may make.
func (l *Lead) Check() error {
	if l.o.Dir == "" {
		return nil
	}
	l.mu.Lock()
	o := l.office
	l.mu.Unlock()
	if o == nil {
		return ErrNotLead
	}
	if identify(l.path) != o.socket.identity {
		o.lose()
		return ErrNotLead
	}
	return nil
}

// set changes the status, and publishes it.
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

// Run takes the lead, or waits for it, until ctx ends. Then it waits for the tasks of the term, for
// 10 s at most, gives the lead up, and returns nil.
func (l *Lead) Run(ctx context.Context) error {
	if l.o.Dir == "" {
		<-ctx.Done()
		return nil
	}
	for ctx.Err() == nil {
		seen := identify(l.path)
		var former *link
		if seen != (identity{}) {
			var may bool
			if may, former = l.standBy(ctx, seen); !may {
				l.sleep(ctx, pause)
				continue
			}
		}
		s, err := l.take(ctx, seen)
		former.close() // the process that led looks then whether it still does
		switch {
		case err == nil:
			l.lead(ctx, s)
		case errors.Is(err, errTaken):
			l.sleep(ctx, pause)
		default:
			l.cannot(ctx, err)
			l.sleep(ctx, tick)
		}
	}
	return nil
}

// cannot says why this process cannot take the lead, once for each reason. It does not ask for it
// for a time.
func (l *Lead) cannot(ctx context.Context, err error) {
	if l.statuses.Value().Problem != err.Error() {
		klog.FromContext(ctx).Info("Cannot take the lead of the node", "reason", err.Error())
	}
	l.set(func(s *Status) { s.Problem = err.Error() })
	l.refused = l.o.Clock.After(refusedPause)
}

func (l *Lead) sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-l.o.Clock.After(d):
	}
}
