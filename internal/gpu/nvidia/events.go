package nvidia

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	// waitStep is the longest duration of one wait for events, and so the longest wait of Close.
	// Shorter waits would cost an idle node more, because each wait wakes some threads.
	waitStep = 500 * time.Millisecond
	// waitPatience is the additional time for a wait before Next returns ErrNoAnswer.
	waitPatience = 10 * time.Second
	// minPause and maxPause are the shortest and longest pause after a useless wait: NVML answers at
	// once that a GPU is lost but no GPU admits a loss, or no GPU with events is left.
	minPause = time.Second
	maxPause = 5 * time.Second
	// waitGap is the average time between two waits: waits that end at once must not use a whole
	// core. Up to waitBurst waits may follow each other without a pause, to return simultaneous
	// events together. Then follows a pause of waitStep: many short pauses would cost more than the
	// waits.
	waitGap   = 10 * time.Millisecond
	waitBurst = 256
)

// Next returns the next event. A lost GPU has one EventLost and no further events; the other GPUs
// still have events.
//
// It returns the error of ctx when ctx ends. After any other error the session has no more events.
// The error wraps inventory.ErrNoAnswer if a wait hangs.
func (s *Session) Next(ctx context.Context) (inventory.Event, error) {
	for {
		if err := s.pauseBeforeWait(ctx); err != nil {
			return inventory.Event{}, err
		}
		s.spaceWaits(time.Now())
		o, err := s.wait(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return inventory.Event{}, ctx.Err()
			}
			return inventory.Event{}, fmt.Errorf("wait for events: %w", err)
		}
		if o.useless {
			s.uselessPause = min(max(2*s.uselessPause, minPause), maxPause)
		} else {
			s.uselessPause = 0
		}
		if o.found {
			s.mu.Lock()
			s.linksChanged = s.linksChanged || o.event.Kind == inventory.EventXID && linkXIDs[o.event.XID]
			s.mu.Unlock()
			return o.event, nil
		}
	}
}

// linkXIDs are the XIDs of NVLink errors.
var linkXIDs = map[uint64]bool{
	74: true, 144: true, 145: true, 146: true, 147: true, 148: true, 149: true, 150: true, 155: true,
}

// spaceWaits counts a wait that begins now, and sets the earliest time of the next one.
func (s *Session) spaceWaits(now time.Time) {
	if burst := now.Add(-waitBurst * waitGap); s.nextWait.Before(burst) {
		s.nextWait = burst
	}
	s.nextWait = s.nextWait.Add(waitGap)
}

// pauseBeforeWait waits until the next wait may begin.
func (s *Session) pauseBeforeWait(ctx context.Context) error {
	pause := s.uselessPause
	if time.Until(s.nextWait) > 0 {
		pause = max(pause, waitStep)
	}
	if pause == 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// wait makes one wait, in a job. An event that arrives after the end of ctx is kept for the next
// wait.
func (s *Session) wait(ctx context.Context) (outcome, error) {
	var o outcome
	var err error
	once := func() {
		if err = errClosed; !s.isStopped {
			s.register()
			o, err = s.watch.wait()
		}
	}
	keep := func() {
		if o.found {
			s.watch.queue = append(s.watch.queue, o.event)
		}
	}
	if noAnswer := s.driver.events.do(ctx, s.driver.waits, waitStep+waitPatience, once, keep); noAnswer != nil {
		return outcome{}, noAnswer
	}
	return o, err
}

// register registers for the events of newly identified GPUs, and of GPUs whose registration was
// not permitted before.
func (s *Session) register() {
	s.mu.Lock()
	joining := slices.Concat(s.registrationQueue, s.watch.dueRefused())
	s.registrationQueue = nil
	s.mu.Unlock()
	if len(joining) == 0 {
		return
	}
	refused := s.watch.add(joining)
	for _, g := range joining {
		s.noEvents(g.index, nil)
	}
	for _, d := range refused {
		s.noEvents(d.index, d.reason)
	}
}
