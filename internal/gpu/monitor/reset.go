package monitor

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Withhold has GPUs, by UUID, not be given to new work, for a reason, a sentence without a full
// stop. With an empty reason they are judged as before. The error says that the monitor could not
// be reached before ctx ended.
func (m *Monitor) Withhold(ctx context.Context, gpus []string, reason string) error {
	return m.do(ctx, func(l *loop) {
		l.state.withhold(gpus, reason, time.Now())
		l.publish(ctx)
	})
}

// Reset has run reset GPUs, by UUID, while there is no session. That run returns no error is
// evidence that each of them was reset. It returns when the next look has ended, and the error says
// why run was not called, or is run's. Looks wait for run, which returns in bounded time, and whose
// ctx ends with the Monitor. A session that a call does not return from stays; settings of other
// GPUs that have no persistence mode are lost with it, as by Quiesce.
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
		l.nudge()
	})
}

// withoutSession has the next look begin with run, while there is no session. The look opens
// another one. It reports whether run returned without an error; how the look ended does not count
// then. The error is run's, or says why it was not called or has not returned. The ctx of run ends
// with the Monitor. With keeps, a session stays with whose end GPUs would lose settings.
func (m *Monitor) withoutSession(ctx context.Context, keeps bool, run func(context.Context) error) (ran bool,
	err error) {
	outcome := make(chan error, 1)
	err = m.during(ctx, func(l *loop, once func(func())) {
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
	case failed := <-outcome: // also where the look failed
		return failed == nil, failed
	default:
		return false, err
	}
}

// A sessionless is what is run while there is no session, or is told why there is one. With keeps
// it stays where GPUs would lose settings.
type sessionless struct {
	keeps bool
	run   func(looking context.Context, stays error)
}

// withhold notes that an operator wants no work on GPUs, or wants it again.
func (t *nodeState) withhold(gpus []string, reason string, now time.Time) {
	for _, uuid := range gpus {
		since := now
		if before, is := t.withheldGPUs[uuid]; is {
			since = before.Since
		}
		if t.withheldGPUs[uuid] = (inventory.Health{State: inventory.Unknown, Reason: reason, Since: since}); reason == "" {
			delete(t.withheldGPUs, uuid)
		}
	}
}
