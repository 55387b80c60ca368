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

// The annotations of a node by which the driver is released: until when and by whom are written by
// anybody who may, the others by this program.
const (
	// a time in the form of RFC 3339; the driver is in use again without it.
	untilAnnotation  = "gpu-device-plugin.github.io/quiesce.until"
	byAnnotation     = "gpu-device-plugin.github.io/quiesce.by" // who wants that, for people
	stateAnnotation  = "gpu-device-plugin.github.io/quiesce.state"
	answerAnnotation = "gpu-device-plugin.github.io/quiesce.answer"
)

// The states of a wish to release the driver.
const (
	releasePending = "pending" // the driver is not released yet, on the node as a whole
	releaseDone    = "done"    // it is
	releaseEnded   = "ended"   // the time has passed, and the driver is in use again
	releaseResumed = "resumed" // somebody has said resume on the node before that time
	releaseRefused = "refused" // the wish cannot be read, or is for too long
)

const (
	// longestRelease is how far ahead the end of a wish may be: a mistake in a date does not take a
	// node's GPUs away for a year.
	longestRelease = 24 * time.Hour
	// releasePatience is the longest wait for a try to release the driver, or to use it again. The try
	// goes on afterwards.
	releasePatience = 30 * time.Second
	// maxName is how many bytes of who wants it are kept.
	maxName = 200
)

// A releaseWish is what the annotations of a node say; the zero value is no wish.
type releaseWish struct {
	until time.Time
	by    string
	err   error // why the annotation cannot be obeyed
}

