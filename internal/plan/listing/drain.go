package listing

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// settleTime is the time after a change until the kubelet no longer gives
	// devices chosen before.
	settleTime = 5 * time.Second
	// drainAfter is how long GPUs wait for successive pods before the first GPU is withdrawn.
	drainAfter = 10 * time.Second
	// drainFor is how long a GPU is withdrawn at first. Each further time is twice
	// as long, up to drainMost.
	drainFor  = 30 * time.Second
	drainMost = 10 * time.Minute
)

// A drain withdraws the old form of one GPU after another, where successive pods
// would otherwise hold the GPU forever. The zero value withdraws nothing.
type drain struct {
	began time.Time // since when GPUs wait for pods; zero if none does
	since time.Time // since when GPUs wait for successive pods; zero if none does
	next  string    // the GPU to withdraw when the change may proceed; empty for none
	gpu   string    // the withdrawn GPU; empty for none
	until time.Time // the end of the withdrawal
	tried map[string]int
}

// withdraws reports whether the old form of a GPU is not offered.
func (d drain) withdraws(gpu string) bool { return d.gpu != "" && d.gpu == gpu }

// dueAt returns when another GPU is to be withdrawn; zero for never.
func (d drain) dueAt() time.Time {
	switch {
	case d.since.IsZero() || d.next != "":
		return time.Time{}
	case d.gpu != "":
		return d.until
	}
	return d.since.Add(drainAfter)
}

// isDue reports whether another GPU is to be withdrawn at this time.
func (d drain) isDue(now time.Time) bool { at := d.dueAt(); return !at.IsZero() && !now.Before(at) }

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
func (n *step) withdraw(old map[resource.Device]*oldForm) {
	d := &n.drain
	if d.gpu != "" && d.isDue(n.now) {
		n.endDrain(old)
	}
	waits, busy := false, map[string]bool{}
	for _, f := range old {
		if len(f.held) == 0 || f.isKept || n.waitFor(f) == 0 {
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
		d.began = n.now
	case len(busy) == 0:
		d.since = time.Time{}
	case d.since.IsZero():
		d.since = n.now
	}
	if !busy[d.next] {
		d.next = ""
	}
	if !busy[d.gpu] {
		d.gpu = "" // it has its new form
	}
	if !d.isDue(n.now) {
		return
	}
	d.next = slices.MinFunc(slices.Collect(maps.Keys(busy)), func(a, b string) int {
		return cmp.Or(d.tried[a]-d.tried[b], cmp.Compare(a, b))
	})
	if !n.options.AnnounceShrink {
		d.begin(n.now)
	}
}

// endDrain offers a GPU in its old form again after pods have held it for too long.
func (n *step) endDrain(old map[resource.Device]*oldForm) {
	for _, f := range old {
		if f.device.GPU != n.drain.gpu {
			continue
		}
		f.lastGrant = time.Time{}
		for _, id := range slices.Concat(f.held, f.others) {
			d := f.list.retiring[id]
			d.lastGrant = time.Time{}
			f.list.retiring[id] = d
		}
	}
	n.drain.gpu = ""
}
