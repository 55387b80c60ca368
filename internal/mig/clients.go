package mig

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// pauseFor is how long DaemonSets stay paused if the GPU is in use nevertheless. They then run for
	// pauseInterval before the next pause.
	pauseFor      = 5 * time.Minute
	pauseInterval = time.Hour
	// pauseTimeout limits one request to pause.
	pauseTimeout = 10 * time.Second
)

// awaitClients pauses the DaemonSets whose pods have the GPU open, if the driver refused a
// change because the GPU is in use. It reports whether to wait for the end of these pods.
func (r *reconciler) awaitClients(ctx context.Context, hold resource.GPUHold) (result, bool) {
	now := time.Now()
	if !r.desired.Pause || r.options.Pauser == nil || !r.gpu.driverInUse ||
		now.Sub(r.gpu.pauseEndedAt) < pauseInterval {
		return result{}, false
	}
	found, _ := r.options.Snapshots.Value().GPU(r.UUID)
	clients, err := r.options.Clients(found.Minor)
	var all []Holder
	var pods []string
	for _, c := range clients {
		all = append(all, Holder{Device: r.UUID, PID: c.PID, Name: c.Name})
		if c.Pod != "" && !slices.Contains(pods, c.Pod) {
			pods = append(pods, c.Pod)
		}
	}
	switch {
	case !r.gpu.pausedSince.IsZero() && now.Sub(r.gpu.pausedSince) >= pauseFor:
		r.gpu.pauseEndedAt = now
		return r.fail(ctx, fmt.Errorf("in use by %s, though DaemonSets were paused for %v",
			cmp.Or(holders(all), "an unknown process"),
			pauseFor), hold), true
	case len(pods) == 0: // the driver decides whether the remaining processes prevent the change
		return result{}, false
	}
	r.Holders = all
	if r.gpu.pausedSince.IsZero() {
		r.gpu.pausedSince = now
	}
	reason := "in use by " + holders(all)
	if now.Sub(r.gpu.pauseRequestedAt) >= eviction.Interval {
		r.report(PhaseWaiting, reason, hold) // from now on no label is reset
		r.gpu.pauseRequestedAt = now
		limited, cancel := context.WithTimeout(ctx, pauseTimeout)
		r.gpu.pauseError = r.options.Pauser.Pause(limited, pods)
		cancel()
	}
	if err := errors.Join(err, r.gpu.pauseError); err != nil {
		reason += ": " + err.Error()
	}
	return r.requeue(PhaseWaiting, reason, slowPoll, hold), true
}

// openElsewhere adds to the error of a refused MIG mode change the processes that have the
// GPU open, as far as visible to this process.
func (r *reconciler) openElsewhere(cause error) error {
	const remedy = "stop them; often nvidia-persistenced, DCGM or the kernel module nvidia_drm has the GPU open"
	found, _ := r.options.Snapshots.Value().GPU(r.UUID)
	var all []Holder
	var hidden error
	if r.options.Clients != nil {
		var clients []inventory.DriverClient
		clients, hidden = r.options.Clients(found.Minor)
		for _, c := range clients {
			all = append(all, Holder{Device: r.UUID, PID: c.PID, Name: c.Name})
		}
	}
	switch {
	case len(all) > 0:
		return fmt.Errorf("%w, by %s; %s", cause, holders(all), remedy)
	case hidden != nil:
		return fmt.Errorf("%w, by processes that this container does not see (%w); %s", cause, hidden, remedy)
	}
	return fmt.Errorf("%w, by something that this container does not see; %s", cause, remedy)
}

// keepPaused records the phase of the GPU, and reports whether DaemonSets must stay paused for it.
// They stay paused while the change waits or is in progress, but no longer than pauseFor.
func (r *reconciler) keepPaused(p Phase) bool {
	now := time.Now()
	switch {
	case r.gpu.pausedSince.IsZero():
	case p != PhaseWaiting && p != PhaseChanging:
		r.gpu.pausedSince = time.Time{}
	case now.Sub(r.gpu.pausedSince) >= pauseFor+pauseTimeout:
		r.gpu.pausedSince, r.gpu.pauseEndedAt = time.Time{}, now
	}
	return !r.gpu.pausedSince.IsZero()
}
