package nodeevents

import "time"

// A rate allows a number of things at once, and one more each time that an interval has passed.
type rate struct {
	burst int
	every time.Duration
}

// The rates of Events of one subject, such as a GPU or the driver, and of all of a node; and of
// writes of a condition.
var (
	perSubject   = rate{burst: 5, every: 5 * time.Minute}
	perNode      = rate{burst: 25, every: time.Minute}
	perCondition = rate{burst: 10, every: time.Minute}
)

// after returns when one more is allowed, and the new value of used if it is taken at now. used is
// when the rate is unused again; zero at first. A time far in the future, which only a clock that
// went back makes, counts as now.
func (r rate) after(used, now time.Time) (allowed, next time.Time) {
	whole := time.Duration(r.burst) * r.every
	if used.Before(now) || used.Sub(now) > whole {
		used = now
	}
	return used.Add(r.every - whole), used.Add(r.every)
}
