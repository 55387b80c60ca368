package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const (
	// statusEvery is how often the daemon's status is read while nothing happens: no feed tells that
	// the monitor is stuck.
	statusEvery = 5 * time.Second
	// statusDelay is how long after a change the status is read: what happens to several GPUs at once
	// can be one Event.
	statusDelay = 250 * time.Millisecond
	// statusPatience is how long the daemon may take to give its status.
	statusPatience = 2 * time.Second
	// lookAgain is how long after a write before which another program changed the node the next one
	// is made.
	lookAgain = 100 * time.Millisecond
	// absence is how long a process that finds no GPU, and was a standby before it leads, says nothing
	// of them: the one that led before may be started again, and know more.
	absence = time.Minute
	// ownWrite is how long what a write has returned counts, until the watch has told of it.
	ownWrite = 10 * time.Minute
)

// The condition of a node that says whether its GPUs are healthy.
const (
	conditionType   = "GPUHealthy"
	conditionRepeat = time.Hour // after that it is written again without a change
)

// gpuLabels are the labels of a node that is known to have GPUs, with the value true.
var gpuLabels = []string{"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present"}

// A reporter tells the cluster how the node's GPUs are: by Events, a condition and a taint. It is
// for one term under the lead.
type reporter struct {
	daemon daemon.View
	api    *kubeapi.Client
	nodes  *feed.Feed[kubeapi.Node]
	spread *spread
	// fraction, from 0 up to 1, is this process's own.
	fraction float64

	statuses *feed.Feed[status.Status] // the last one that could be read
	informed *feed.Feed[bool]          // whether one was asked for while the node was known
	queue    queue
}

// report reports until ctx ends.
func (c *Cluster) report(ctx context.Context, d daemon.View) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("report"))
	r := &reporter{
		daemon: d, api: c.client, nodes: c.client.Nodes(), spread: &c.spread, fraction: rand.Float64(),
		statuses: feed.New(status.Status{}), informed: feed.New(false), queue: queue{changed: feed.New(struct{}{})},
	}
	var loops sync.WaitGroup
	defer loops.Wait()
	for _, loop := range []func(context.Context){r.followStatus, r.findEvents, r.sendEvents, r.keepCondition, r.keepTaint} {
		loops.Go(func() { loop(ctx) })
	}
}

// tellsOfGPUs reports whether the cluster is told of the GPUs by Events, the condition or the
// taint.
func tellsOfGPUs(f config.Features) bool { return f.Events || f.Condition || f.Taint }

