package nvidia

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	// waitStep is how long one wait for events lasts at most: so long Close may have to wait. Shorter
	// ones cost more of an idle node: each wakes some threads.
	waitStep = 500 * time.Millisecond
	// waitPatience is how much longer a wait may take before Next says that the driver does not
	// answer.
	waitPatience = 10 * time.Second
	// minRest and maxRest are the shortest and the longest pause after a wait that was of no use: NVML
	// answers at once that a GPU is lost, but no GPU says that it is; or no GPU is left that gives
	// events.
	minRest = time.Second
	maxRest = 5 * time.Second
	// waitGap is the average time between two waits: waits that end at once must not use a whole core.
	// Up to waitBurst waits may follow each other without a pause, so that many events that happen
	// together are returned together. After that there is a pause of waitStep: many short pauses would
	// cost more than the waits.
	waitGap   = 10 * time.Millisecond
	waitBurst = 256
)

// Next waits for an event and returns it. A GPU that is lost gives one EventLost and no more
// events. The events of the other GPUs still come.
//
// It returns the error of ctx when ctx ends. Any other error means that this session has no more
// events: it wraps inventory.ErrNoAnswer when a wait hangs.
func (s *Session) Next(ctx context.Context) (inventory.Event, error) {
	for {
		if err := s.rest(ctx); err != nil {
			return inventory.Event{}, err
		}
		s.space(time.Now())
		o, err := s.wait(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return inventory.Event{}, ctx.Err()
			}
			return inventory.Event{}, fmt.Errorf("wait for events: %w", err)
		}
		if o.useless {
			s.useless = min(max(2*s.useless, minRest), maxRest)
		} else {
			s.useless = 0
		}
		if o.found {
			s.mu.Lock()
			s.relink = s.relink || o.event.Kind == inventory.EventXID && linkXIDs[o.event.XID]
			s.mu.Unlock()
			return o.event, nil
		}
	}
}

// linkXIDs are the XIDs that say that something happened to an NVLink.
var linkXIDs = map[uint64]bool{
	74: true, 144: true, 145: true, 146: true, 147: true, 148: true, 149: true, 150: true, 155: true,
}

// space counts a wait that begins now, and sets the time before which the next one may not begin.
func (s *Session) space(now time.Time) {
	if burst := now.Add(-waitBurst * waitGap); s.due.Before(burst) {
		s.due = burst
	}
	s.due = s.due.Add(waitGap)
}

// rest lasts until the next wait may begin.
func (s *Session) rest(ctx context.Context) error {
	pause := s.useless
	if time.Until(s.due) > 0 {
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

// wait makes one wait, in a job. An event that comes after ctx ended is kept for the next one.
func (s *Session) wait(ctx context.Context) (outcome, error) {
	var o outcome
	var err error
	once := func() {
		if err = errClosed; !s.stopped {
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

// register registers for the events of GPUs that were identified since the last wait, or for which
// it was not permitted.
func (s *Session) register() {
	s.mu.Lock()
	joining := slices.Concat(s.joining, s.watch.again())
	s.joining = nil
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
