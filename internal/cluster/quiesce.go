package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// The annotations of a Node for the release of the driver. Users write until and by, this program
// writes the others.
const (
	// A time in the format of RFC 3339. Without it the driver is in use.
	untilAnnotation  = "gpu-device-plugin.github.io/quiesce.until"
	byAnnotation     = "gpu-device-plugin.github.io/quiesce.by" // the user who requests the release, for messages
	stateAnnotation  = "gpu-device-plugin.github.io/quiesce.state"
	answerAnnotation = "gpu-device-plugin.github.io/quiesce.answer"
)

// pauseLabels are the labels of a Node by which NVIDIA's tools stop those who have the driver open.
var pauseLabels = []string{deployLabels + "device-plugin", deployLabels + "client"}

// pauseMark is in the value of such a label during a pause. driver-manager writes
// paused-for-driver-upgrade, also behind an earlier value, and mig-manager paused-for-mig-change.
// Every other value leaves the driver in use: false is what a user writes to keep NVIDIA's plugin
// from a node for good, and an empty value is what driver-manager writes where the label was
// absent.
const pauseMark = "paused-for-"

// The states of a request to release the driver.
const (
	releasePending = "pending" // the driver is not yet released on the whole node
	releaseDone    = "done"    // the driver is released
	releaseEnded   = "ended"   // the time has passed, and the driver is in use again
	releaseResumed = "resumed" // a user ran resume on the node before that time
	releaseRefused = "refused" // the request is invalid, or too long
)

const (
	// maxRelease limits a request, so that a wrong date does not remove a node's GPUs for a year.
	maxRelease = 24 * time.Hour
	// releaseTimeout limits the wait for one attempt to release the driver or to use it again. The
	// attempt continues in the background.
	releaseTimeout = 30 * time.Second
	// maxName is the size limit of the user's name, in bytes.
	maxName = 200
	// resumedByUser is the reason of releaseResumed.
	resumedByUser = "resume was run on the node"
)

// A releaseRequest is the request on a Node: that of a label, or else that of the annotations. The
// zero value is no request.
type releaseRequest struct {
	paused bool      // by a label, without an end
	until  time.Time // by the annotations
	by     string
	err    error // why the request is invalid
}

