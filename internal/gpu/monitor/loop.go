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

// A waiter waits for the result of the next look, or of a release of the driver.
type waiter struct {
	outcome chan<- error
	want    want
}

// A want is the kind of result that a waiter needs.
type want int

// The kinds of results.
const (
	wantLook    want = iota // a look
	wantRelease             // a release of the driver
	wantAny                 // either of them
)

// ErrResumed is the error of a Quiesce followed by a Resume before the driver was released.
var ErrResumed = errors.New("the driver was not released: resume was requested meanwhile")

// A loop is the only owner of the state. It never waits for the driver: looks run in other
// goroutines, and an XID is published even during a look.
type loop struct {
	*Monitor
	state   nodeState
	prober  *prober
	samples sampler
	start   func(func() error)
	timer   *time.Timer

	faults      *ledger.FaultWriter // nil without a state directory
	lastEntries ledger.Book         // the entries offered last
	// lateSavedState receives the state saved by earlier processes; nil unless the disk hung at the
	// start.
	lateSavedState <-chan savedState
	ledgerMerged   bool // the entries of the ledger are merged

	lookRunning  bool      // a look is running
	hasLooked    bool      // a look has ended
	nextLook     time.Time // time of the next look
	lookStart    time.Time // start of the last look
	openFailures int       // failed attempts to open a session in a row

	quiescedSince   time.Time // when the driver was released until Resume; zero if it is not released
	isForChange     bool      // the driver was released by QuiesceForChange
	sessionReleased bool      // the driver is released: there is no session

	reopenAt        time.Time // when to replace this session by another one; zero for never
	reopenRequested time.Time // when the replacement was requested
	shortSessions   int       // sessions in a row without lasting events

	pendingEvents []inventory.Event // events of GPUs or MIG devices that are unknown before the next look

	waiters, lookWaiters []waiter      // the waiters for the next look, and for the running look
	driverCalls          []driverCall  // calls during the next look
	sessionless          []sessionless // functions to run before the next look, without a session
}

func newLoop(m *Monitor, e *prober, start func(func() error)) *loop {
	return &loop{
		Monitor: m, prober: e, samples: newSampler(m), start: start,
		state: nodeState{
			policy: m.options.Policy, metrics: m.options.Metrics,
			gpus: make(map[string]health.GPU), unansweredSince: make(map[string]time.Time),
			restoredEntries: ledger.NewBook(),
			withheldGPUs:    make(map[string]inventory.Health),
		},
	}
}

// run is the loop. It returns when ctx has ended and no look is running.
func (l *loop) run(ctx context.Context) {
	l.timer = time.NewTimer(0)
	defer l.timer.Stop()
	for {
		l.beginLook(ctx)
		l.beginSamples(ctx)
		l.setTimer()
		select {
		case <-ctx.Done():
			if l.lookRunning {
				<-l.looks
			}
			return
		case <-l.timer.C:
		case event := <-l.events:
			l.event(ctx, event)
		case err := <-l.eventErrors:
			l.handleEventsEnd(ctx, err)
		case look := <-l.looks:
			l.lookRunning = false
			l.samples.resume()
			l.state.foldCleared(look.clearedGPUs)
			switch {
			case look.sessionClosed:
				if l.sessionReleased = l.isQuiesced() && look.err == nil; l.sessionReleased {
					l.lookWaiters = append(l.lookWaiters, l.waiters...) // no look follows
					l.waiters = nil
				}
			case l.isQuiesced(): // the state is unchanged
				look.err = ErrQuiesced
			default:
				l.endLook(ctx, look)
			}
			l.publish(ctx)
			l.answerWaiters(look)
		case results := <-l.samples.results:
			l.endSamples(ctx, results)
		case request := <-l.requests:
			l.receiveRelease() // which may be older: Status after a Quiesce shows it
			request(l)
		case request := <-l.releases:
			request(l)
		case m := <-l.lateSavedState:
			l.lateSavedState = nil
			l.restoreLate(ctx, m)
		}
		l.publish(ctx)
	}
}

// receiveRelease runs every Quiesce and Resume that is not received yet.
func (l *loop) receiveRelease() {
	select {
	case request := <-l.releases:
		request(l)
	default:
	}
}

// isQuiesced reports whether the driver is released.
func (l *loop) isQuiesced() bool { return !l.quiescedSince.IsZero() }

// event folds in an event and requests a look.
func (l *loop) event(ctx context.Context, e inventory.Event) {
	klog.FromContext(ctx).V(2).Info("Event", "kind", e.Kind, "gpu", e.UUID, "xid", e.XID, "gi", e.GI, "ci", e.CI)
	l.samples.noteXID(l.state.withUUID(e))
	if l.state.foldEvent(e, time.Now()) && len(l.pendingEvents) < maxPending {
		l.pendingEvents = append(l.pendingEvents, e)
	}
	if e.Kind == inventory.EventBinding {
		l.reopenSession()
	}
	l.state.retryFor(e, time.Now())
	l.requestLook()
}

// handleEventsEnd requests another session after the end of this session's events.
func (l *loop) handleEventsEnd(ctx context.Context, err error) {
	l.reopenSession()
	klog.FromContext(ctx).Info("No more driver events: another session will be opened", "reason", err.Error(),
		"after", time.Until(l.reopenAt))
}

// reopenSession requests another session in place of this one: at once, or later if sessions keep
// failing.
func (l *loop) reopenSession() {
	if !l.reopenAt.IsZero() {
		return // already requested
	}
	now := time.Now()
	if now.Sub(l.state.facts.Opened) >= provenSession {
		l.shortSessions = 0
	}
	l.reopenRequested, l.reopenAt = now, now
	if l.shortSessions > 0 {
		l.reopenAt = now.Add(backoff(l.shortSessions - 1))
	}
	l.shortSessions++
	l.nextLook = earlier(l.nextLook, l.reopenAt)
}

