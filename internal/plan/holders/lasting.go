package holders

import "time"

// A Lasting condition counts once it has lasted for some time.
type Lasting struct {
	since  time.Time // since when it lasts; zero if it does not
	Reason string    // why it counts; empty if it does not
}

// Update records whether the condition is true now. The condition counts, with this
// reason, once it has been true for the time least.
func (l *Lasting) Update(is bool, now time.Time, least time.Duration, reason string) {
	switch {
	case !is:
		*l = Lasting{}
	case l.since.IsZero():
		*l = Lasting{since: now}
	case now.Sub(l.since) >= least:
		l.Reason = reason
	}
}

// Counts reports whether the condition counts.
func (l Lasting) Counts() bool { return l.Reason != "" }

// DueAt returns when the condition starts to count at the next update, if it stays
// true; zero if the condition counts or is not true.
func (l Lasting) DueAt(least time.Duration) time.Time {
	if l.Counts() || l.since.IsZero() {
		return time.Time{}
	}
	return l.since.Add(least)
}