// followStatus publishes the daemon's status when something changed, and every few seconds.
func (r *reporter) followStatus(ctx context.Context) {
	began, standby := time.Now(), r.daemon.Lead.Heard().Value() != nil
	for {
		_, looked := r.daemon.Snapshots.Latest()
		_, offered := r.daemon.Offered.Latest()
		_, refused := r.daemon.ConfigErrors.Latest()
		c, configured := r.daemon.Configs.Latest()
		node, seen := r.nodes.Latest()
		var divided <-chan struct{}
		if r.daemon.MIG != nil {
			_, divided = r.daemon.MIG.Latest()
		}
		var tick <-chan time.Time
		if tellsOfGPUs(c.Features) {
			tick = time.After(statusEvery)
			asking, cancel := context.WithTimeout(ctx, statusPatience)
			s, err := r.daemon.Status(asking)
			cancel()
			if err != nil {
				s = r.statuses.Value() // readers see by its age that it is old
			}
			if !standby || len(s.GPUs)+len(s.Retries) > 0 || time.Since(began) >= absence {
				standby = false
				r.statuses.Publish(s)
			}
			if err == nil && node.UID != "" && !r.informed.Value() {
				r.informed.Publish(true)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-looked:
		case <-offered:
		case <-refused:
		case <-configured:
		case <-seen:
		case <-divided:
		case <-tick:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(statusDelay):
		}
	}
}

// findEvents puts into the queue what the daemon's statuses have to tell. It begins with one that
// was asked for after the API server has told of the node: until then the configuration of a node
// that starts for the first time is in doubt.
func (r *reporter) findEvents(ctx context.Context) {
	var history *nodeevents.History
	for {
		_, drained := r.queue.changed.Latest()
		node, seen := r.nodes.Latest()
		informed, begun := r.informed.Latest() // before the status
		s, changed := r.statuses.Latest()
		c, configured := r.daemon.Configs.Latest()
		var again <-chan time.Time
		switch {
		case !c.Features.Events:
			history = nil
			r.queue.clear()
		case node.UID == "" || s.Version == "" || history == nil && !informed:
		default:
			if history == nil {
				history = &nodeevents.History{}
				there, is := find(node.Conditions, conditionType)
				labelled := slices.ContainsFunc(gpuLabels, func(l string) bool { return node.Labels[l] == "true" })
				told := judged(there)
				if !c.Features.Condition { // then it is an old one
					told = nodeevents.Condition{}
				}
				history.Recall(told, is || labelled)
			}
			now := time.Now()
			batch := history.Next(s, now, r.queue.room())
			r.queue.push(batch.Events)
			for _, cause := range batch.Dropped {
				r.daemon.EventDropped(cause)
			}
			if !batch.Again.IsZero() {
				again = time.After(batch.Again.Sub(now))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-drained:
		case <-seen:
		case <-changed:
		case <-begun:
		case <-configured:
		case <-again:
		}
	}
}

// keepCondition keeps the node's condition.
func (r *reporter) keepCondition(ctx context.Context) {
	var written kubeapi.Node // as the last write returned it
	var at time.Time
	pace := nodeevents.Pace{}
	nudge := r.newNudge()
	kubeapi.Keep(ctx, clock.RealClock{}, "condition", nudge.channels, func(ctx context.Context) error {
		f, now := r.daemon.Configs.Value().Features, time.Now()
		s, node := r.statuses.Value(), r.nodes.Value()
		if !f.Condition || node.UID == "" {
			pace = nodeevents.Pace{}
			return nil
		}
		if written.UID == node.UID && written.After(node) && now.Sub(at) < ownWrite {
			node = written
		}
		there, ok := find(node.Conditions, conditionType)
		wanted, told := nodeevents.Judge(s, now, ok)
		if !told {
			return nil
		}
		pace.Fraction, pace.Heartbeat = r.fraction, conditionRepeat
		if !ok && wanted.Status == nodeevents.True {
			limit, err := r.spread.of(ctx, r.api)
			if err != nil {
				return err
			}
			pace.First = time.Duration(r.fraction * float64(limit))
		}
		var before *nodeevents.Condition
		if ok {
			before = new(judged(there))
		}
		due := pace.Due(before, there.LastHeartbeatTime, wanted, now)
		if due.IsZero() || due.After(now) {
			nudge.at(due, now)
			return nil
		}
		c := kubeapi.Condition{
			Type: conditionType, Status: wanted.Status, Reason: string(wanted.Reason), Message: wanted.Message,
			LastHeartbeatTime: now, LastTransitionTime: there.LastTransitionTime,
		}
		if !ok || there.Status != wanted.Status || there.LastTransitionTime.IsZero() {
			c.LastTransitionTime = now
		}
		patched, err := r.api.PatchCondition(ctx, node.ResourceVersion, c)
		if kubeapi.IsOvertaken(err) { // it is judged anew by what the node is now
			written, err = r.api.Get(ctx)
			at = now
			nudge.at(now.Add(lookAgain), now)
			return err
		}
		if err != nil {
			return err
		}
		written, at = patched, now
		pace.Wrote(now)
		nudge.at(now.Add(conditionRepeat), now)
		return nil
	})
}

// keepTaint keeps the node's taint, and removes it where it is not wanted.
func (r *reporter) keepTaint(ctx context.Context) {
	pace := nodeevents.Pace{}
	nudge := r.newNudge()
	kubeapi.Keep(ctx, clock.RealClock{}, "taint", nudge.channels, func(ctx context.Context) error {
		f, now := r.daemon.Configs.Value().Features, time.Now()
		s, node := r.statuses.Value(), r.nodes.Value()
		none, known := nodeevents.NoHealthyGPU(s)
		if !f.Taint {
			none, known = false, true
		}
		if node.UID == "" || !known {
			return nil
		}
		is := kubeapi.NoHealthyGPU.IsOn(node)
		due := pace.Due(asCondition(is), time.Time{}, *asCondition(none), now)
		if due.IsZero() || due.After(now) {
			nudge.at(due, now)
			return nil
		}
		err := r.api.SetTaint(ctx, kubeapi.NoHealthyGPU, none, now)
		if !none && kubeapi.IsDenied(err) {
			err = fmt.Errorf("the taint %s stays, as the right to remove it is missing; remove it with: kubectl taint node %s %s-: %w",
				kubeapi.NoHealthyGPU, node.Name, kubeapi.NoHealthyGPU, err)
		}
		return err
	})
}

// asCondition returns the condition that has the pace of a taint.
func asCondition(tainted bool) *nodeevents.Condition {
	if tainted {
		return &nodeevents.Condition{Status: nodeevents.False}
	}
	return &nodeevents.Condition{Status: nodeevents.True}
}

// judged returns a condition of the node as package report has it.
func judged(c kubeapi.Condition) nodeevents.Condition {
	return nodeevents.Condition{Status: c.Status, Reason: nodeevents.Reason(c.Reason), Message: c.Message}
}

func find(conditions []kubeapi.Condition, name string) (kubeapi.Condition, bool) {
	i := slices.IndexFunc(conditions, func(c kubeapi.Condition) bool { return c.Type == name })
	if i < 0 {
		return kubeapi.Condition{}, false
	}
	return conditions[i], true
}

// A nudge wakes a loop when something of the node or its GPUs changed, or at a time.
type nudge struct {
	r     *reporter
	fired *feed.Feed[struct{}]
	timer *time.Timer
}

func (r *reporter) newNudge() *nudge { return &nudge{r: r, fired: feed.New(struct{}{})} }

// channels returns what is closed when the loop has something to do.
func (n *nudge) channels() []<-chan struct{} {
	_, fired := n.fired.Latest()
	_, seen := n.r.nodes.Latest()
	_, changed := n.r.statuses.Latest()
	_, configured := n.r.daemon.Configs.Latest()
	return []<-chan struct{}{fired, seen, changed, configured}
}

// at sets when the loop wakes up next: at due instead of the time that was set before; never if due
// is zero.
func (n *nudge) at(due, now time.Time) {
	if n.timer != nil {
		n.timer.Stop()
		n.timer = nil
	}
	if !due.IsZero() {
		n.timer = time.AfterFunc(due.Sub(now), func() { n.fired.Publish(struct{}{}) })
	}
}
