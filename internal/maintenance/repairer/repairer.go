// Package repairer resets GPUs whose remedy is a reset, by the rules of package plan/repair. It only
// begins a reset when nobody uses the GPU. Package reset then withdraws the GPU, looks for users
// again and resets it.
package repairer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

const (
	// queryInterval is the time between two queries of the users while a GPU waits for a reset, and
	// between two requests for a slot of the cluster. While nothing can begin, it is slowInterval.
	queryInterval = 5 * time.Second
	slowInterval  = 30 * time.Second
	// rankTimeout limits the time to read the priorities of pods.
	rankTimeout = 10 * time.Second
	// After evictLimit, the pods of a GPU are left alone for evictPause.
	evictLimit = 10 * time.Minute
	evictPause = time.Hour
	// pause is the time after a reset that was not tried, and after an error of the disk.
	pause = 30 * time.Second
)

// Options are the parts of the daemon used by Repairs.
type Options struct {
	// Mode returns the configured mode. The channel is closed when it may have changed.
	Mode      func() (repair.Mode, <-chan struct{})
	Snapshots *feed.Feed[inventory.Snapshot]
	// Users returns the users of a GPU and of its MIG devices.
	Users func(ctx context.Context, gpu inventory.GPU) repair.Users
	// Rank sets priority and creation time of pods. Evict evicts a pod within its disruption budget,
	// and returns nil if the pod is terminating or gone. Both are for the mode Evict.
	Rank  func(ctx context.Context, pods []repair.Pod) error
	Evict func(ctx context.Context, pod eviction.Pod) error
	// CreatesMIG reports whether the daemon creates MIG devices again after a reset.
	CreatesMIG func() bool
	// Admit returns why a repair must not begin now, by the rules of the cluster; nil if it may. The
	// caller repeats the request.
	Admit func(repair string) error
	// Reset resets GPUs like reset.Resets, and Resetting reports whether a reset is under way.
	Reset     func(ctx context.Context, o reset.Order, tell func(string)) error
	Resetting func() bool
	// StateDir is the folder for the history of repairs; empty for none. Write writes the history to
	// a path; nil is statefile.WriteState.
	StateDir string
	Write    func(path string, v any) error
}

// Repairs repairs the GPUs of a node. Create it with New.
type Repairs struct {
	options Options
	disk    *statefile.Disk
	status  *feed.Feed[repair.Status]

	// Used by Run alone.
	attempts         []repair.Attempt
	repaired, failed int
	notBefore        time.Time // no reset begins earlier
	refusal          string    // why the last reset was not tried
	latestReason     string    // of the first step, for the log
	evictFor         string    // the GPU whose pods are evicted; empty for none
	evictSince       time.Time
	evictions        eviction.Evictions   // of this GPU
	evictAfter       map[string]time.Time // by UUID of the GPU
}

// New returns Repairs that do nothing yet.
func New(o Options) *Repairs {
	if o.Write == nil {
		o.Write = statefile.WriteState
	}
	return &Repairs{options: o, disk: statefile.NewDisk(), status: feed.New(repair.Status{}),
		evictAfter: map[string]time.Time{}}
}

// Status is the feed of what Repairs does.
func (r *Repairs) Status() *feed.Feed[repair.Status] { return r.status }

// Run repairs GPUs until ctx ends, and then returns nil. Only the leading process may call Run. A
// reset that runs when ctx ends is not stopped by that.
func (r *Repairs) Run(ctx context.Context) error {
	defer r.status.Publish(repair.Status{})
	loaded := false
	for ctx.Err() == nil {
		mode, modeChanged := r.options.Mode()
		snapshot, snapshotChanged := r.options.Snapshots.Latest()
		var again <-chan time.Time
		switch {
		case mode == repair.Off:
			r.status.Publish(repair.Status{Known: true})
			snapshotChanged = nil
		case mode.Acts() && r.options.StateDir == "":
			r.status.Publish(repair.Status{Mode: mode, Known: true,
				Problem: "nothing is repaired without --state-dir: the number of resets must survive a restart"})
			snapshotChanged = nil
		case !loaded:
			if err := r.load(ctx); err != nil {
				problem := "cannot read the history of repairs: " + err.Error()
				r.status.Publish(repair.Status{Mode: mode, Problem: problem})
				snapshotChanged, again = nil, time.After(pause)
				break
			}
			loaded = true
			continue
		case snapshot.Generation == 0: // before the first health check
		default:
			if next := r.step(ctx, mode, snapshot); next > 0 {
				again = time.After(next)
			}
		}
		select {
		case <-modeChanged:
		case <-snapshotChanged:
		case <-again:
		case <-ctx.Done():
		}
	}
	return nil
}

