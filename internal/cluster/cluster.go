package cluster

import (
	"context"
	"net"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/healthevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// Options configure a Cluster. The zero value is for production.
type Options struct {
	// Dial opens connections to the API server; nil for TCP.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// A Cluster has the tasks of one process. Create it with New.
type Cluster struct {
	options    Options
	client     *kubeapi.Client // set by Choose, as are the following fields
	nodeConfig *nodeConfig     // nil if no label chooses the configuration file
	spread     spread          // of the first requests

	keeper  *keeper.Keeper // set by Choose, as are pauses
	pauses  *keeper.Pauses
	rollout *rollout
	repairs *repairs
	claims  claimReader // for the driver
	// Used by ClaimsOf, which runs once at a time: the result of the last list of claims, and the time
	// before which there are too many claims to list.
	lastClaims map[string][]string
	recountAt  time.Time

	resumeOwed time.Time // used by the ReleasePart, which exists once at a time
}

// New returns a Cluster that does nothing yet.
func New(o Options) *Cluster {
	return &Cluster{options: o, spread: newSpread(), rollout: newRollout(), repairs: newRepairs()}
}

// Commands returns the commands for the API server.
func (c *Cluster) Commands() []*cobra.Command {
	return []*cobra.Command{newConfigManagerCommand(c.options), newCleanupCommand(c.options)}
}

// Choose prepares for a daemon with this configuration. Choose returns the feed of the
// configuration file chosen by a node label; nil without such a label.
func (c *Cluster) Choose(ctx context.Context, early config.Startup) *feed.Feed[config.Chosen] {
	c.spread.stateDir = early.StateDir
	c.client = kubeapi.New(kubeapi.Options{
		Kubeconfig: early.Kubeconfig, Node: early.NodeName, Version: version.String(), Dial: c.options.Dial,
	})
	c.claims.client = c.client
	c.keeper = keeper.New(c.client, func(ctx context.Context) error { return c.spread.awaitWrite(ctx, c.client) })
	c.pauses = keeper.NewPauses(c.keeper)
	if early.NodeConfig.Dir == "" {
		return nil
	}
	c.nodeConfig = newNodeConfig(early, c.client)
	if early.NodeName != "" { // without a node name the configuration is rejected
		c.nodeConfig.start(ctx)
	}
	return c.nodeConfig.chosen
}

// Observation returns the tasks that watch the Node and choose the configuration file. boot is the
// boot ID of the node; empty if unknown.
func (c *Cluster) Observation(configs *feed.Feed[config.Config], boot string) []daemon.Task {
	c.spread.boot = boot
	tasks := []daemon.Task{
		afterHeadStart(daemon.Task{Name: "own node", Run: func(ctx context.Context) error {
			return c.watchNode(ctx,
				configs)
		}}),
		afterHeadStart(daemon.Task{Name: "size of the cluster", Run: func(ctx context.Context) error {
			return c.keepSize(ctx, configs)
		}}),
	}
	if n := c.nodeConfig; n != nil {
		tasks = append(tasks, daemon.Task{
			Name: "node configuration", Run: func(ctx context.Context) error { return n.run(ctx, configs) },
		})
	}
	return tasks
}

// Count sets the function that is called after each request with the HTTP status; 0 without a
// response.
func (c *Cluster) Count(requested func(verb, resource string, code int)) { c.client.Count(requested) }

// Problem returns why the Node cannot be watched; nil if the watch works or is not needed.
func (c *Cluster) Problem() error { return c.client.Problem().Value() }

// headStart delays the tasks after the start of the process, because GPUs are registered first.
const headStart = 500 * time.Millisecond

// afterHeadStart returns a task that starts after headStart.
func afterHeadStart(task daemon.Task) daemon.Task {
	run := task.Run
	task.Run = func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(headStart):
			return run(ctx)
		}
	}
	return task
}

// watchNode watches the Node while a task needs it.
func (c *Cluster) watchNode(ctx context.Context, configs *feed.Feed[config.Config]) error {
	return runWhileUnchanged(ctx, func() (bool, []<-chan struct{}) {
		_, nodeChanged := c.client.Nodes().Latest()
		now, changed := configs.Latest()
		return c.needsNode(now), []<-chan struct{}{changed, nodeChanged}
	}, func(ctx context.Context, needed bool) error {
		if needed {
			c.watch(ctx)
		}
		return nil
	})
}

