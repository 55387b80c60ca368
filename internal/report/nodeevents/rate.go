package nodeevents

import "time"

// A rate allows a burst of things at once, and one more after each interval.
type rate struct {
	burst int
	every time.Duration
}

// The rates of Events about one subject, such as a GPU or the driver, of all Events about a node,
// and of writes of a condition.
var (
	perSubject   = rate{burst: 5, every: 5 * time.Minute}
	perNode      = rate{burst: 25, every: time.Minute}
	perCondition = rate{burst: 10, every: time.Minute}
)

// after returns when the next thing is allowed, and the new value of used if the thing
// happens at now. The value of used is when the rate is unused again; zero at first. A
// time far in the future counts as now, because it means that the clock was set back.
func (r rate) after(used, now time.Time) (allowed, next time.Time) {
	whole := time.Duration(r.burst) * r.every
	if used.Before(now) || used.Sub(now) > whole {
		used = now
	}
	return used.Add(r.every - whole), used.Add(r.every)
}
