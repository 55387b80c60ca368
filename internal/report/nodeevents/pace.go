package nodeevents

import "time"

const (
	// worseAfter is how long something worse is waited for: often one fault follows another at once.
	worseAfter = time.Second
	// betterAfter is how long something better must last. It bounds the writes of a GPU that comes and
	// goes.
	betterAfter = 30 * time.Second
)

// A Pace says when a condition is to be written. Fraction, from 0 up to 1, spreads nodes that
// started together.
type Pace struct {
	// Fraction is a random number of this process.
	Fraction float64
	// Heartbeat is how often a condition that did not change is written again, give or take a fifth; 0
	// means never.
	Heartbeat time.Duration
	// First is how long the first condition of a healthy node waits.
	First time.Duration

	wanted Condition
	used   time.Time // of the rate of writes
	// since when the wanted condition is worse, or better, than that of the node; zero if it is not
	worse, better time.Time
}

// Wrote notes that the condition was written at a time.
func (p *Pace) Wrote(now time.Time) { _, p.used = perCondition.after(p.used, now) }

// Due returns when wanted is to be written; the zero time if it is not. The argument there is the
// condition of the node, nil if it has none, and written is when it was written last.
func (p *Pace) Due(there *Condition, written time.Time, wanted Condition, now time.Time) time.Time {
	due := p.due(there, written, wanted, now)
	if allowed, _ := perCondition.after(p.used, now); !due.IsZero() && due.Before(allowed) {
		return allowed
	}
	return due
}

func (p *Pace) due(there *Condition, written time.Time, wanted Condition, now time.Time) time.Time {
	switch {
	case there == nil && wanted.Status == True:
		p.since(&p.better, wanted, now)
		return p.better.Add(p.First)
	case there != nil && *there == wanted:
		p.worse, p.better, p.wanted = time.Time{}, time.Time{}, wanted
		return p.beat(written, now)
	case there == nil || wanted.worse(*there):
		p.better = time.Time{}
		p.since(&p.worse, p.wanted, now)
		p.wanted = wanted
		return p.worse.Add(worseAfter)
	}
	p.worse = time.Time{}
	p.since(&p.better, wanted, now)
	return p.better.Add(betterAfter)
}

// since notes since when something is wanted; from now, if that is something else than before.
func (p *Pace) since(at *time.Time, wanted Condition, now time.Time) {
	if at.IsZero() || wanted != p.wanted || at.After(now) {
		*at = now
	}
	p.wanted = wanted
}

// beat returns when a condition that is right is written again.
func (p *Pace) beat(written, now time.Time) time.Time {
	if p.Heartbeat == 0 {
		return time.Time{}
	}
	if written.After(now.Add(p.Heartbeat)) { // the clock went back
		return now
	}
	return written.Add(time.Duration((0.8 + 0.4*p.Fraction) * float64(p.Heartbeat)))
}
