package monitor

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// retryPauses are the pauses before another call of a GPU that is lost, hangs or cannot be
// identified; the last pause repeats. A call may initialise the GPU for seconds, or hang in the
// driver.
var retryPauses = [...]time.Duration{time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute}

// A Retry is a paused GPU.
type Retry struct {
	// Index is the GPU's NVML index.
	Index int
	// Reason says why the GPU is paused and, if applicable, why NVML is not opened again: a
	// sentence without a full stop.
	Reason string
	// Next is the time of the next call.
	Next time.Time
}

// trouble reports whether a GPU is lost, hangs, or needs a new session, with the reason.
func (t *nodeState) trouble(g health.GPU) (string, bool) {
	for _, f := range g.Faults {
		if f.Source == health.SourceHang || f.State == inventory.Lost {
			return f.Reason, true
		}
	}
	_, wants := t.policy.WantsSession(g, t.facts)
	return g.Health.Reason, wants
}

// planRetries sets the time of the next retry after a look. Another GPU in trouble restarts the
// pauses.
func (t *nodeState) planRetries(now time.Time) {
	troubled := len(t.troubles())
	switch {
	case troubled == 0:
		t.nextRetry, t.retryCount = time.Time{}, 0
	case troubled > t.troubleCount:
		t.nextRetry, t.retryCount = now.Add(retryPauses[0]), 0
	}
	t.troubleCount = troubled
}

// troubles returns the GPUs in trouble. It allocates nothing if there are none.
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

// retries returns the GPUs in trouble with the time of the next retry.
func (t *nodeState) retries() []Retry {
	all := t.troubles()
	for i := range all {
		all[i].Next = t.nextRetry
		if !t.mayReopen() {
			all[i].Reason += "; NVML is not opened again for it, as GPUs without persistence mode would lose their " +
				"settings"
		}
	}
	return all
}

// retryFor requests a retry at once after an event of a GPU in trouble.
func (t *nodeState) retryFor(e inventory.Event, now time.Time) {
	if g, known := t.gpus[e.UUID]; known && e.Kind != inventory.EventLost && !t.nextRetry.IsZero() {
		if _, ok := t.trouble(g); ok {
			t.nextRetry = now
		}
	}
}

// retry reports whether the next look calls GPUs in trouble, and whether it opens a new session for
// them: at once for a GPU that answers again and needs a new session.
func (t *nodeState) retry(now time.Time) (reopen, retry bool) {
	retry = !t.nextRetry.IsZero() && !now.Before(t.nextRetry)
	if retry {
		t.retryCount++
		t.nextRetry = now.Add(retryPauses[min(t.retryCount, len(retryPauses)-1)])
	}
	if t.troubleCount == 0 || !t.mayReopen() {
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

// mayReopen reports whether NVML may be opened again without evidence of a benefit. At the end of
// the last session, a GPU without persistence mode loses settings: power limits, clocks, compute
// mode.
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
