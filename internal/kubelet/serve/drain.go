package serve

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// settleTime is the time after a change until the kubelet no longer gives devices chosen before.
	settleTime = 5 * time.Second
	// drainAfter is how long GPUs wait for successive pods before the first GPU is withdrawn.
	drainAfter = 10 * time.Second
	// drainFor is how long a GPU is withdrawn at first. Each further time is twice as long, up to
	// drainMost.
	drainFor  = 30 * time.Second
	drainMost = 10 * time.Minute
)

// A drain withdraws the old form of one GPU after another, where successive pods would otherwise
// hold the GPU forever. The zero value withdraws nothing.
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

// begin withdraws the next GPU.
func (d *drain) begin(now time.Time) {
	d.gpu, d.next = d.next, ""
	d.until = now.Add(min(drainFor<<min(d.tried[d.gpu], 10), drainMost))
	if d.tried == nil {
		d.tried = map[string]int{}
	}
	d.tried[d.gpu]++
}

// withdraw chooses the GPU to withdraw: of the GPUs that wait for successive pods, the GPU
// withdrawn least often. With announced changes, the withdrawal waits for the approval.
func (s *Servers) withdraw(old map[resource.Device]*oldForm) {
	d, now := &s.forms.drain, s.collaborators.Clock.Now()
	if d.gpu != "" && d.due(now) {
		s.endDrain(old)
	}
	waits, busy := false, map[string]bool{}
	for _, f := range old {
		if len(f.held) == 0 || f.keptOnOffer || s.waitFor(f) == 0 {
			continue
		}
		waits = true
		if gpu := f.device.GPU; gpu == d.gpu || !d.began.IsZero() && f.lastGrant.Sub(d.began) >= settleTime {
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
	if !s.wanted.options.AnnounceShrink {
		d.begin(now)
	}
}

// endDrain offers a GPU in its old form again after pods have held it for too long.
func (s *Servers) endDrain(old map[resource.Device]*oldForm) {
	for _, f := range old {
		if f.device.GPU != s.forms.drain.gpu {
			continue
		}
		f.lastGrant = time.Time{}
		for _, id := range slices.Concat(f.held, f.others) {
			d := f.list.retiring[id]
			d.lastGrant = time.Time{}
			f.list.retiring[id] = d
		}
	}
	s.forms.drain.gpu = ""
}

// waitFor returns how many devices of the plan wait for an old form.
func (s *Servers) waitFor(f *oldForm) int {
	form := resource.HeldShape{Resource: f.device.Resource, ID: f.device.ID, GPU: f.device.GPU}
	waiting := 0
	for _, r := range s.wanted.plan.Resources {
		for d := range r.All() {
			if form.Conflicts(d) {
				waiting++
			}
		}
	}
	return waiting
}