// A releaseAnswer is the answer to a request, written as JSON into an annotation.
type releaseAnswer struct {
	By    string    `json:"by,omitempty"`
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
	// Own says that this program released the driver, and must use it again afterwards. Otherwise a
	// user had released the driver on the node.
	Own    bool   `json:"own,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Resumed is, in the answer to a label, the time of the request by annotation that a user has
	// ended by resume: it does not come back after the label's.
	Resumed time.Time `json:"resumed,omitzero"`
}

// readRequest reads the request on a Node. pausesClients says that this program pauses DaemonSets
// itself for a MIG layout: these pauses are no request.
func readRequest(node kubeapi.Node, pausesClients bool, now time.Time) releaseRequest {
	for _, key := range pauseLabels {
		value := node.Labels[key]
		if own := pausesClients && value == pausedValue; strings.Contains(value, pauseMark) && !own {
			return releaseRequest{paused: true, by: key + "=" + value}
		}
	}
	annotations := node.Annotations
	text, exists := annotations[untilAnnotation]
	if !exists {
		return releaseRequest{}
	}
	r := releaseRequest{by: oneLine(annotations[byAnnotation])}
	r.by = strings.ToValidUTF8(r.by[:min(len(r.by), maxName)], "") // as it is decoded from JSON
	until, err := time.Parse(time.RFC3339, text)
	switch {
	case err != nil:
		r.err = fmt.Errorf("%s is not a time such as %s", untilAnnotation, now.Add(time.Hour).UTC().Format(time.RFC3339))
	case until.Sub(now) > maxRelease:
		r.err = fmt.Errorf("%s is more than %v ahead", untilAnnotation, maxRelease)
	default:
		r.until = until.UTC()
	}
	return r
}

// isActive reports whether the driver is to be released in this state.
func isActive(state string) bool { return state == releasePending || state == releaseDone }

// decideRelease returns the state and the answer for a request. released says that the driver is
// released, and releasedHere that this process released it for the request. The driver must be
// released if the state is pending or done. It must be in use again after these states if the
// answer is Own.
func decideRelease(
	r releaseRequest, state string, a releaseAnswer, released, releasedHere bool, now time.Time,
) (string, releaseAnswer) {
	switch {
	case r.err != nil && isActive(state) && now.Before(a.Until): // the valid request stays in force until its time
		a.Reason = r.err.Error()
		return state, a
	case r.err != nil:
		return releaseRefused, releaseAnswer{By: r.by, Reason: r.err.Error()}
	case !r.paused && r.until.IsZero():
		return "", releaseAnswer{}
	}
	same := state != "" && state != releaseRefused && a.Until.Equal(r.until) && a.By == r.by
	switch {
	case same && state == releaseEnded:
		return state, a
	case !r.paused && !now.Before(r.until):
		if !same {
			return releaseEnded, releaseAnswer{By: r.by, Until: r.until,
				Reason: "the time had passed before the request was read"}
		}
		a.Reason = ""
		return releaseEnded, a
	case !r.paused && a.Resumed.Equal(r.until):
		return releaseResumed, releaseAnswer{By: r.by, Until: r.until, Reason: resumedByUser}
	case !same:
		next := releaseAnswer{By: r.by, Since: now.UTC().Truncate(time.Second), Until: r.until,
			Own: a.Own && isActive(state) || !released}
		if next.Resumed = a.Resumed; r.paused && state == releaseResumed && !a.Until.IsZero() {
			next.Resumed = a.Until
		}
		return releasePending, next
	case isActive(state) && releasedHere && !released:
		a.Reason = resumedByUser
		return releaseResumed, a
	}
	return state, a
}

// A releaser follows the labels and annotations for the release of the driver.
type releaser struct {
	client *kubeapi.Client
	daemon daemon.View
	alarm  *feed.Alarm

	// These fields survive a term of leadership. resumeOwed is when this process last started to
	// release the driver, if it must use the driver again even if another leader ends the request;
	// zero otherwise.
	latestNode
	resumeOwed time.Time

	// state and answer are the state and the answer of this process, until the Node has them.
	// releasedHere says that this process released the driver for them.
	state        string
	answer       releaseAnswer
	stateRead    bool // they were read from the Node
	releasedHere bool
	attemptedAt  time.Time // last attempt to release the driver
}

// followRelease follows the labels and annotations until ctx ends, while the configuration enables
// it. If it becomes disabled, an active request ends.
func (c *Cluster) followRelease(ctx context.Context, d daemon.View) {
	r := &c.releaser
	*r = releaser{client: c.client, daemon: d, alarm: new(feed.Alarm), latestNode: r.latestNode, resumeOwed: r.resumeOwed}
	wake := func() []<-chan struct{} {
		_, node := r.client.Nodes().Latest()
		_, configured := d.Configs.Latest()
		_, looked := d.Snapshots.Latest()
		_, led := d.Lead.Statuses().Latest()
		return []<-chan struct{}{node, configured, looked, led, r.alarm.Rings()}
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "quiesce by the Node", wake, r.step)
}

// step carries out the request, and answers it. At the end of a request it uses the driver again
// before it updates the Node, so that an unavailable API server does not keep GPUs from pods. At
// the start it updates the Node before it releases the driver, so that a later process knows
// whether to use the driver again.
func (r *releaser) step(ctx context.Context) error {
	configured, node, now := r.daemon.Configs.Value(), r.client.Nodes().Value(), time.Now()
	enabled := configured.Features.Quiesce
	if node.UID == "" || !enabled && !r.stateRead && r.resumeOwed.IsZero() &&
		!isActive(node.Annotations[stateAnnotation]) {
		return nil
	}
	r.update(node, now)
	if !r.stateRead {
		if err := r.restore(ctx, now); err != nil {
			return err
		}
	}
	var request releaseRequest
	if enabled {
		request = readRequest(r.node, configured.MIG.PauseClients, now)
	}
	limited, cancel := context.WithTimeout(ctx, statusTimeout)
	status, err := r.daemon.Status(limited)
	cancel()
	if err != nil { // the daemon is busy
		r.alarm.After(ctx, statusEvery)
		return nil
	}
	if !r.resumeOwed.IsZero() && !isActive(r.state) { // another leader has ended the request since
		// a user ran quiesce on the node
		theirs := status.Quiesced != nil && status.Quiesced.Since.After(r.resumeOwed.Add(releaseTimeout))
		resume := status.Quiet && !theirs
		if err := r.end(ctx, r.state, resume); err != nil {
			return err
		}
		status.Quiet = theirs
	}
	state, answer := decideRelease(request, r.state, r.answer, status.Quiet, r.releasedHere, now)
	if isActive(r.state) && !isActive(state) {
		if err := r.end(ctx, state, status.Quiet && r.answer.Own); err != nil {
			return err
		}
	}
	begins := !isActive(r.state) || !r.answer.Until.Equal(answer.Until) || r.answer.By != answer.By
	previousState, previousAnswer := r.state, r.answer
	r.state, r.answer = state, answer
	if !isActive(state) {
		return r.write(ctx)
	}
	if !request.paused {
		r.alarm.After(ctx, answer.Until.Sub(now))
	}
	if begins {
		if err := r.write(ctx); err != nil {
			// the next attempt also starts the request
			if r.state, r.answer = previousState, previousAnswer; kubeapi.IsStale(err) {
				r.read()
			}
			return err
		}
	}
	if r.release(ctx); request.err != nil {
		r.answer.Reason = request.err.Error()
	}
	return r.write(ctx)
}

// restore reads the state left by the previous process. If that process ended a request for which
// this process still has the driver released, restore reads the latest Node: the watch may show a
// Node from before a request that is active now.
func (r *releaser) restore(ctx context.Context, now time.Time) error {
	if r.read(); !r.resumeOwed.IsZero() && !isActive(r.state) {
		node, err := r.client.Get(ctx)
		if err != nil {
			return err
		}
		r.update(node, now)
		r.read()
	}
	r.stateRead = true
	return nil
}

// read stores the state and the answer of the Node.
func (r *releaser) read() {
	r.state, r.answer = r.node.Annotations[stateAnnotation], releaseAnswer{}
	// an invalid answer of another program is ignored
	_ = json.Unmarshal([]byte(r.node.Annotations[answerAnnotation]), &r.answer)
}

// end ends a request, and uses the driver again if resume is set.
func (r *releaser) end(ctx context.Context, state string, resume bool) error {
	r.releasedHere, r.attemptedAt, r.resumeOwed = false, time.Time{}, time.Time{}
	if !resume {
		return nil
	}
	klog.FromContext(ctx).Info("Using the driver again after a request on the Node", "by", r.answer.By, "state", state)
	limited, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	if err := r.daemon.Resume(limited); err != nil {
		klog.FromContext(ctx).Info("The driver is not in use yet after a request on the Node", "reason", err.Error())
	}
	return ctx.Err() // the monitor keeps trying
}

// release releases the driver, and sets the state. The driver is released on the whole node when no
// other process of this program, for example during a rolling update, may have it open.
func (r *releaser) release(ctx context.Context) {
	if now := time.Now(); !r.releasedHere {
		if wait := releaseTimeout - now.Sub(r.attemptedAt); wait > 0 { // the monitor keeps trying
			r.alarm.After(ctx, wait)
			return
		}
		if r.attemptedAt = now; r.answer.Own {
			r.resumeOwed = now
		}
		klog.FromContext(ctx).Info("Releasing the driver for a request on the Node", "by", r.answer.By)
		limited, cancel := context.WithTimeout(ctx, releaseTimeout)
		err := r.daemon.Quiesce(limited)
		cancel()
		if r.releasedHere = err == nil; !r.releasedHere {
			r.state, r.answer.Reason = releasePending, oneLine(err.Error())
			r.alarm.After(ctx, releaseTimeout)
			return
		}
	}
	r.state, r.answer.Reason = releaseDone, ""
	if n := r.daemon.Lead.Statuses().Value().Standbys; n > 0 {
		r.state, r.answer.Reason = releasePending,
			"another process of this program still has the driver open, for example in a rolling update"
	}
}

// write writes the state and the answer to the Node if the Node does not have them.
func (r *releaser) write(ctx context.Context) error {
	annotations := map[string]string{}
	if r.state != "" {
		text, err := json.Marshal(r.answer)
		if err != nil {
			return err
		}
		annotations[stateAnnotation], annotations[answerAnnotation] = r.state, string(text)
	}
	is := r.node.Annotations
	if is[stateAnnotation] == annotations[stateAnnotation] && is[answerAnnotation] == annotations[answerAnnotation] {
		return nil
	}
	after, err := r.client.ApplyReleaseAnswer(ctx, r.node.UID, r.node.ResourceVersion, annotations)
	if err := r.accept(ctx, r.client, after, err, time.Now()); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Answered a request to release the driver", "state", r.state, "reason", r.answer.Reason)
	return nil
}
