package nodeevents

import "time"

const (
	// worseAfter is the delay of deteriorations: often one fault follows another at once.
	worseAfter = time.Second
	// betterAfter is how long an improvement must last. It limits the writes for a GPU that flaps.
	betterAfter = 30 * time.Second
)

// A Pace says when to write a condition.
type Pace struct {
	// Fraction is a random number of this process from 0 up to 1. It spreads the writes of nodes
	// that started together.
	Fraction float64
	// Heartbeat is the interval of writes without a change, plus or minus a fifth; 0 means never.
	Heartbeat time.Duration

	wanted Condition
	used   time.Time // use of the rate of writes
	// when the wanted condition became worse, or better, than the node's; zero if it is neither
	worse, better time.Time
}

// RecordWrite records a write of the condition.
func (p *Pace) RecordWrite(now time.Time) { _, p.used = perCondition.after(p.used, now) }

// Due returns when to write wanted; the zero time if no write is needed. The condition of the node
// is nodes, nil if there is none; its last write was at written.
func (p *Pace) Due(nodes *Condition, written time.Time, wanted Condition, now time.Time) time.Time {
	due := p.due(nodes, written, wanted, now)
	if allowed, _ := perCondition.after(p.used, now); !due.IsZero() && due.Before(allowed) {
		return allowed
	}
	return due
}

func (p *Pace) due(nodes *Condition, written time.Time, wanted Condition, now time.Time) time.Time {
	switch {
	case nodes == nil && wanted.Status == True:
		p.since(&p.better, wanted, now)
		return p.better
	case nodes != nil && *nodes == wanted:
		p.worse, p.better, p.wanted = time.Time{}, time.Time{}, wanted
		return p.heartbeat(written, now)
	case nodes == nil || wanted.worse(*nodes):
		p.better = time.Time{}
		p.since(&p.worse, p.wanted, now)
		p.wanted = wanted
		return p.worse.Add(worseAfter)
	}
	p.worse = time.Time{}
	p.since(&p.better, wanted, now)
	return p.better.Add(betterAfter)
}

// since sets at to now if another condition is wanted than before.
func (p *Pace) since(at *time.Time, wanted Condition, now time.Time) {
	if at.IsZero() || wanted != p.wanted || at.After(now) {
		*at = now
	}
	p.wanted = wanted
}

// heartbeat returns when to repeat the write of a correct condition.
func (p *Pace) heartbeat(written, now time.Time) time.Time {
	if p.Heartbeat == 0 {
		return time.Time{}
	}
	if written.After(now.Add(p.Heartbeat)) { // the clock was set back
		return now
	}
	return written.Add(time.Duration((0.8 + 0.4*p.Fraction) * float64(p.Heartbeat)))
}
