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
	// statusEvery is how often the daemon's status is read without a change, because no feed reports a
	// stuck monitor.
	statusEvery = 5 * time.Second
	// statusDelay is the delay between a change and reading the status, so that a fault of several
	// GPUs becomes one Event.
	statusDelay = 250 * time.Millisecond
	// statusTimeout limits the time to read the daemon's status.
	statusTimeout = 2 * time.Second
	// staleDelay is the delay of the next write after another program changed the Node first.
	staleDelay = 100 * time.Millisecond
	// absenceGrace delays reports by a new leader that finds no GPU: the previous leader may restart
	// and know more.
	absenceGrace = time.Minute
	// ownWriteTTL is how long the response to a write takes precedence over the watch.
	ownWriteTTL = 10 * time.Minute
)

// The condition of a Node for the health of its GPUs.
const (
	conditionType   = "GPUHealthy"
	conditionRepeat = time.Hour // an unchanged condition is written again after this time
)

// gpuLabels are the labels of a Node with GPUs; their value is true.
var gpuLabels = []string{"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present"}

// A reporter reports the state of the node's GPUs by Events, a condition and a taint. It lasts for
// one term of leadership.
type reporter struct {
	daemon daemon.View
	api    *kubeapi.Client
	nodes  *feed.Feed[kubeapi.Node]
	spread *spread
	// fraction is a random number in [0, 1) of this process.
	fraction float64

	statuses       *feed.Feed[status.Status] // the last status that could be read
	statusWithNode *feed.Feed[bool]          // whether a status was read while the Node was known
	queue          queue
}

// report reports until ctx ends.
func (c *Cluster) report(ctx context.Context, d daemon.View) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("report"))
	r := &reporter{
		daemon: d, api: c.client, nodes: c.client.Nodes(), spread: &c.spread, fraction: rand.Float64(),
		statuses: feed.New(status.Status{}), statusWithNode: feed.New(false), queue: queue{changed: feed.New(struct{}{})},
	}
	var loops sync.WaitGroup
	defer loops.Wait()
	for _, loop := range []func(context.Context){r.followStatus, r.findEvents, r.sendEvents, r.keepCondition,
		r.keepTaint} {
		loops.Go(func() { loop(ctx) })
	}
}

// tellsOfGPUs reports whether Events, the condition or the taint are enabled.
func tellsOfGPUs(f config.Features) bool { return f.Events || f.Condition || f.Taint }

