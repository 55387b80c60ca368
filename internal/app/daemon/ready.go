package daemon

import (
	"cmp"
	"context"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A Readiness is the answer to the readiness probe: whether all tasks of a daemon are ready. Once
// true, the answer stays: a flapping readiness would let a roll-out exceed its limits. It ends only
// while the driver's files do not fit the kernel module, until the node is restarted.
//
// A process asks for the lead when everything else is ready. It is ready when it leads and the
// tasks under the lead are also ready. It is ready without the lead if a later process leads.
type Readiness struct {
	lead   *lead.Lead
	tasks  []Task
	answer *feed.Feed[status.Readiness]
	lapses func(context.Context) error // nil if an answer never ends
}

// NewReadiness returns the readiness of these tasks. They are not ready until Run has asked them.
func NewReadiness(l *lead.Lead, tasks ...[]Task) *Readiness {
	r := &Readiness{lead: l, answer: feed.New(status.Readiness{
		Reason: "the daemon is starting", Since: status.Moment(time.Now()),
	})}
	for _, group := range tasks {
		r.tasks = append(r.tasks, group...)
	}
	return r
}

// EndBy makes a positive answer end while reason is not empty. The reason is queried after
// each Snapshot. EndBy must be called before Run.
func (r *Readiness) EndBy(snapshots *feed.Feed[inventory.Snapshot], reason func(context.Context) string) {
	r.lapses = func(ctx context.Context) error {
		yes := r.answer.Value()
		for {
			_, snapshotChanged := snapshots.Latest()
			now := yes
			if why := reason(ctx); why != "" {
				now.Ready, now.Reason = false, why
			}
			if before := r.answer.Value(); ctx.Err() == nil &&
				(before.Ready != now.Ready || before.Reason != now.Reason) {
				now.Since = status.Moment(time.Now())
				r.answer.Publish(now)
				klog.FromContext(ctx).Info("Readiness changed", "ready", now.Ready, "reason", now.Reason)
			}
			if !feed.WaitAny(ctx, snapshotChanged) {
				return nil
			}
		}
	}
}

// Answer returns the feed of answers.
func (r *Readiness) Answer() *feed.Feed[status.Readiness] { return r.answer }

const (
	// readyInterval is the pause between questions until all tasks are ready.
	readyInterval = 500 * time.Millisecond
	// readyTimeout limits the answers of all tasks.
	readyTimeout = 5 * time.Second
)

// Run asks the tasks until all are ready. It returns nil, at the latest when ctx ends.
func (r *Readiness) Run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	ticker := time.NewTicker(readyInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		ready, reason := r.ask(ctx)
		if ctx.Err() != nil {
			return nil
		}
		before := r.answer.Value()
		switch {
		case ready:
			r.answer.Publish(status.Readiness{Ready: true, Reason: reason, Since: status.Moment(time.Now())})
			log.Info("Ready", "reason", reason)
			if r.lapses == nil {
				return nil
			}
			return r.lapses(ctx)
		case reason != before.Reason:
			r.answer.Publish(status.Readiness{Reason: reason, Since: before.Since})
			log.V(2).Info("Not ready", "reason", reason)
		}
	}
}

// ask returns whether all tasks are ready, and the reasons of the unready tasks, or else
// of the ready tasks.
func (r *Readiness) ask(ctx context.Context) (ready bool, reason string) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	ready, reason = r.askTasks(ctx, false)
	if !ready {
		return false, reason
	}
	r.lead.Ask()
	switch s := r.lead.Statuses().Value(); {
	case s.Leads:
		if ready, leading := r.askTasks(ctx, true); !ready {
			return false, leading
		}
	case s.Later:
	case s.Problem != "":
		return false, "cannot take the lead of the node: " + s.Problem
	default:
		return false, "waiting for the lead of the node, held by " + cmp.Or(s.Name, "another process")
	}
	return true, reason
}

// askTasks asks the tasks under the lead, or the others.
func (r *Readiness) askTasks(ctx context.Context, lead bool) (ready bool, reason string) {
	reasons := map[bool][]string{}
	for _, task := range r.tasks {
		if task.Ready == nil || task.Lead != lead {
			continue
		}
		if ready, reason := task.Ready(ctx); !ready || reason != "" {
			reasons[ready] = append(reasons[ready], reason)
		}
	}
	ready = len(reasons[false]) == 0
	return ready, strings.Join(reasons[ready], "; ")
}