// A releaseAnswer is what the node is told of a wish, as the content of an annotation in JSON.
type releaseAnswer struct {
	By    string    `json:"by,omitempty"`
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
	// Own says that the driver was in use before, so that it is to be in use afterwards. Somebody may
	// have released it on the node.
	Own    bool   `json:"own,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// readWish reads the wish of a node.
func readWish(annotations map[string]string, now time.Time) releaseWish {
	text, has := annotations[untilAnnotation]
	if !has {
		return releaseWish{}
	}
	w := releaseWish{by: oneLine(annotations[byAnnotation])}
	w.by = strings.ToValidUTF8(w.by[:min(len(w.by), maxName)], "") // as it comes back from JSON
	until, err := time.Parse(time.RFC3339, text)
	switch {
	case err != nil:
		w.err = fmt.Errorf("%s is no time such as %s", untilAnnotation, now.Add(time.Hour).UTC().Format(time.RFC3339))
	case until.Sub(now) > longestRelease:
		w.err = fmt.Errorf("%s is more than %v ahead", untilAnnotation, longestRelease)
	default:
		w.until = until.UTC()
	}
	return w
}

// isActive reports whether a wish in this state has the driver released.
func isActive(state string) bool { return state == releasePending || state == releaseDone }

// judgeWish returns what the answer to a wish is now. Released says that the driver is released,
// and was that this process has released it for the wish. The driver is to be released if the state
// is pending or done, and in use if it was so and the answer is Own.
func judgeWish(w releaseWish, state string, a releaseAnswer, released, was bool, now time.Time) (string,
	releaseAnswer) {
	switch {
	case w.err != nil && isActive(state) && now.Before(a.Until): // what was understood stays in force until its time
		a.Reason = w.err.Error()
		return state, a
	case w.err != nil:
		return releaseRefused, releaseAnswer{By: w.by, Reason: w.err.Error()}
	case w.until.IsZero():
		return "", releaseAnswer{}
	}
	same := state != "" && state != releaseRefused && a.Until.Equal(w.until) && a.By == w.by
	switch {
	case same && state == releaseEnded:
		return state, a
	case !now.Before(w.until):
		if !same {
			return releaseEnded, releaseAnswer{By: w.by, Until: w.until, Reason: "the time had passed before the wish was seen"}
		}
		a.Reason = ""
		return releaseEnded, a
	case !same:
		own := a.Own && isActive(state) || !released
		return releasePending, releaseAnswer{By: w.by, Since: now.UTC().Truncate(time.Second), Until: w.until, Own: own}
	case isActive(state) && was && !released:
		a.Reason = "resume was said on the node"
		return releaseResumed, a
	}
	return state, a
}

// A releaser follows the annotation by which the driver is released.
type releaser struct {
	client *kubeapi.Client
	daemon daemon.View
	again  *feed.Alarm

	// What outlives a term of the lead. Owed is when this process released the driver last, or began
	// to, and is to use it again: another process that leads may end the wish. It is zero if it is not
	// to.
	sighting
	owed time.Time

	// state and answer are those of this process, until the node has them; was says that this process
	// has released the driver for them.
	state  string
	answer releaseAnswer
	known  bool // they were read from the node
	was    bool
	tried  time.Time // when the driver was to be released last
}

// followRelease follows the annotation until ctx ends, while the configuration wants that. What was
// carried out of a wish before ends where the configuration does not want it any more.
func (c *Cluster) followRelease(ctx context.Context, d daemon.View) {
	r := &c.releaser
	*r = releaser{client: c.client, daemon: d, again: new(feed.Alarm), sighting: r.sighting, owed: r.owed}
	wake := func() []<-chan struct{} {
		_, node := r.client.Nodes().Latest()
		_, configured := d.Configs.Latest()
		_, looked := d.Snapshots.Latest()
		_, led := d.Lead.Statuses().Latest()
		return []<-chan struct{}{node, configured, looked, led, r.again.Rings()}
	}
	kubeapi.Keep(ctx, clock.RealClock{}, "quiesce by annotation", wake, r.step)
}

// step obeys the wish as it is now, and answers it. The driver is used again before the node is
// told, so that an API server that is away does not keep GPUs from pods. It is released after the
// node was told that it is to be: a later process finds there whether the driver is to be used
// again.
func (r *releaser) step(ctx context.Context) error {
	on, node, now := r.daemon.Configs.Value().Features.Quiesce, r.client.Nodes().Value(), time.Now()
	if node.UID == "" || !on && !r.known && r.owed.IsZero() && !isActive(node.Annotations[stateAnnotation]) {
		return nil
	}
	r.see(node, now)
	if !r.known {
		if err := r.begin(ctx, now); err != nil {
			return err
		}
	}
	var wish releaseWish
	if on {
		wish = readWish(r.node.Annotations, now)
	}
	asking, cancel := context.WithTimeout(ctx, statusPatience)
	status, err := r.daemon.Status(asking)
	cancel()
	if err != nil { // the daemon is busy
		r.again.After(ctx, statusEvery)
		return nil
	}
	if !r.owed.IsZero() && !isActive(r.state) { // another process has led since, and has ended the wish
		// quiesce was said on the node
		theirs := status.Quiesced != nil && status.Quiesced.Since.After(r.owed.Add(releasePatience))
		resume := status.Quiet && !theirs
		if err := r.end(ctx, r.state, resume); err != nil {
			return err
		}
		status.Quiet = theirs
	}
	state, answer := judgeWish(wish, r.state, r.answer, status.Quiet, r.was, now)
	if isActive(r.state) && !isActive(state) {
		if err := r.end(ctx, state, status.Quiet && r.answer.Own); err != nil {
			return err
		}
	}
	begins := !isActive(r.state) || !r.answer.Until.Equal(answer.Until) || r.answer.By != answer.By
	before, had := r.state, r.answer
	r.state, r.answer = state, answer
	if !isActive(state) {
		return r.write(ctx)
	}
	r.again.After(ctx, answer.Until.Sub(now))
	if begins {
		if err := r.write(ctx); err != nil {
			if r.state, r.answer = before, had; kubeapi.IsOvertaken(err) { // the next try begins, too
				r.read()
			}
			return err
		}
	}
	if r.release(ctx); wish.err != nil {
		r.answer.Reason = wish.err.Error()
	}
	return r.write(ctx)
}

// begin reads the state that the process before has left. Where that has ended a wish for which
// this one has the driver released still, the node is looked at: what the watch has told may be
// from before a wish that is carried out now.
func (r *releaser) begin(ctx context.Context, now time.Time) error {
	if r.read(); !r.owed.IsZero() && !isActive(r.state) {
		node, err := r.client.Get(ctx)
		if err != nil {
			return err
		}
		r.see(node, now)
		r.read()
	}
	r.known = true
	return nil
}

// read takes in the state and the answer that the node has.
func (r *releaser) read() {
	r.state, r.answer = r.node.Annotations[stateAnnotation], releaseAnswer{}
	// one that somebody else wrote says nothing
	_ = json.Unmarshal([]byte(r.node.Annotations[answerAnnotation]), &r.answer)
}

// end uses the driver again if resume says so.
func (r *releaser) end(ctx context.Context, state string, resume bool) error {
	r.was, r.tried, r.owed = false, time.Time{}, time.Time{}
	if !resume {
		return nil
	}
	klog.FromContext(ctx).Info("Using the driver again after a wish by annotation", "by", r.answer.By, "until",
		r.answer.Until, "state", state)
	trying, cancel := context.WithTimeout(ctx, releasePatience)
	defer cancel()
	if err := r.daemon.Resume(trying); err != nil {
		klog.FromContext(ctx).Info("The driver is not in use yet after a wish by annotation", "reason", err.Error())
	}
	return ctx.Err() // the monitor goes on trying
}

// release releases the driver, and sets the state. It is released on the whole node when no other
// process of this program, such as that of a roll-out, may have it open.
func (r *releaser) release(ctx context.Context) {
	if now := time.Now(); !r.was {
		if wait := releasePatience - now.Sub(r.tried); wait > 0 { // the monitor goes on trying by itself
			r.again.After(ctx, wait)
			return
		}
		if r.tried = now; r.answer.Own {
			r.owed = now
		}
		klog.FromContext(ctx).Info("Releasing the driver for a wish by annotation", "by", r.answer.By, "until",
			r.answer.Until)
		trying, cancel := context.WithTimeout(ctx, releasePatience)
		err := r.daemon.Quiesce(trying)
		cancel()
		if r.was = err == nil; !r.was {
			r.state, r.answer.Reason = releasePending, oneLine(err.Error())
			r.again.After(ctx, releasePatience)
			return
		}
	}
	r.state, r.answer.Reason = releaseDone, ""
	if n := r.daemon.Lead.Statuses().Value().Standbys; n > 0 {
		r.state, r.answer.Reason = releasePending, "another process of this program has the driver open still, as in a roll-out"
	}
}

// write gives the state and the answer to the node, if it does not have them.
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
	if err := r.takeIn(ctx, r.client, after, err, time.Now()); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Answered a wish to release the driver", "state", r.state, "reason", r.answer.Reason)
	return nil
}
