package monitor

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// retryPauses are the pauses after which a GPU that is lost, hangs or cannot be identified is asked
// again; the last one repeats. To ask such a GPU may initialise it, which takes seconds, and its
// driver may hang.
var retryPauses = [...]time.Duration{time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute}

// A Retry is a GPU that is left alone for a while.
type Retry struct {
	// Index is the GPU's NVML index.
	Index int
	// Reason is a sentence without a full stop: why it is left alone, and why NVML is not opened anew
	// for it if that is so.
	Reason string
	// Next is when it is asked again.
	Next time.Time
}

// trouble reports whether a GPU is lost, hangs, or may be seen again by a new session only, and if
// so why.
func (t *nodeState) trouble(g health.GPU) (string, bool) {
	for _, f := range g.Faults {
		if f.Source == health.SourceHang || f.State == inventory.Lost {
			return f.Reason, true
		}
	}
	_, wants := t.policy.WantsSession(g, t.facts)
	return g.Health.Reason, wants
}

// plan decides, after a look, when the GPUs in trouble are asked again. Another one begins the
// pauses anew.
func (t *nodeState) plan(now time.Time) {
	troubled := len(t.troubles())
	switch {
	case troubled == 0:
		t.next, t.tries = time.Time{}, 0
	case troubled > t.troubled:
		t.next, t.tries = now.Add(retryPauses[0]), 0
	}
	t.troubled = troubled
}

// troubles returns the GPUs in trouble. It allocates nothing while there is none.
func (t *nodeState) troubles() []Retry {
	var all []Retry
	for _, g := range t.scan.GPUs {
		if reason, ok := t.trouble(t.gpus[g.UUID]); ok {
			all = append(all, Retry{Index: g.Index, Reason: reason})
		}
	}
	for _, o := range t.scan.LeftOut {
		if _, ok := t.scan.GPUAt(o.Index); !ok {
			all = append(all, Retry{Index: o.Index, Reason: o.Reason})
		}
	}
	return all
}

// retries returns the GPUs in trouble and when each is asked again.
func (t *nodeState) retries() []Retry {
	all := t.troubles()
	for i := range all {
		all[i].Next = t.next
		if !t.mayReopen() {
			all[i].Reason += "; NVML is not opened anew for it, as GPUs without persistence mode would lose their settings"
		}
	}
	return all
}

// retryFor has GPUs in trouble asked again at once when an event says something of one of them.
func (t *nodeState) retryFor(e inventory.Event, now time.Time) {
	if g, known := t.gpus[e.UUID]; known && e.Kind != inventory.EventLost && !t.next.IsZero() {
		if _, ok := t.trouble(g); ok {
			t.next = now
		}
	}
}

// retry reports whether the next look asks GPUs in trouble, and whether it does so in a new
// session: for a GPU that answers again and that only a new session can clear, at once.
func (t *nodeState) retry(now time.Time) (reopen, retry bool) {
	retry = !t.next.IsZero() && !now.Before(t.next)
	if retry {
		t.tries++
		t.next = now.Add(retryPauses[min(t.tries, len(retryPauses)-1)])
	}
	if t.troubled == 0 || !t.mayReopen() {
		return false, retry
	}
	for _, o := range t.scan.LeftOut {
		reopen = reopen || retry && o.Retry
	}
	for _, g := range t.scan.GPUs {
		known := t.gpus[g.UUID]
		_, wants := t.policy.WantsSession(known, t.facts)
		reopen = reopen || wants && (retry || known.Answers())
	}
	return reopen, retry
}

// mayReopen reports whether NVML may be opened anew without evidence that this helps. When the last
// session ends, a GPU without persistence mode forgets what its owner has set: power limits,
// clocks, compute mode.
func (t *nodeState) mayReopen() bool {
	if t.policy.ReopenAlways {
		return true
	}
	for _, g := range t.scan.GPUs {
		known := t.gpus[g.UUID]
		if _, troubled := t.trouble(known); !troubled && known.Reading.Persistence == inventory.Known(false) {
			return false
		}
	}
	return true
}
