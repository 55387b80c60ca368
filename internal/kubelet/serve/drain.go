package serve

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// settled is how long after a change kubelet no longer gives devices that it chose before.
	settled = 5 * time.Second
	// drainAfter is how long GPUs wait for pods that follow one another, before the first of them is
	// withdrawn.
	drainAfter = 10 * time.Second
	// drainFor is how long a GPU is withdrawn at first, and drainMost at most. Each further time is
	// twice as long.
	drainFor  = 30 * time.Second
	drainMost = 10 * time.Minute
)

// A drain withdraws the old form of one GPU after another, where pods that follow one another would
// have held it for ever. The zero value withdraws nothing.
type drain struct {
	began time.Time // since when GPUs wait for pods; zero if none does
	since time.Time // since when GPUs wait for pods that follow one another; zero if none does
	next  string    // the GPU that is to be withdrawn when the change may proceed; empty for none
	gpu   string    // the GPU that is withdrawn; empty for none
	until time.Time // of that
	tried map[string]int
}

// withdraws reports whether the old form of a GPU is not on offer.
func (d *drain) withdraws(gpu string) bool { return d.gpu != "" && d.gpu == gpu }

// due reports whether another GPU is to be withdrawn at this time.
func (d *drain) due(now time.Time) bool {
	switch {
	case d.since.IsZero() || d.next != "":
		return false
	case d.gpu != "":
		return !now.Before(d.until)
	}
	return now.Sub(d.since) >= drainAfter
}

// begin withdraws the GPU that is next.
func (d *drain) begin(now time.Time) {
	d.gpu, d.next = d.next, ""
	d.until = now.Add(min(drainFor<<min(d.tried[d.gpu], 10), drainMost))
	if d.tried == nil {
		d.tried = map[string]int{}
	}
	d.tried[d.gpu]++
}

// withdraw decides which GPU is withdrawn: of those that wait for pods which follow one another,
// the one that was withdrawn least often. Where changes are announced, it waits for that.
func (s *Set) withdraw(old map[resource.Device]*oldForm) {
	d, now := &s.forms.drain, s.collaborators.Clock.Now()
	if d.gpu != "" && d.due(now) {
		s.endDrain(old)
	}
	waits, busy := false, map[string]bool{}
	for _, f := range old {
		if len(f.held) == 0 || f.kept || s.waitFor(f) == 0 {
			continue
		}
		waits = true
		if gpu := f.device.GPU; gpu == d.gpu || !d.began.IsZero() && f.given.Sub(d.began) >= settled {
			busy[gpu] = true
		}
	}
	switch {
	case !waits:
		*d = drain{}
		return
	case d.began.IsZero():
		d.began = now
	case len(busy) == 0:
		d.since = time.Time{}
	case d.since.IsZero():
		d.since = now
	}
	if !busy[d.next] {
		d.next = ""
	}
	if !busy[d.gpu] {
		d.gpu = "" // it has its new form
	}
	if !d.due(now) {
		return
	}
	d.next = slices.MinFunc(slices.Collect(maps.Keys(busy)), func(a, b string) int {
		return cmp.Or(d.tried[a]-d.tried[b], cmp.Compare(a, b))
	})
	if !s.asked.options.Announce {
		d.begin(now)
	}
}

// endDrain puts a GPU that pods have held for too long on offer in its old form again.
func (s *Set) endDrain(old map[resource.Device]*oldForm) {
	for _, f := range old {
		if f.device.GPU != s.forms.drain.gpu {
			continue
		}
		f.given = time.Time{}
		for _, id := range slices.Concat(f.held, f.others) {
			d := f.list.departing[id]
			d.given = time.Time{}
			f.list.departing[id] = d
		}
	}
	s.forms.drain.gpu = ""
}

// waitFor returns how many devices of the plan wait for an old form.
func (s *Set) waitFor(f *oldForm) int {
	form := resource.HeldShape{Resource: f.device.Resource, ID: f.device.ID, GPU: f.device.GPU}
	waiting := 0
	for _, r := range s.asked.plan.Resources {
		for d := range r.All() {
			if form.Conflicts(d) {
				waiting++
			}
		}
	}
	return waiting
}
