package keeper

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
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

// pauseLabels are the labels of a Node with which NVIDIA's tools stop the clients of the driver.
var pauseLabels = []string{deployLabels + "device-plugin", deployLabels + "client"}

// pauseMark is in the value of such a label during a pause. driver-manager writes
// paused-for-driver-upgrade, also behind an earlier value, and mig-manager paused-for-mig-change.
// Every other value leaves the driver in use: a user writes false to keep NVIDIA's plugin away from a
// node permanently, and driver-manager writes an empty value where the label was absent.
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
	// maxRelease limits a request: a wrong date must not remove a node's GPUs for a year.
	maxRelease = 24 * time.Hour
	// releaseTimeout limits the wait for one attempt to release the driver or to use it again. The
	// attempt continues in the background.
	releaseTimeout = 30 * time.Second
	// statusTimeout limits the time to read the daemon's status, and statusRetry is the delay after a
	// failure.
	statusTimeout = 2 * time.Second
	statusRetry   = 5 * time.Second
	// maxName is the size limit of the user's name, in bytes.
	maxName = 200
	// resumedByUser is the reason of releaseResumed.
	resumedByUser = "resume was run on the node"
)

// A releaseRequest is the request on a Node: by a label, or else by the annotations. The
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
	// Own is true if this program released the driver, and must use the driver again afterwards. Otherwise a
	// user had released the driver on the node.
	Own    bool   `json:"own,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Resumed is, in the answer to a label, the time of the request by annotation that a user has
	// ended by resume: it does not come back after the label's.
	Resumed time.Time `json:"resumed,omitzero"`
}

// readRequest reads the request on a Node. pausesClients is true if this program pauses
// DaemonSets for a MIG layout: own pauses are no request.
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
	r := releaseRequest{by: OneLine(annotations[byAnnotation])}
	r.by = strings.ToValidUTF8(r.by[:min(len(r.by), maxName)], "") // as it is decoded from JSON
	until, err := time.Parse(time.RFC3339, text)
	switch {
	case err != nil:
		r.err = fmt.Errorf("%s is not a time such as %s", untilAnnotation,
			now.Add(time.Hour).UTC().Format(time.RFC3339))
	case until.Sub(now) > maxRelease:
		r.err = fmt.Errorf("%s is more than %v ahead", untilAnnotation, maxRelease)
	default:
		r.until = until.UTC()
	}
	return r
}

// isActive reports whether the driver is to be released in this state.
func isActive(state string) bool { return state == releasePending || state == releaseDone }

// IsReleased reports whether a request on a Node has this program release the driver.
func IsReleased(node kubeapi.Node) bool { return isActive(node.Annotations[stateAnnotation]) }

// decideRelease returns the state and the answer for a request. released is true if the driver is
// released, and releasedHere if this process released the driver for the request. The driver must be
// released if the state is pending or done. The driver must be in use again afterwards if the
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

// A ReleasePart follows the labels and annotations for the release of the driver, and answers them.
// At the end of a request, the part uses the driver again before the update of the Node: an
// unavailable API server must not keep GPUs from pods. At the start, the part updates the Node before
// the release of the driver: a later process must know whether to use the driver again.
type ReleasePart struct {
	Daemon  daemon.View
	Refresh func(context.Context) (kubeapi.Node, error) // reads the newest Node
	// resumeOwed is when this process last started to release the driver, if it must use the driver
	// again even if another leader ends the request; zero otherwise. It survives a term of leadership.
	ResumeOwed *time.Time

	releaseInputs

	// state and answer are the state and the answer of this process, until the Node has them.
	// releasedHere is true if this process released the driver for the answer.
	state        string
	answer       releaseAnswer
	stateRead    bool // they were read from the Node
	refreshed    bool // the Node was read for them
	releasedHere bool
	attemptedAt  time.Time // last attempt to release the driver
	resumedAt    time.Time // start of the last failed attempt to use the driver again; zero if there is none
}

// The releaseInputs are what the last Look of a ReleasePart has read.
type releaseInputs struct {
	enabled       bool
	pausesClients bool
	standbys      int
	status        status.Status
	statusErr     error // why there is no status
	statusOld     bool  // the status is from before a failed request, which may still be carried out
}

// isIdle reports whether the part has nothing to do with a Node.
func (p *ReleasePart) isIdle(enabled bool, node kubeapi.Node) bool {
	onNode := node.Annotations[stateAnnotation]
	if p.stateRead {
		return !enabled && p.state == "" && p.ResumeOwed.IsZero() && onNode == ""
	}
	return !enabled && p.ResumeOwed.IsZero() && !isActive(onNode)
}

// Inputs implements Part.
func (p *ReleasePart) Inputs() []<-chan struct{} {
	c, configChanged := p.Daemon.Configs.Latest()
	_, snapshotChanged := p.Daemon.Snapshots.Latest()
	_, leadChanged := p.Daemon.Lead.Statuses().Latest()
	return inputsIf(c.Features.Quiesce || p.state != "" || !p.ResumeOwed.IsZero(),
		configChanged, snapshotChanged, leadChanged)
}

// Look implements Part.
func (p *ReleasePart) Look(ctx context.Context, node kubeapi.Node) {
	configured := p.Daemon.Configs.Value()
	p.enabled, p.pausesClients = configured.Features.Quiesce, configured.MIG.PauseClients
	p.standbys = p.Daemon.Lead.Statuses().Value().Standbys
	if node.UID == "" || p.isIdle(p.enabled, node) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	p.status, p.statusErr = p.Daemon.Status(limited)
	p.statusOld = false
}

// Want implements Part.
func (p *ReleasePart) Want(node kubeapi.Node, now time.Time) Decision {
	if node.UID == "" || p.isIdle(p.enabled, node) {
		return Decision{}
	}
	if !p.stateRead {
		if p.read(node); !p.ResumeOwed.IsZero() && !isActive(p.state) && !p.refreshed {
			return p.readNode()
		}
		p.stateRead = true
	}
	switch {
	case p.statusOld:
		return Decision{At: now}
	case p.statusErr != nil: // the daemon is busy
		return Decision{At: now.Add(statusRetry)}
	}
	// A release for a change of the driver does not count: the request on the Node takes it over.
	quiet := p.status.Quiet && (p.status.Quiesced == nil || !p.status.Quiesced.ForChange)
	again := p.isReleasedAgain()
	if again {
		p.answer.Own = false
	}
	if !p.ResumeOwed.IsZero() && !isActive(p.state) { // another leader has ended the request since
		// a user ran quiesce on the node
		theirs := again || p.status.Quiesced != nil && p.status.Quiesced.Since.After(p.ResumeOwed.Add(releaseTimeout))
		if quiet && !theirs {
			return p.resume(p.state, p.answer, now)
		}
		p.end()
	}
	var request releaseRequest
	if p.enabled {
		request = readRequest(node, p.pausesClients, now)
	}
	state, answer := decideRelease(request, p.state, p.answer, quiet, p.releasedHere, now)
	if !isActive(state) {
		if isActive(p.state) && quiet && p.answer.Own {
			return p.resume(state, answer, now)
		}
		if isActive(p.state) {
			p.end()
		}
		p.state, p.answer = state, answer
		return p.write(node, time.Time{})
	}
	if !isActive(p.state) || !p.answer.Until.Equal(answer.Until) || p.answer.By != answer.By {
		if d := p.begin(node, state, answer); d.Patch != nil {
			d.At = answer.Until
			return d
		}
	}
	p.state, p.answer = state, answer
	if !p.releasedHere && !now.Before(p.attemptedAt.Add(releaseTimeout)) {
		return p.release(now)
	}
	at := answer.Until
	switch {
	case !p.releasedHere: // the monitor keeps trying
		at = order.Earliest(at, p.attemptedAt.Add(releaseTimeout))
	case p.standbys > 0:
		p.state, p.answer.Reason = releasePending,
			"another process of this program still has the driver open, for example in a rolling update"
	default:
		p.state, p.answer.Reason = releaseDone, ""
	}
	if request.err != nil {
		p.answer.Reason = request.err.Error()
	}
	return p.write(node, at)
}

// readNode reads the newest Node: the watch may show a Node from before a request that is active
// now. The previous process ended a request for which this process still has the driver released.
func (p *ReleasePart) readNode() Decision {
	return Decision{Act: func(ctx context.Context) error {
		_, err := p.Refresh(ctx)
		return err
	}, Done: func(_ context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
		p.refreshed = err == nil
		return false
	}}
}

// read stores the state and the answer of the Node.
func (p *ReleasePart) read(node kubeapi.Node) {
	p.state, p.answer = node.Annotations[stateAnnotation], releaseAnswer{}
	// an invalid answer of another program is ignored
	_ = json.Unmarshal([]byte(node.Annotations[answerAnnotation]), &p.answer)
}

// end ends a request.
func (p *ReleasePart) end() {
	p.releasedHere, p.attemptedAt, p.resumedAt, *p.ResumeOwed = false, time.Time{}, time.Time{}, time.Time{}
}

// isReleasedAgain reports whether a user ran quiesce on the node after the last failed attempt to
// use the driver again.
func (p *ReleasePart) isReleasedAgain() bool {
	return !p.resumedAt.IsZero() && p.status.Quiesced != nil && p.status.Quiesced.Since.After(p.resumedAt)
}

// resume ends a request with this state and answer, and uses the driver again. After a failure, the
// next status says whether the monitor keeps trying, or whether resume must be repeated because the
// monitor has not received the request.
func (p *ReleasePart) resume(state string, answer releaseAnswer, now time.Time) Decision {
	if !p.resumedAt.IsZero() {
		if again := p.resumedAt.Add(statusRetry); now.Before(again) {
			return Decision{At: again}
		}
	}
	by := p.answer.By
	return Decision{Act: func(ctx context.Context) error {
		klog.FromContext(ctx).Info("Using the driver again after a request on the Node", "by", by, "state", state)
		limited, cancel := context.WithTimeout(ctx, releaseTimeout)
		defer cancel()
		err := p.Daemon.Resume(limited)
		if err != nil {
			klog.FromContext(ctx).Info("The driver is not in use yet after a request on the Node", "reason",
				err.Error())
		}
		return err
	}, Done: func(_ context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
		if err != nil {
			p.statusOld, p.releasedHere, p.attemptedAt, p.resumedAt = true, false, time.Time{}, now
			return true
		}
		p.end()
		p.state, p.answer, p.status.Quiet, p.status.Quiesced = state, answer, false, nil
		return false
	}}
}

// begin returns the write of a new request's answer; none if the Node has the answer. The request
// starts when the write has succeeded.
func (p *ReleasePart) begin(node kubeapi.Node, state string, answer releaseAnswer) Decision {
	d := writeAnswer(node, state, answer)
	if d.Patch == nil {
		return d
	}
	logWrite := d.Done
	d.Done = func(ctx context.Context, after kubeapi.Node, err error, now time.Time) bool {
		switch {
		case err == nil:
			p.state, p.answer = state, answer
		case kubeapi.IsStale(err): // maybe another process has started the request
			p.stateRead = false
		}
		return logWrite(ctx, after, err, now)
	}
	return d
}

// release releases the driver. The driver is released on the whole node when no other process of
// this program, for example during a rolling update, may have it open.
func (p *ReleasePart) release(now time.Time) Decision {
	by := p.answer.By
	p.attemptedAt, p.resumedAt = now, time.Time{}
	if p.answer.Own {
		*p.ResumeOwed = now
	}
	return Decision{Act: func(ctx context.Context) error {
		klog.FromContext(ctx).Info("Releasing the driver for a request on the Node", "by", by)
		limited, cancel := context.WithTimeout(ctx, releaseTimeout)
		defer cancel()
		return p.Daemon.Quiesce(limited)
	}, Done: func(_ context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
		if p.releasedHere = err == nil; p.releasedHere {
			p.status.Quiet, p.status.Quiesced = true, nil
		} else {
			p.statusOld, p.state, p.answer.Reason = true, releasePending, OneLine(err.Error())
		}
		return true
	}}
}

// write writes the state and the answer to the Node if the Node does not have them. The next
// decision is at a time; zero for never.
func (p *ReleasePart) write(node kubeapi.Node, at time.Time) Decision {
	d := writeAnswer(node, p.state, p.answer)
	d.At = at
	return d
}

// writeAnswer returns the write of a state and an answer; none if the Node has them.
func writeAnswer(node kubeapi.Node, state string, answer releaseAnswer) Decision {
	annotations := map[string]string{}
	if state != "" {
		text, err := json.Marshal(answer)
		if err != nil {
			return Decision{Problem: err}
		}
		annotations[stateAnnotation], annotations[answerAnnotation] = state, string(text)
	}
	is := node.Annotations
	if is[stateAnnotation] == annotations[stateAnnotation] && is[answerAnnotation] == annotations[answerAnnotation] {
		return Decision{}
	}
	return Decision{
		Patch: kubeapi.ReleaseAnswerPatch(annotations),
		Done: func(ctx context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
			if err == nil {
				klog.FromContext(ctx).Info("Answered a request to release the driver", "state", state, "reason",
					answer.Reason)
			}
			return false
		},
	}
}
