package monitor

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Withhold withholds GPUs, by UUID, from new work. The reason is a sentence without a full stop; an
// empty reason ends the hold. Withhold fails if the monitor does not respond before ctx ends.
func (m *Monitor) Withhold(ctx context.Context, gpus []string, reason string) error {
	return m.do(ctx, func(l *loop) {
		l.state.withhold(gpus, reason, time.Now())
		l.publish(ctx)
	})
}

// Reset calls run, which resets GPUs by UUID, while there is no session. After a success of run,
// each of the GPUs counts as reset. Reset returns after the next look, with run's error or the
// reason why run was not called. Looks wait for run: run must return in bounded time. Its ctx ends
// with the Monitor. A session with a hanging call stays open. Other GPUs without persistence mode
// lose settings, as in Quiesce.
func (m *Monitor) Reset(ctx context.Context, gpus []string, run func(context.Context) error) error {
	ran, err := m.withoutSession(ctx, false, func(ctx context.Context) error {
		klog.FromContext(ctx).Info("Released the driver for a reset of GPUs", "gpus", gpus)
		return run(ctx)
	})
	if err != nil || !ran {
		return err
	}
	return m.do(ctx, func(l *loop) {
		for _, uuid := range gpus {
			if g, known := l.state.gpus[uuid]; known {
				l.state.gpus[uuid] = l.state.policy.FoldReset(g, time.Now())
			}
		}
		l.requestLook()
	})
}

// withoutSession calls run before the next look, while there is no session. The look opens another
// session. ran reports whether run succeeded, however the look ends. The error is run's, or says
// why run was not called or has not returned. The ctx of run ends with the Monitor. With keeps, a
// session stays open if GPUs would lose settings.
func (m *Monitor) withoutSession(
	ctx context.Context, keeps bool, run func(context.Context) error,
) (ran bool, err error) {
	outcome := make(chan error, 1)
	err = m.runInLook(ctx, func(l *loop, once func(func())) {
		l.sessionless = append(l.sessionless, sessionless{keeps, func(looking context.Context, stays error) {
			once(func() {
				if stays == nil {
					stays = run(looking)
				}
				outcome <- stays
			})
		}})
	})
	select {
	case failed := <-outcome: // even if the look failed
		return failed == nil, failed
	default:
		return false, err
	}
}

// A sessionless is a function that runs without a session, or receives the reason for an open
// session. With keeps, the session stays open if GPUs would lose settings.
type sessionless struct {
	keeps bool
	run   func(looking context.Context, stays error)
}

// withhold starts or ends the withholding of GPUs by an operator.
func (t *nodeState) withhold(gpus []string, reason string, now time.Time) {
	for _, uuid := range gpus {
		since := now
		if before, is := t.withheldGPUs[uuid]; is {
			since = before.Since
		}
		if t.withheldGPUs[uuid] = (inventory.Health{State: inventory.Unknown, Reason: reason,
			Since: since}); reason == "" {
			delete(t.withheldGPUs, uuid)
		}
	}
}
