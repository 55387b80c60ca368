package holders

import "time"

// A Lasting condition counts once it has lasted for some time.
type Lasting struct {
	since  time.Time // since when it lasts; zero if it does not
	Reason string    // why it counts; empty if it does not
}

// Update records whether the condition is true now. The condition counts, with this reason, once it
// has been true for the time least.
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

// IsDue reports whether the condition will start to count at the next update.
func (l Lasting) IsDue(now time.Time, least time.Duration) bool {
	return !l.Counts() && !l.since.IsZero() && now.Sub(l.since) >= least
}
