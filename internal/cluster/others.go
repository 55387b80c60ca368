package cluster

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

// reporterLock is a file in the state directory. Each process that reports and has seen a GPU of the node has a share of its lock.
const reporterLock = "reporter.lock"

// absence is how long nobody has a share after somebody had one, until that process is not expected to come back: it may be restarted.
const absence = time.Minute

// yields reports whether another process of the node reports what there is to report: one that started later and serves a resource of this
// one, or one that has seen GPUs while this one never has. That may be the pod before this one in a roll-out, or one of another DaemonSet.
func (r *reporter) yields(s status.Status) bool { return report.Yields(s) || r.outranked.Value() }

// followOthers finds out whether this process is outranked, until ctx ends.
func (r *reporter) followOthers(ctx context.Context) {
	var share func() // gives the own share back; nil while there is none
	defer func() {
		if share != nil {
			share()
		}
	}()
	for seen := false; ; {
		s, changed := r.statuses.Latest()
		c, configured := r.daemon.Configs.Latest()
		seen = seen || len(s.GPUs) > 0
		on := r.daemon.Config.StateDir != "" && tellsOfGPUs(c.Features)
		if !on && share != nil {
			share()
			share = nil
		}
		if !on || seen {
			r.setOutranked(false)
		}
		var again <-chan time.Time
		if on && share == nil && s.Version != "" {
			share = r.ask(ctx, seen)
			again = time.After(statusEvery)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-configured:
		case <-again:
		}
	}
}

// ask takes a share of the lock for a process that has seen GPUs, and returns how it is given back. For another one it finds out whether
// there are shares. A disk that does not answer soon is waited for, but tells of nobody meanwhile.
func (r *reporter) ask(ctx context.Context, seen bool) (share func()) {
	path := filepath.Join(r.daemon.Config.StateDir, reporterLock)
	lock := r.lock
	if seen {
		lock = r.lockShared
	}
	type answer struct {
		unlock func()
		err    error
	}
	answers := make(chan answer, 1)
	go func() {
		unlock, err := lock(path)
		answers <- answer{unlock, err}
	}()
	var a answer
	for late, waiting := time.After(firstAnswer), true; waiting; {
		select {
		case a = <-answers:
			waiting = false
		case <-late:
			r.setOutranked(false)
		case <-ctx.Done():
			return nil
		}
	}
	if a.err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot take the lock of processes that report", "reason", a.err.Error())
	}
	if seen {
		return a.unlock
	}
	if a.unlock != nil {
		a.unlock()
	}
	now := time.Now()
	if errors.Is(a.err, files.ErrLocked) {
		r.shared = now
	}
	r.setOutranked(!r.shared.IsZero() && now.Sub(r.shared) < absence)
	return nil
}

func (r *reporter) setOutranked(now bool) {
	if r.outranked.Value() != now {
		r.outranked.Publish(now)
	}
}