// step decides, and resets a GPU if the decision says so. It returns the time until the next
// decision; 0 if only a change of the GPUs or of the configuration leads to another one.
func (r *Repairs) step(ctx context.Context, mode repair.Mode, s inventory.Snapshot) time.Duration {
	now := time.Now()
	r.attempts = repair.Recent(r.attempts, now)
	in := repair.Input{Mode: mode, Snapshot: s, Users: map[string]repair.Users{}, CreatesMIG: r.options.CreatesMIG(),
		Attempts: r.attempts, EvictAfter: r.evictAfter, Now: now}
	inUse := 0
	for _, g := range repair.Candidates(s) {
		u := r.options.Users(ctx, g)
		if in.Users[g.UUID] = u; len(u.Pods) > 0 {
			inUse++
		}
	}
	if mode == repair.Evict && inUse > 1 {
		r.rank(ctx, in.Users)
	}
	d := repair.Decide(in)
	busy := r.options.Resetting()
	if d.EvictFor != r.evictFor {
		r.evictFor, r.evictSince, r.evictions = d.EvictFor, time.Time{}, eviction.Evictions{}
	}
	if d.EvictFor != "" && !busy {
		return r.evict(ctx, mode, d, now)
	}
	if len(d.Reset) == 0 || busy {
		r.publish(ctx, mode, d.Steps, busy)
		if len(d.Steps) == 0 && !busy {
			return r.untilForgotten(now)
		}
		if !mode.Acts() || !slices.ContainsFunc(d.Steps, func(s repair.Step) bool { return s.State != repair.Manual }) {
			return slowInterval
		}
		return queryInterval
	}
	at := slices.IndexFunc(d.Steps, func(s repair.Step) bool { return s.UUID == d.Reset[0] })
	if now.Before(r.notBefore) {
		d.Steps[at].State, d.Steps[at].Reason = repair.Waiting, r.refusal
		r.publish(ctx, mode, d.Steps, false)
		return r.notBefore.Sub(now)
	}
	if err := r.options.Admit(fmt.Sprintf("repair of GPU %d", d.Steps[at].Index)); err != nil {
		d.Steps[at].State, d.Steps[at].Reason = repair.Waiting, err.Error()
		r.publish(ctx, mode, d.Steps, true)
		return queryInterval
	}
	r.repair(ctx, mode, d, at, s)
	return time.Second // the health after the reset decides
}

// rank sets priority and age of the pods. If the API server does not answer, they count as equal.
func (r *Repairs) rank(ctx context.Context, users map[string]repair.Users) {
	ctx, cancel := context.WithTimeout(ctx, rankTimeout)
	defer cancel()
	for _, u := range users {
		if len(u.Pods) == 0 {
			continue
		}
		if err := r.options.Rank(ctx, u.Pods); err != nil {
			klog.FromContext(ctx).V(2).Info("Cannot read the priorities of pods", "reason", err.Error())
			return
		}
	}
}

// evict asks the pods of a GPU to end, so that it can be reset. The node needs a slot for that. It
// returns the time until the next decision.
func (r *Repairs) evict(ctx context.Context, mode repair.Mode, d repair.Decision, now time.Time) time.Duration {
	step := &d.Steps[slices.IndexFunc(d.Steps, func(s repair.Step) bool { return s.UUID == d.EvictFor })]
	if !r.evictSince.IsZero() && now.Sub(r.evictSince) >= evictLimit {
		r.evictAfter[d.EvictFor] = now.Add(evictPause)
		step.Reason += fmt.Sprintf("; its pods did not end within %v", evictLimit)
		r.publish(ctx, mode, d.Steps, false)
		return queryInterval
	}
	if err := r.options.Admit(fmt.Sprintf("repair of GPU %d", step.Index)); err != nil {
		step.Reason += "; " + err.Error()
		r.publish(ctx, mode, d.Steps, true)
		return queryInterval
	}
	if r.evictSince.IsZero() {
		r.evictSince = now
	}
	var pods []eviction.Pod
	for _, p := range d.Evict {
		pods = append(pods, eviction.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID})
	}
	step.Reason += "; the pods are evicted"
	if refusals := r.evictions.Evict(ctx, now, "repair of GPU "+d.EvictFor, pods, r.options.Evict); refusals != "" {
		step.Reason += ": " + refusals
	}
	r.publish(ctx, mode, d.Steps, true)
	return queryInterval
}