// backoff returns the wait after a number of failures in a row.
func backoff(failures int) time.Duration { return min(reopenFirst<<min(failures, 10), reopenMost) }

// requestLook requests a look as soon as the gap allows.
func (l *loop) requestLook() {
	l.nextLook = earlier(l.nextLook, later(time.Now(), l.lookStart.Add(l.options.Gap)))
}

// beginLook starts a look if one is due.
func (l *loop) beginLook(ctx context.Context) {
	now := time.Now()
	if l.lookRunning || l.sessionReleased || now.Before(l.nextLook) {
		return
	}
	l.samples.suspend()
	if l.isQuiesced() {
		l.lookRunning, l.nextLook = true, now.Add(l.state.poll(l.options))
		l.lookWaiters, l.waiters, l.driverCalls, l.sessionless = l.waiters, nil, nil, nil
		l.start(func() error {
			l.looks <- look{sessionClosed: true, err: l.prober.close(ctx, closePatience)}
			return nil
		})
		return
	}
	reopen, retry := l.state.retry(now)
	if !l.reopenAt.IsZero() && !now.Before(l.reopenAt) {
		reopen = true
		l.reopenAt = time.Time{}
	}
	l.lookRunning, l.lookStart = true, now
	l.nextLook = now.Add(l.state.poll(l.options))
	driverCalls, sessionless := l.driverCalls, l.sessionless
	l.lookWaiters, l.waiters, l.driverCalls, l.sessionless = l.waiters, nil, nil, nil
	l.start(func() error {
		l.prober.runSessionless(ctx, sessionless)
		l.looks <- l.prober.look(ctx, reopen, retry, driverCalls)
		return nil
	})
}

// endLook folds in the result of a look and sets the time of the next one.
func (l *loop) endLook(ctx context.Context, endLook look) {
	now := time.Now()
	l.hasLooked = true
	l.state.lookStart = l.lookStart
	l.state.foldLook(endLook, now)
	if endLook.sessionOpened.After(l.reopenRequested) {
		l.reopenAt = time.Time{} // the look opened another session by itself
	}
	if endLook.newSession {
		for _, g := range endLook.unwatched {
			klog.FromContext(ctx).Info("GPU has no driver events: its faults are found by polling only",
				"index", g.Index, "reason", g.Reason)
		}
	}
	for _, e := range l.pendingEvents {
		if l.state.foldLateEvent(e, now) {
			klog.FromContext(ctx).Info("Event of an unknown device", "kind", e.Kind, "gpu", e.UUID, "xid", e.XID,
				"gi", e.GI, "ci", e.CI)
		}
	}
	l.pendingEvents = nil
	// A request made during the look stays in force.
	l.nextLook = earlier(l.nextLook, now.Add(l.pace(endLook)))
	if !l.reopenAt.IsZero() {
		l.nextLook = earlier(l.nextLook, l.reopenAt)
	}
	select {
	case <-l.first:
	default:
		l.publish(ctx)
		l.firstErr = endLook.err
		close(l.first)
	}
}

// answerWaiters sends the result of the look to its waiters.
func (l *loop) answerWaiters(look look) {
	for _, a := range l.lookWaiters {
		switch {
		case a.want == wantAny && (look.sessionClosed || errors.Is(look.err, ErrQuiesced)):
			a.outcome <- nil
		case a.want == wantLook && look.sessionClosed:
			a.outcome <- ErrQuiesced
		case a.want == wantRelease && !look.sessionClosed:
			a.outcome <- ErrResumed
		default:
			a.outcome <- look.err
		}
	}
	l.lookWaiters = nil
}

// pace returns the wait from a look to the next one.
func (l *loop) pace(look look) time.Duration {
	switch {
	case look.err != nil && !errors.Is(look.err, inventory.ErrNoAnswer):
		l.openFailures++
		return backoff(l.openFailures - 1)
	case look.err != nil:
		return l.state.poll(l.options)
	}
	l.openFailures = 0
	return l.state.pace(l.options, look.sessionPinned)
}

// setTimer sets the timer to the next time with work to do.
func (l *loop) setTimer() {
	until := l.state.limit()
	if !l.lookRunning && !l.sessionReleased && (until.IsZero() || l.nextLook.Before(until)) {
		until = l.nextLook
	}
	if due := l.samples.nextSample; l.maySample() && (until.IsZero() || due.Before(until)) {
		until = due
	}
	if until.IsZero() {
		l.timer.Stop()
		return
	}
	l.timer.Reset(max(0, time.Until(until)))
}

// publish publishes and logs a changed state.
func (l *loop) publish(ctx context.Context) {
	if !l.hasLooked {
		return
	}
	l.state.foldTime(time.Now())
	before := l.state.lastPublished
	if after, changed := l.state.compose(); changed {
		l.snapshots.Publish(after)
		countRecoveries(l.options.Metrics, before, after)
		logChanges(ctx, before, after, l.state.nodeReason)
	}
	l.saveEntries()
}

// saveEntries passes changed entries to the ledger. It comes last: the disk may be slow.
func (l *loop) saveEntries() {
	if l.faults == nil || l.lastEntries.Empty() && !l.state.hasLedgerEntries() {
		return
	}
	if b := l.state.ledgerEntries(l.options.BootID); !b.Equal(l.lastEntries) {
		l.lastEntries = b
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