// runWhileUnchanged calls run with a value, and cancels and calls it again with the next value when
// the value changes, until ctx ends or run returns an error. value returns the value, and channels
// that are closed when it may have changed.
func runWhileUnchanged[T comparable](
	ctx context.Context, value func() (T, []<-chan struct{}), run func(ctx context.Context, value T) error,
) error {
	for ctx.Err() == nil {
		running, stop := context.WithCancel(ctx)
		result := make(chan error, 1)
		initial, changed := value()
		go func() { result <- run(running, initial) }()
		for now := initial; now == initial && ctx.Err() == nil; now, changed = value() {
			feed.WaitAny(ctx, changed...)
		}
		stop()
		if err := <-result; err != nil {
			return err
		}
	}
	return nil
}

// watch watches the Node until ctx ends. The watch starts after the first request may be
// sent.
func (c *Cluster) watch(ctx context.Context) {
	c.spread.awaitStart(ctx, c.client)
	c.client.Watch(ctx, clock.RealClock{})
}

// keepSize saves the size of the cluster for the next process while this process needs the API
// server.
func (c *Cluster) keepSize(ctx context.Context, configs *feed.Feed[config.Config]) error {
	return runWhileUnchanged(ctx, func() (bool, []<-chan struct{}) {
		_, nodeChanged := c.client.Nodes().Latest()
		now, changed := configs.Latest()
		return c.needsNode(now) || now.DRA.Mode != config.DRAOff, []<-chan struct{}{changed, nodeChanged}
	}, func(ctx context.Context, needed bool) error {
		if needed {
			c.spread.awaitStart(ctx, c.client)
			c.spread.maintain(ctx, c.client)
		}
		return nil
	})
}

// needsNode reports whether the daemon must watch its own Node: for a configuration, to remove a
// taint, to resume a DaemonSet, or to end a release of the driver. ResourceSlices do not need the
// watch.
func (c *Cluster) needsNode(now config.Config) bool {
	node := c.client.Nodes().Value()
	return now.NodeConfig.Dir != "" || now.Features.NeedAPIServer() || now.MIG.NeedsAPIServer() ||
		now.Repair != repair.Off && now.NodeName != "" || now.DriverChange.Version != "" ||
		isTainted(node, now.Features) || len(keeper.PausedOn(node)) > 0 || keeper.IsReleased(node)
}

// isTainted reports whether this program must remove a taint of a Node.
func isTainted(n kubeapi.Node, f config.Features) bool {
	return slices.ContainsFunc(kubeapi.OwnTaints(), func(o kubeapi.OwnTaint) bool {
		return o.IsOn(n) && (o != kubeapi.Startup || f.StartupTaint)
	})
}

// Outputs returns the tasks that write to the API server. Each task follows the configuration, and
// is idle while the feature is disabled.
func (c *Cluster) Outputs(d daemon.View) []daemon.Task {
	c.client.Count(d.APIRequested)
	c.client.Fence(d.Lead.Check)
	return append(append(c.Labels(d), c.allocation(d)...),
		c.underLead("Node", d, c.writeNode), c.underLead("slot of the cluster", d, c.followSlots),
		c.underLead("repairs of the cluster", d, c.followRepairs),
		c.underLead("health events", d, sendHealthEvents))
}

// sendHealthEvents sends the health of the GPUs to NVSentinel until ctx ends.
func sendHealthEvents(ctx context.Context, d daemon.View) {
	healthevents.New(healthevents.Options{
		Configs: d.Configs, Snapshots: d.Snapshots, Unproven: d.Unproven, Repairs: d.Repairs,
		Lead: d.Lead.Check, Node: d.Startup.NodeName, StateDir: d.Startup.StateDir, Sent: d.HealthEventsSent,
	}).Run(klog.NewContext(ctx, klog.FromContext(ctx).WithName("healthevents")))
}

// Labels returns the tasks that write labels without a watch of the Node.
func (c *Cluster) Labels(d daemon.View) []daemon.Task {
	return []daemon.Task{c.underLead("NodeFeature", d, c.labelFeature)}
}

// underLead returns a task for the leader on the node, because the task writes to the API server.
func (c *Cluster) underLead(name string, d daemon.View, run func(context.Context, daemon.View)) daemon.Task {
	return afterHeadStart(daemon.Task{Name: name, Lead: true, Run: func(ctx context.Context) error {
		run(ctx, d)
		return nil
	}})
}
