package listing

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	// CompareSoon is the time between sending a list and comparing the kubelet's account with it.
	// The kubelet processes a list within milliseconds, and a second leaves room for a busy node.
	CompareSoon = time.Second
	// CompareLater is the longest pause between two comparisons. Each pause is twice as long as the
	// previous pause.
	CompareLater = 30 * time.Second
	// retrySoon is the first pause after a failed question or a differing account.
	retrySoon = 100 * time.Millisecond
	// differsFor is how long the account must differ before the difference counts.
	differsFor = time.Second
	// suspectFor is the greatest age of another program's socket at which the program counts as the
	// cause of a difference.
	suspectFor = time.Minute
	// endsWithin is how long after its socket another program may end its stream.
	endsWithin = 10 * time.Second
	// disputeFirst and disputeMost are the shortest and the longest time between two registrations
	// caused by a difference.
	disputeFirst = 10 * time.Second
	disputeMost  = 5 * time.Minute
)

// Disputes limit how often a resource registers again because the kubelet's account differs from
// the list. A new registration does not end every difference. The zero value is ready.
type Disputes struct {
	next time.Time     // no earlier
	wait time.Duration // between the last one and next
}

// register reports whether to register again now, and otherwise how long to wait.
func (d *Disputes) register(now time.Time) (wait time.Duration, ok bool) {
	if now.Before(d.next) {
		return d.next.Sub(now), false
	}
	if now.Sub(d.next) > d.wait { // the last one is long ago
		d.wait = disputeFirst
	} else {
		d.wait = min(2*d.wait, disputeMost)
	}
	d.next = now.Add(d.wait)
	return 0, true
}

// Why a registration ends after a comparison.
var (
	ErrDisagrees = errors.New("the kubelet's devices differ from the list")
	// ErrOtherEnded says that the kubelet may have stopped this server together with the later one.
	ErrOtherEnded = errors.New("the server that registered after this server has stopped")
)

// A Verdict says what to do after a comparison.
type Verdict struct {
	End   error         // why a new registration is needed; nil if it is not
	Pause time.Duration // until the next comparison, if the registration stays
	// AwaitOther says that one of the Suspects may serve the resource. A new registration is needed
	// when it has ended.
	AwaitOther bool
	// Difference describes how the account differs from the list; empty if it does not.
	Difference string
	// Began says that the difference is new. No list may be sent from now on, because its cause is
	// unknown. Resume says that lists may be sent again.
	Began, Resume bool
}

// A Comparison is what a registration knows from comparing the kubelet's account with its list. A
// Socket identifies the socket of another program.
type Comparison[Socket comparable] struct {
	Agreed   bool          // the two have been equal at least once
	Pace     time.Duration // the last pause; the next ones grow from it
	Suspects []Socket      // of other programs that may be the cause of the difference

	disputes  *Disputes
	agreedNow bool      // the two have been equal since the list was sent
	since     time.Time // when they began to differ; zero if they do not
	// the sockets of other programs, with the times when they appeared; zero for a socket that is
	// older than the registration or has ended
	others map[Socket]time.Time
	// when a program that appeared after the registration was found to have ended; zero if none was
	otherEnded  time.Time
	agreedSince bool          // the two were equal after otherEnded
	retry       time.Duration // the pause after the next question that fails
}

// NewComparison returns the Comparison of a registration. The Disputes are those of all
// registrations of the resource.
func NewComparison[Socket comparable](d *Disputes) *Comparison[Socket] {
	return &Comparison[Socket]{disputes: d, Pace: CompareSoon, retry: retrySoon}
}

// Differs reports whether the account differed from the list at the last comparison.
func (c *Comparison[Socket]) Differs() bool { return !c.since.IsZero() }

// Send records that another list was sent.
func (c *Comparison[Socket]) Send() { c.Pace, c.since, c.agreedNow = CompareSoon, time.Time{}, false }

