package monitor

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// A waiter waits for the outcome of the next look, or of releasing the driver.
type waiter struct {
	outcome chan<- error
	want    want
}

// A want is what a waiter wants of the driver.
type want int

// The wants.
const (
	wantLook    want = iota // that it is looked at
	wantRelease             // that it is released
	wantEither              // that either is over
)

// ErrResumed is the answer to a Quiesce that a Resume overtook: the driver was not released.
var ErrResumed = errors.New("the driver was not released: resume was asked for meanwhile")

// Only a loop changes the state. It never waits for the driver: looks are made in other goroutines,
// so that an XID is published while a look is under way.
type loop struct {
	*Monitor
	state   nodeState
	prober  *prober
	samples sampler
	start   func(func() error)
	timer   *time.Timer

	faults *ledger.FaultWriter // nil without a state directory
	kept   ledger.Book         // what it was offered last
	// recalled gets what earlier processes wrote down; nil unless the disk hung at the start.
	recalled <-chan memory
	followed bool // what the ledger has is taken in

	looking bool      // a look is under way
	looked  bool      // a look has ended
	next    time.Time // when to look next
	began   time.Time // when the last look began
	refused int       // how often in a row there was no session to be had

	quiesced time.Time // since when the driver is released until Resume; zero if it is not
	closed   bool      // there is no session, because of that

	reopen time.Time // when to open another session in the place of this one; zero for not at all
	asked  time.Time // since when that is wanted
	breaks int       // how often in a row one did not last

	pending []inventory.Event // of GPUs or MIG devices that only the next look will know

	waiters, informed []waiter      // those of a look that has not begun yet, and of the look that is running
	driverCalls       []driverCall  // to run in the course of that look
	sessionless       []sessionless // to run before that look
}

func newLoop(m *Monitor, e *prober, start func(func() error)) *loop {
	return &loop{
		Monitor: m, prober: e, samples: newSampler(m), start: start,
		state: nodeState{
			policy: m.options.Policy, metrics: m.options.Metrics,
			gpus: make(map[string]health.GPU), unanswered: make(map[string]time.Time), noted: ledger.NewBook(),
			withheldGPUs: make(map[string]inventory.Health),
		},
	}
}

// run is the loop. It returns when ctx ends and no look is under way any more.
func (l *loop) run(ctx context.Context) {
	l.timer = time.NewTimer(0)
	defer l.timer.Stop()
	for {
		l.begin(ctx)
		l.beginSamples(ctx)
		l.rest()
		select {
		case <-ctx.Done():
			if l.looking {
				<-l.looks
			}
			return
		case <-l.timer.C:
		case event := <-l.events:
			l.event(ctx, event)
		case err := <-l.broken:
			l.eventsEnded(ctx, err)
		case look := <-l.looks:
			l.looking = false
			l.samples.goOn()
			l.state.cleared(look.cleared)
			switch {
			case look.released:
				if l.closed = l.isQuiesced() && look.err == nil; l.closed {
					l.informed = append(l.informed, l.waiters...) // no look follows
					l.waiters = nil
				}
			case l.isQuiesced(): // what is known stays as it was
				look.err = ErrQuiesced
			default:
				l.look(ctx, look)
			}
			l.publish(ctx)
			l.inform(look)
		case results := <-l.samples.results:
			l.endSamples(ctx, results)
		case request := <-l.requests:
			request(l)
		case m := <-l.recalled:
			l.recalled = nil
			l.takeInLate(ctx, m)
		}
		l.publish(ctx)
	}
}

// isQuiesced reports whether the driver is released.
func (l *loop) isQuiesced() bool { return !l.quiesced.IsZero() }

// event folds an event in, and asks for a look, which decides.
func (l *loop) event(ctx context.Context, e inventory.Event) {
	klog.FromContext(ctx).V(2).Info("Event", "kind", e.Kind, "gpu", e.UUID, "xid", e.XID, "gi", e.GI, "ci", e.CI)
	l.samples.xid(l.state.identified(e))
	if l.state.event(e, time.Now()) && len(l.pending) < maxPending {
		l.pending = append(l.pending, e)
	}
	if e.Kind == inventory.EventBinding {
		l.renew()
	}
	l.state.retryFor(e, time.Now())
	l.nudge()
}

// eventsEnded has another session opened after the events of this one ended.
func (l *loop) eventsEnded(ctx context.Context, err error) {
	l.renew()
	klog.FromContext(ctx).Info("The driver has no more events, will open another session", "reason", err.Error(),
		"after", time.Until(l.reopen))
}

// renew decides when to open another session in the place of this one: at once, unless that keeps
// happening.
func (l *loop) renew() {
	if !l.reopen.IsZero() {
		return // it is going to be
	}
	now := time.Now()
	if now.Sub(l.state.facts.Opened) >= provenSession {
		l.breaks = 0
	}
	l.asked, l.reopen = now, now
	if l.breaks > 0 {
		l.reopen = now.Add(backoff(l.breaks - 1))
	}
	l.breaks++
	l.next = earlier(l.next, l.reopen)
}

