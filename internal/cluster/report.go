package cluster

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

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
	// absenceGrace delays reports by a new leader that finds no GPU: the previous leader may restart
	// and know more.
	absenceGrace = time.Minute
)

// The condition of a Node for the health of its GPUs.
const (
	conditionType   = "GPUHealthy"
	conditionRepeat = time.Hour // an unchanged condition is written again after this time
)

// gpuLabels are the labels of a Node with GPUs; their value is true.
var gpuLabels = []string{"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present"}

// A reporter reads the daemon's status for the parts of the Node, and reports it by Events. It lasts
// for one term of leadership.
type reporter struct {
	daemon daemon.View
	api    *kubeapi.Client
	nodes  *feed.Feed[kubeapi.Node]

	statuses       *feed.Feed[status.Status] // the last status that could be read
	statusWithNode *feed.Feed[bool]          // whether a status was read while the Node was known
	queue          queue
}

// writeNode writes the Node and the Events about its GPUs until ctx ends.
func (c *Cluster) writeNode(ctx context.Context, d daemon.View) {
	r := &reporter{
		daemon: d, api: c.client, nodes: c.client.Nodes(), statuses: feed.New(status.Status{}),
		statusWithNode: feed.New(false), queue: queue{changed: feed.New(struct{}{})},
	}
	reporting := klog.NewContext(ctx, klog.FromContext(ctx).WithName("report"))
	var loops sync.WaitGroup
	defer loops.Wait()
	for _, loop := range []func(context.Context){r.followStatus, r.findEvents, r.sendEvents} {
		loops.Go(func() { loop(reporting) })
	}
	labels := newPart("labels of the node", &labelsPart{configs: d.Configs, labels: d.Labels})
	problem := problemReporter{problems: d.LabelsProblem}
	labels.report = problem.report
	defer func() { _ = problem.report(nil) }() // from now on another process leads and reports
	parts := []*partState{
		newPart("quiesce by the Node", &releasePart{daemon: d, refresh: c.keeper.refresh, resumeOwed: &c.resumeOwed}),
		newPart("taint", &taintPart{configs: d.Configs, statuses: r.statuses}),
		newPart("taint for fewer devices", &shrinkPart{daemon: d, client: c.client, leads: time.Now()}),
		newPart("condition", &conditionPart{configs: d.Configs, statuses: r.statuses,
			pace: nodeevents.Pace{Fraction: rand.Float64(), Heartbeat: conditionRepeat}}),
	}
	if d.MIG != nil {
		parts = append(parts, newPart("paused clients", &resumePart{cluster: c, configs: d.Configs, progress: d.MIG}))
	}
	if d.MIG != nil && d.MIGChoice != nil {
		parts = append(parts,
			newPart("MIG layout", &layoutPart{configs: d.Configs, chooser: d.MIGChoice, progress: d.MIG}))
	}
	c.keeper.run(ctx, append(parts, labels, newPart("start-up taint", &startupPart{daemon: d}))...)
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

// A conditionPart maintains the condition of the Node.
type conditionPart struct {
	configs  *feed.Feed[config.Config]
	statuses *feed.Feed[status.Status]

	enabled bool
	status  status.Status
	pace    nodeevents.Pace
}

func (p *conditionPart) inputs() []<-chan struct{} {
	c, configured := p.configs.Latest()
	_, changed := p.statuses.Latest()
	return inputsIf(c.Features.Condition, configured, changed)
}

func (p *conditionPart) look(context.Context, kubeapi.Node) {
	p.enabled, p.status = p.configs.Value().Features.Condition, p.statuses.Value()
}

func (p *conditionPart) want(node kubeapi.Node, now time.Time) decision {
	if !p.enabled || node.UID == "" {
		p.pace = nodeevents.Pace{Fraction: p.pace.Fraction, Heartbeat: conditionRepeat}
		return decision{}
	}
	condition, exists := findCondition(node.Conditions, conditionType)
	wanted, known := nodeevents.Judge(p.status, now, exists)
	if !known {
		return decision{}
	}
	var before *nodeevents.Condition
	if exists {
		before = new(toCondition(condition))
	}
	if due := p.pace.Due(before, condition.LastHeartbeatTime, wanted, now); due.IsZero() || due.After(now) {
		return decision{at: due}
	}
	c := kubeapi.Condition{
		Type: conditionType, Status: wanted.Status, Reason: string(wanted.Reason), Message: wanted.Message,
		LastHeartbeatTime: now, LastTransitionTime: condition.LastTransitionTime,
	}
	if !exists || condition.Status != wanted.Status || condition.LastTransitionTime.IsZero() {
		c.LastTransitionTime = now
	}
	return decision{
		patch: kubeapi.ConditionPatch(c), crowd: !exists && wanted.Status == nodeevents.True,
		done: func(_ context.Context, _ kubeapi.Node, err error, now time.Time) bool {
			if err == nil {
				p.pace.RecordWrite(now)
			}
			return false
		},
	}
}

// A taintPart maintains the taint of a Node without a healthy GPU. It removes the taint if the
// taint is switched off.
type taintPart struct {
	configs  *feed.Feed[config.Config]
	statuses *feed.Feed[status.Status]

	enabled bool
	status  status.Status
	pace    nodeevents.Pace
}

func (p *taintPart) inputs() []<-chan struct{} {
	c, configured := p.configs.Latest()
	_, changed := p.statuses.Latest()
	return inputsIf(c.Features.Taint, configured, changed)
}

func (p *taintPart) look(context.Context, kubeapi.Node) {
	p.enabled, p.status = p.configs.Value().Features.Taint, p.statuses.Value()
}

func (p *taintPart) want(node kubeapi.Node, now time.Time) decision {
	none, known := nodeevents.NoHealthyGPU(p.status)
	if !p.enabled {
		none, known = false, true
	}
	if node.UID == "" || !known {
		return decision{}
	}
	tainted := kubeapi.NoHealthyGPU.IsOn(node)
	if due := p.pace.Due(asCondition(tainted), time.Time{}, *asCondition(none), now); due.IsZero() || due.After(now) {
		return decision{at: due}
	}
	return decision{patch: kubeapi.TaintPatch{Taint: kubeapi.NoHealthyGPU, Wanted: none, Now: now}}
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
