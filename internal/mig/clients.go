package mig

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// pauseFor is how long DaemonSets are paused for a GPU that is in use all the same, and pauseAgain
	// for how long they then run before they are paused for it again.
	pauseFor   = 5 * time.Minute
	pauseAgain = time.Hour
	// pauseTimeout bounds one request to pause them.
	pauseTimeout = 10 * time.Second
)

// awaitClients pauses the DaemonSets whose pods have open a GPU that the driver calls in use. It
// reports whether to wait until these pods end.
func (t *turn) awaitClients(ctx context.Context, hold resource.GPUHold) (outcome, bool) {
	now := time.Now()
	if !t.wish.Pause || t.options.Pauser == nil || !t.gpu.blocked || now.Sub(t.gpu.gaveUp) < pauseAgain {
		return outcome{}, false
	}
	found, _ := t.options.Snapshots.Value().GPU(t.UUID)
	clients, err := t.options.Clients(found.Minor)
	var all []Holder
	var pods []string
	for _, c := range clients {
		all = append(all, Holder{Device: t.UUID, PID: c.PID, Name: c.Name})
		if c.Pod != "" && !slices.Contains(pods, c.Pod) {
			pods = append(pods, c.Pod)
		}
	}
	switch {
	case !t.gpu.paused.IsZero() && now.Sub(t.gpu.paused) >= pauseFor:
		t.gpu.gaveUp = now
		return t.fail(ctx, fmt.Errorf("in use by %s, though DaemonSets were paused for %v",
			cmp.Or(holders(all), "something that is not shown"),
			pauseFor), hold), true
	case len(pods) == 0: // the driver says of what is left whether it is in the way
		return outcome{}, false
	}
	t.Holders = all
	if t.gpu.paused.IsZero() {
		t.gpu.paused = now
	}
	reason := "in use by " + holders(all)
	if now.Sub(t.gpu.asked) >= evictAgain {
		t.show(PhaseWaiting, reason, hold) // from now on no label is set back
		t.gpu.asked = now
		limited, cancel := context.WithTimeout(ctx, pauseTimeout)
		t.gpu.refused = t.options.Pauser.Pause(limited, pods)
		cancel()
	}
	if err := errors.Join(err, t.gpu.refused); err != nil {
		reason += ": " + err.Error()
	}
	return t.wait(PhaseWaiting, reason, later, hold), true
}

// openElsewhere adds to the error of a refused change of the MIG mode which processes have the GPU
// open, as far as the node shows them.
func (t *turn) openElsewhere(cause error) error {
	const remedy = "end them, or stop their services: nvidia-persistenced and DCGM have GPUs open, and so has the kernel module nvidia_drm"
	found, _ := t.options.Snapshots.Value().GPU(t.UUID)
	var all []Holder
	var hidden error
	if t.options.Clients != nil {
		var clients []inventory.DriverClient
		clients, hidden = t.options.Clients(found.Minor)
		for _, c := range clients {
			all = append(all, Holder{Device: t.UUID, PID: c.PID, Name: c.Name})
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

// pausing notes in which phase the GPU is, and reports whether DaemonSets have to stay paused for
// it. They do while it is waited for, but not for longer than pauseFor.
func (t *turn) pausing(p Phase) bool {
	now := time.Now()
	switch {
	case t.gpu.paused.IsZero():
	case p != PhaseWaiting && p != PhaseChanging:
		t.gpu.paused = time.Time{}
	case now.Sub(t.gpu.paused) >= pauseFor+pauseTimeout:
		t.gpu.paused, t.gpu.gaveUp = time.Time{}, now
	}
	return !t.gpu.paused.IsZero()
}