// followStatus publishes the daemon's status after each change, and every few seconds.
func (r *reporter) followStatus(ctx context.Context) {
	began, standby := time.Now(), r.daemon.Lead.Received().Value() != nil
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
			asking, cancel := context.WithTimeout(ctx, statusTimeout)
			s, err := r.daemon.Status(asking)
			cancel()
			if err != nil {
				s = r.statuses.Value() // its age shows that it is old
			}
			if !standby || len(s.GPUs)+len(s.Retries) > 0 || time.Since(began) >= absenceGrace {
				standby = false
				r.statuses.Publish(s)
			}
			if err == nil && node.UID != "" && !r.statusWithNode.Value() {
				r.statusWithNode.Publish(true)
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

// findEvents adds Events to the queue by comparing the daemon's statuses. It starts with a status
// read after the Node was known: the configuration of a node that starts for the first time is
// uncertain until then.
func (r *reporter) findEvents(ctx context.Context) {
	var history *nodeevents.History
	for {
		_, drained := r.queue.changed.Latest()
		node, nodeChanged := r.nodes.Latest()
		hasStatus, firstStatus := r.statusWithNode.Latest() // read before the status
		s, changed := r.statuses.Latest()
		c, configured := r.daemon.Configs.Latest()
		var again <-chan time.Time
		switch {
		case !c.Features.Events:
			history = nil
			r.queue.clear()
		case node.UID == "" || s.Version == "" || history == nil && !hasStatus:
		default:
			if history == nil {
				history = &nodeevents.History{}
				condition, exists := findCondition(node.Conditions, conditionType)
				labelled := slices.ContainsFunc(gpuLabels, func(l string) bool { return node.Labels[l] == "true" })
				reported := toCondition(condition)
				if !c.Features.Condition { // the condition is outdated
					reported = nodeevents.Condition{}
				}
				history.Recall(reported, exists || labelled)
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
		case <-nodeChanged:
		case <-changed:
		case <-firstStatus:
		case <-configured:
		case <-again:
		}
	}
}

// keepCondition maintains the condition of the Node.
func (r *reporter) keepCondition(ctx context.Context) {
	var written kubeapi.Node // response to the last write
	var at time.Time
	pace := nodeevents.Pace{}
	waker := r.newWaker()
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "condition", waker.channels, func(ctx context.Context) error {
		f, now := r.daemon.Configs.Value().Features, time.Now()
		s, node := r.statuses.Value(), r.nodes.Value()
		if !f.Condition || node.UID == "" {
			pace = nodeevents.Pace{}
			return nil
		}
		if written.UID == node.UID && written.After(node) && now.Sub(at) < ownWriteTTL {
			node = written
		}
		condition, exists := findCondition(node.Conditions, conditionType)
		wanted, known := nodeevents.Judge(s, now, exists)
		if !known {
			return nil
		}
		pace.Fraction, pace.Heartbeat = r.fraction, conditionRepeat
		if !exists && wanted.Status == nodeevents.True {
			limit, err := r.spread.writeLimit(ctx, r.api)
			if err != nil {
				return err
			}
			pace.First = time.Duration(r.fraction * float64(limit))
		}
		var before *nodeevents.Condition
		if exists {
			before = new(toCondition(condition))
		}
		due := pace.Due(before, condition.LastHeartbeatTime, wanted, now)
		if due.IsZero() || due.After(now) {
			waker.wakeAt(due, now)
			return nil
		}
		c := kubeapi.Condition{
			Type: conditionType, Status: wanted.Status, Reason: string(wanted.Reason), Message: wanted.Message,
			LastHeartbeatTime: now, LastTransitionTime: condition.LastTransitionTime,
		}
		if !exists || condition.Status != wanted.Status || condition.LastTransitionTime.IsZero() {
			c.LastTransitionTime = now
		}
		patched, err := r.api.PatchCondition(ctx, node.ResourceVersion, c)
		if kubeapi.IsStale(err) { // decided again with the latest Node
			written, err = r.api.Get(ctx)
			at = now
			waker.wakeAt(now.Add(staleDelay), now)
			return err
		}
		if err != nil {
			return err
		}
		written, at = patched, now
		pace.RecordWrite(now)
		waker.wakeAt(now.Add(conditionRepeat), now)
		return nil
	})
}

// keepTaint maintains the taint of the Node, and removes it if it is not wanted.
func (r *reporter) keepTaint(ctx context.Context) {
	pace := nodeevents.Pace{}
	waker := r.newWaker()
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "taint", waker.channels, func(ctx context.Context) error {
		f, now := r.daemon.Configs.Value().Features, time.Now()
		s, node := r.statuses.Value(), r.nodes.Value()
		none, known := nodeevents.NoHealthyGPU(s)
		if !f.Taint {
			none, known = false, true
		}
		if node.UID == "" || !known {
			return nil
		}
		tainted := kubeapi.NoHealthyGPU.IsOn(node)
		due := pace.Due(asCondition(tainted), time.Time{}, *asCondition(none), now)
		if due.IsZero() || due.After(now) {
			waker.wakeAt(due, now)
			return nil
		}
		err := r.api.SetTaint(ctx, kubeapi.NoHealthyGPU, none, now)
		if !none && kubeapi.IsInaccessible(err) {
			err = fmt.Errorf("the taint %s stays, because the right to remove it is missing; "+
				"remove it with: kubectl taint node %s %s-: %w",
				kubeapi.NoHealthyGPU, node.Name, kubeapi.NoHealthyGPU, err)
		}
		return err
	})
}

// asCondition returns the condition that determines the pace of a taint.
func asCondition(tainted bool) *nodeevents.Condition {
	if tainted {
		return &nodeevents.Condition{Status: nodeevents.False}
	}
	return &nodeevents.Condition{Status: nodeevents.True}
}

// toCondition converts a condition to the type of package nodeevents.
func toCondition(c kubeapi.Condition) nodeevents.Condition {
	return nodeevents.Condition{Status: c.Status, Reason: nodeevents.Reason(c.Reason), Message: c.Message}
}

func findCondition(conditions []kubeapi.Condition, name string) (kubeapi.Condition, bool) {
	i := slices.IndexFunc(conditions, func(c kubeapi.Condition) bool { return c.Type == name })
	if i < 0 {
		return kubeapi.Condition{}, false
	}
	return conditions[i], true
}

// A waker wakes a loop when the Node or its GPUs change, or at a set time.
type waker struct {
	r     *reporter
	rung  *feed.Feed[struct{}]
	timer *time.Timer
}

func (r *reporter) newWaker() *waker { return &waker{r: r, rung: feed.New(struct{}{})} }

// channels returns channels that are closed when the loop has work.
func (n *waker) channels() []<-chan struct{} {
	_, rung := n.rung.Latest()
	_, seen := n.r.nodes.Latest()
	_, changed := n.r.statuses.Latest()
	_, configured := n.r.daemon.Configs.Latest()
	return []<-chan struct{}{rung, seen, changed, configured}
}

// wakeAt replaces the time of the next wake-up; zero cancels it.
func (n *waker) wakeAt(due, now time.Time) {
	if n.timer != nil {
		n.timer.Stop()
		n.timer = nil
	}
	if !due.IsZero() {
		n.timer = time.AfterFunc(due.Sub(now), func() { n.rung.Publish(struct{}{}) })
	}
}