// backoff returns how long to wait after so many failures in a row.
func backoff(failures int) time.Duration { return min(reopenFirst<<min(failures, 10), reopenMost) }

// nudge asks for a look as soon as the gap allows.
func (l *loop) nudge() {
	l.next = earlier(l.next, later(time.Now(), l.began.Add(l.options.Gap)))
}

// begin begins a look if it is time for one.
func (l *loop) begin(ctx context.Context) {
	now := time.Now()
	if l.looking || l.closed || now.Before(l.next) {
		return
	}
	l.samples.hold()
	if l.isQuiesced() {
		l.looking, l.next = true, now.Add(l.state.poll(l.options))
		l.informed, l.waiters, l.driverCalls, l.sessionless = l.waiters, nil, nil, nil
		l.start(func() error {
			l.looks <- look{released: true, err: l.prober.close(ctx, closePatience)}
			return nil
		})
		return
	}
	reopen, retry := l.state.retry(now)
	if !l.reopen.IsZero() && !now.Before(l.reopen) {
		reopen = true
		l.reopen = time.Time{}
	}
	l.looking, l.began = true, now
	l.next = now.Add(l.state.poll(l.options))
	driverCalls, sessionless := l.driverCalls, l.sessionless
	l.informed, l.waiters, l.driverCalls, l.sessionless = l.waiters, nil, nil, nil
	l.start(func() error {
		l.prober.without(ctx, sessionless)
		l.looks <- l.prober.look(ctx, reopen, retry, driverCalls)
		return nil
	})
}

// look folds a look in and decides when to look next.
func (l *loop) look(ctx context.Context, look look) {
	now := time.Now()
	l.looked = true
	l.state.began = l.began
	l.state.look(look, now)
	if look.opened.After(l.asked) {
		l.reopen = time.Time{} // the look found out by itself
	}
	if look.first {
		for _, g := range look.unwatched {
			klog.FromContext(ctx).Info("GPU gives no events: its faults are found when it is looked at", "index", g.Index,
				"reason", g.Reason)
		}
	}
	for _, e := range l.pending {
		if l.state.lateEvent(e, now) {
			klog.FromContext(ctx).Info("Event of a device that does not exist", "kind", e.Kind, "gpu", e.UUID, "xid", e.XID,
				"gi", e.GI, "ci", e.CI)
		}
	}
	l.pending = nil
	// A nudge that came while the look was under way is still to be followed.
	l.next = earlier(l.next, now.Add(l.pace(look)))
	if !l.reopen.IsZero() {
		l.next = earlier(l.next, l.reopen)
	}
	select {
	case <-l.first:
	default:
		l.publish(ctx)
		l.firstErr = look.err
		close(l.first)
	}
}

// inform tells those who asked for the look that has ended how it ended.
func (l *loop) inform(look look) {
	for _, a := range l.informed {
		switch {
		case a.want == wantEither && (look.released || errors.Is(look.err, ErrQuiesced)):
			a.outcome <- nil
		case a.want == wantLook && look.released:
			a.outcome <- ErrQuiesced
		case a.want == wantRelease && !look.released:
			a.outcome <- ErrResumed
		default:
			a.outcome <- look.err
		}
	}
	l.informed = nil
}

// pace returns how long to wait after a look for the next one.
func (l *loop) pace(look look) time.Duration {
	switch {
	case look.err != nil && !errors.Is(look.err, inventory.ErrNoAnswer):
		l.refused++
		return backoff(l.refused - 1)
	case look.err != nil:
		return l.state.poll(l.options)
	}
	l.refused = 0
	return l.state.pace(l.options, look.pinned)
}

// rest sets the timer to when something has to be done if nothing happens.
func (l *loop) rest() {
	until := l.state.limit()
	if !l.looking && !l.closed && (until.IsZero() || l.next.Before(until)) {
		until = l.next
	}
	if due := l.samples.due; l.maySample() && (until.IsZero() || due.Before(until)) {
		until = due
	}
	if until.IsZero() {
		l.timer.Stop()
		return
	}
	l.timer.Reset(max(0, time.Until(until)))
}

// publish hands out what is known if it has changed, and logs how.
func (l *loop) publish(ctx context.Context) {
	if !l.looked {
		return
	}
	l.state.time(time.Now())
	before := l.state.published
	if after, changed := l.state.compose(); changed {
		l.snapshots.Publish(after)
		countRecoveries(l.options.Metrics, before, after)
		logChanges(ctx, before, after, l.state.node)
	}
	l.keep()
}

// keep has the ledger follow, after everybody else has heard.
func (l *loop) keep() {
	if l.faults == nil || l.kept.Empty() && !l.state.wantsBook() {
		return
	}
	if b := l.state.book(l.options.BootID); !b.Equal(l.kept) {
		l.kept = b
		l.faults.Offer(b)
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