// SetOthers records the present sockets of other programs.
func (c *Comparison[Socket]) SetOthers(sockets []Socket, now time.Time) {
	before := c.others
	c.others = map[Socket]time.Time{}
	for _, socket := range sockets {
		came, known := before[socket]
		if !known && before != nil {
			came = now
		}
		c.others[socket] = came
	}
	for socket, came := range before {
		if _, there := c.others[socket]; !there && !came.IsZero() {
			c.otherEnded, c.agreedSince = now, false
		}
	}
}

// SetEnds records which programs have ended without removing their sockets. It asks only about
// sockets that appeared after the registration.
func (c *Comparison[Socket]) SetEnds(hasEnded func(Socket) bool, now time.Time) {
	for socket, came := range c.others {
		if !came.IsZero() && hasEnded(socket) {
			c.others[socket], c.otherEnded, c.agreedSince = time.Time{}, now, false
		}
	}
}

// Miss returns the Verdict after a question that the kubelet did not answer. A missing answer alone
// is no reason for a new registration.
func (c *Comparison[Socket]) Miss(now time.Time) Verdict {
	if !c.otherEnded.IsZero() && !c.agreedSince {
		return Verdict{End: ErrOtherEnded} // kubelet 1.37 goes by the list that it received last, 1.36 has stopped both
	}
	c.Pace, c.retry = c.retry, min(2*c.retry, CompareLater)
	// it may be long before there is an answer, and withdrawals do not wait for that
	resume := c.Differs() && now.Sub(c.since) >= differsFor && len(c.Suspects) == 0
	return Verdict{Pause: c.Pace, Resume: resume}
}

// Compare returns the Verdict after an answer. allocatable are the IDs in the kubelet's account, and
// list has the IDs of the healthy devices in the list.
func (c *Comparison[Socket]) Compare(allocatable, list []string, now time.Time) Verdict {
	var v Verdict
	switch {
	case !SameIDs(allocatable, list):
		v = c.differ(allocatable, list, now)
	case !c.agreedNow && !c.otherEnded.IsZero() && now.Sub(c.otherEnded) <= endsWithin:
		// After a list, the kubelet 1.36 counts its devices although it has stopped both servers.
		v.End = ErrOtherEnded
	default:
		c.Agreed, c.agreedNow, c.agreedSince, c.since, c.retry = true, true, true, time.Time{}, retrySoon
		v = Verdict{Pause: min(2*c.Pace, CompareLater), Resume: true}
	}
	c.Pace = v.Pause
	return v
}

// differ returns the Verdict about a difference between the account and the list.
func (c *Comparison[Socket]) differ(allocatable, list []string, now time.Time) Verdict {
	v := Verdict{Began: !c.Differs(), Difference: fmt.Sprintf(
		"the kubelet counts %d healthy devices, and the list has %d", len(allocatable), len(list))}
	if v.Began {
		c.since, c.Suspects, c.retry = now, nil, retrySoon
		for socket, came := range c.others {
			if !came.IsZero() && now.Sub(came) <= suspectFor {
				c.Suspects = append(c.Suspects, socket)
			}
		}
	}
	if len(allocatable) == 0 && c.agreedNow {
		// Another server has ended, and the kubelet 1.36 has stopped the endpoint in use. A kubelet
		// that has not counted this list yet may still be processing it.
		v.End = ErrDisagrees
	} else if lasted := now.Sub(c.since); lasted < differsFor {
		v.Pause = min(max(retrySoon, lasted), differsFor-lasted)
	} else if len(c.Suspects) > 0 {
		v.AwaitOther = true
	} else if wait, ok := c.disputes.register(now); ok {
		v.End = ErrDisagrees
	} else {
		v.Pause, v.Resume = min(wait, CompareLater), true
		v.Difference += "; a new registration did not repair this, and the next one is at " +
			now.Add(wait).UTC().Format(time.RFC3339)
	}
	return v
}

// SameIDs reports whether a and b have the same IDs, ignoring order and repetitions.
func SameIDs(a, b []string) bool {
	sorted := func(ids []string) []string { return slices.Compact(slices.Sorted(slices.Values(ids))) }
	return slices.Equal(sorted(a), sorted(b))
}