// untilForgotten returns the time until the oldest repair leaves the history; 0 if there is none.
func (r *Repairs) untilForgotten(now time.Time) time.Duration {
	if len(r.attempts) == 0 {
		return 0
	}
	return max(time.Second, r.attempts[0].Began.Add(repair.BudgetTime).Sub(now))
}

// repair resets the GPUs of a decision. The attempt is in the history from before the reset, so
// that a kill at any time never leads to more resets than the budget.
func (r *Repairs) repair(ctx context.Context, mode repair.Mode, d repair.Decision, at int, s inventory.Snapshot) {
	step := &d.Steps[at]
	r.attempts = append(r.attempts, repair.Attempt{
		GPUs: d.Reset, Began: time.Now().UTC().Truncate(time.Second), Before: states(s, d.Reset),
	})
	if err := r.save(ctx); err != nil {
		r.refuse(ctx, fmt.Errorf("the repair cannot be noted: %w", err))
		step.State, step.Reason = repair.Waiting, r.refusal
		r.publish(ctx, mode, d.Steps, false)
		return
	}
	tell := func(text string) {
		step.State, step.Reason = repair.Repairing, text
		r.publish(ctx, mode, d.Steps, true)
	}
	tell("withdrawn from new pods")
	klog.FromContext(ctx).Info("Repairing a GPU by a reset", "gpus", d.Reset, "fault", step.Fault)
	began := time.Now()
	err := r.options.Reset(ctx, reset.Order{GPUs: d.Reset}, tell)
	if ctx.Err() != nil { // the next process finds the attempt
		return
	}
	if notTried := (reset.NotTriedError{}); errors.As(err, &notTried) {
		r.refuse(ctx, err)
		return
	}
	last := &r.attempts[len(r.attempts)-1]
	last.Ended = time.Now().UTC().Truncate(time.Second)
	last.After, last.Repaired = states(r.options.Snapshots.Value(), d.Reset), err == nil
	if err != nil {
		last.After += "; " + err.Error()
		r.failed++
		klog.FromContext(ctx).Info("The repair of a GPU failed", "gpus", d.Reset, "reason", err.Error())
	} else {
		r.repaired++
		took := time.Since(began).Round(time.Millisecond)
		klog.FromContext(ctx).Info("Repaired a GPU", "gpus", d.Reset, "after", took)
	}
	if err := r.save(ctx); err != nil { // the attempt itself is saved
		klog.FromContext(ctx).Info("Cannot save the result of a repair", "reason", err.Error())
	}
}

// refuse removes the last attempt, because no reset was tried, and delays the next one.
func (r *Repairs) refuse(ctx context.Context, why error) {
	r.attempts = r.attempts[:len(r.attempts)-1]
	if err := r.save(ctx); err != nil { // it then counts after a restart of the daemon
		klog.FromContext(ctx).Info("Cannot save the history of repairs; the untried repair counts after a restart",
			"reason", err.Error())
	}
	r.notBefore, r.refusal = time.Now().Add(pause), why.Error()
}

// publish publishes the status.
func (r *Repairs) publish(ctx context.Context, mode repair.Mode, steps []repair.Step, wanted bool) {
	reason := ""
	for _, s := range steps {
		reason = fmt.Sprintf("GPU %d %s: %s", s.Index, s.State, s.Reason)
		if s.State != repair.Waiting {
			break
		}
	}
	if reason != "" && reason != r.latestReason {
		klog.FromContext(ctx).V(2).Info("A GPU needs a reset", "progress", reason)
	}
	r.latestReason = reason
	r.status.Publish(repair.Status{
		Mode: mode, Known: true, Wanted: wanted && mode.Acts(), Steps: slices.Clone(steps),
		Attempts: slices.Clone(r.attempts), Repaired: r.repaired, Failed: r.failed,
	})
}

// states describes the health of GPUs, for people.
func states(s inventory.Snapshot, gpus []string) string {
	var all []string
	for _, uuid := range gpus {
		g, there := s.GPU(uuid)
		text := "gone"
		if there {
			text = fmt.Sprintf("GPU %d %s", g.Index, g.Health.State)
		}
		if health, needs := repair.NeedsReset(g); there && needs {
			text = fmt.Sprintf("GPU %d %s: %s", g.Index, health.State, health.Why())
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}
