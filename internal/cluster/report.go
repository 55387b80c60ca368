package cluster

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
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
	problem := problemReporter{problems: d.LabelsProblem}
	defer func() { _ = problem.report(nil) }() // from now on another process leads and reports
	labels := keeper.NewSlot("labels of the node", &keeper.LabelsPart{Configs: d.Configs, Labels: d.Labels})
	labels.Report = problem.report
	release := &keeper.ReleasePart{Daemon: d, Refresh: c.keeper.Refresh, ResumeOwed: &c.resumeOwed}
	slots := []*keeper.Slot{
		keeper.NewSlot("quiesce by the Node", release),
		keeper.NewSlot("taint", &keeper.TaintPart{Configs: d.Configs, Statuses: r.statuses}),
		keeper.NewSlot("taint for fewer devices", &keeper.ShrinkPart{Daemon: d, Client: c.client, Leads: time.Now()}),
		keeper.NewSlot("condition", keeper.NewConditionPart(d.Configs, r.statuses)),
	}
	if d.MIG != nil {
		resume := &keeper.ResumePart{Pauses: c.pauses, Configs: d.Configs, Progress: d.MIG}
		slots = append(slots, keeper.NewSlot("paused clients", resume))
	}
	if d.MIG != nil && d.MIGChoice != nil {
		layout := &keeper.LayoutPart{Configs: d.Configs, Chooser: d.MIGChoice, Progress: d.MIG}
		slots = append(slots, keeper.NewSlot("MIG layout", layout))
	}
	c.keeper.Run(ctx, append(slots, labels, keeper.NewSlot("start-up taint", &keeper.StartupPart{Daemon: d}))...)
}

// tellsOfGPUs reports whether Events, the condition or the taint are enabled.
func tellsOfGPUs(f config.Features) bool { return f.Events || f.Condition || f.Taint }

// followStatus publishes the daemon's status after each change, and every few seconds.
func (r *reporter) followStatus(ctx context.Context) {
	began, standby := time.Now(), r.daemon.Lead.Received().Value() != nil
	for {
		_, snapshotChanged := r.daemon.Snapshots.Latest()
		_, offeredChanged := r.daemon.Offered.Latest()
		_, errorsChanged := r.daemon.ConfigErrors.Latest()
		c, configChanged := r.daemon.Configs.Latest()
		node, nodeChanged := r.nodes.Latest()
		_, repairsChanged := r.daemon.Repairs.Latest()
		_, driverChanged := r.daemon.DriverChange.Latest()
		var migChanged <-chan struct{}
		if r.daemon.MIG != nil {
			_, migChanged = r.daemon.MIG.Latest()
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
		case <-snapshotChanged:
		case <-offeredChanged:
		case <-errorsChanged:
		case <-configChanged:
		case <-nodeChanged:
		case <-migChanged:
		case <-repairsChanged:
		case <-driverChanged:
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
		_, queueChanged := r.queue.changed.Latest()
		node, nodeChanged := r.nodes.Latest()
		hasStatus, firstStatus := r.statusWithNode.Latest() // read before the status
		s, changed := r.statuses.Latest()
		c, configChanged := r.daemon.Configs.Latest()
		var again <-chan time.Time
		switch {
		case !c.Features.Events:
			history = nil
			r.queue.clear()
		case node.UID == "" || s.Version == "" || history == nil && !hasStatus:
		default:
			if history == nil {
				history = &nodeevents.History{}
				reported, exists := keeper.FindCondition(node)
				labelled := slices.ContainsFunc(gpuLabels, func(l string) bool { return node.Labels[l] == "true" })
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
		case <-queueChanged:
		case <-nodeChanged:
		case <-changed:
		case <-firstStatus:
		case <-configChanged:
		case <-again:
		}
	}
}
