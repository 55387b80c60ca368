// Package cluster is what gpu-node-agent alone does with the API server: tasks that join the
// daemon's feeds, policy and the client of package kubeapi, as package daemon does for the rest.
// The daemon serves kubelet the same whether these tasks work or not.
package cluster

import (
	"context"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// Options say how a Cluster works. The zero value is that of a program.
type Options struct {
	// Dial opens connections to the API server; nil for TCP.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// A Cluster is what one process has to do with the API server. Make it with New.
type Cluster struct {
	options    Options
	client     *kubeapi.Client // after Choose, as the following
	nodeConfig *nodeConfig     // nil if no label chooses the configuration file
	spread     spread          // of the first requests

	claims claimReader // for the driver
	// Of the one call of ClaimsOf: what the last list of claims has shown, and until when they are too
	// many for one.
	claimed map[string][]string
	recount time.Time

	releaser releaser // of the one call of followRelease

	pausing sync.Mutex // guards all following fields; one change of what is paused at a time
	paused  sighting
	ours    bool // this process has paused something
}

// New returns what a process has to do with the API server: nothing, until it is asked.
func New(o Options) *Cluster { return &Cluster{options: o, spread: newSpread()} }

// Commands returns the commands that need the API server.
func (c *Cluster) Commands() []*cobra.Command {
	return []*cobra.Command{newConfigManagerCommand(c.options), newCleanupCommand(c.options)}
}

// Choose prepares for a daemon with these flags and this environment. It returns which file is the
// configuration file, if a label of the node chooses it; nil otherwise.
func (c *Cluster) Choose(ctx context.Context, early config.Config) *feed.Feed[config.Chosen] {
	c.spread.stateDir = early.StateDir
	c.client = kubeapi.New(kubeapi.Options{
		Kubeconfig: early.Kubeconfig, Node: early.NodeName, Version: version.String(), Dial: c.options.Dial,
	})
	c.claims.client = c.client
	if early.NodeConfig.Dir == "" {
		return nil
	}
	c.nodeConfig = newNodeConfig(early, c.client)
	if early.NodeName != "" { // without it the configuration is refused
		c.nodeConfig.start(ctx)
	}
	return c.nodeConfig.chosen
}

// Observation returns the tasks that watch the node and choose the configuration file. The boot ID
// is that of the node; empty if it is not known.
func (c *Cluster) Observation(configs *feed.Feed[config.Config], boot string) []daemon.Task {
	c.spread.boot = boot
	tasks := []daemon.Task{
		later(daemon.Task{Name: "own node", Run: func(ctx context.Context) error { return c.watchNode(ctx, configs) }}),
		later(daemon.Task{Name: "size of the cluster", Run: func(ctx context.Context) error {
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

// Count sets the function that is called after each request, with the code of the HTTP answer: 0 if
// there was no answer.
func (c *Cluster) Count(requested func(verb, resource string, code int)) { c.client.Count(requested) }

// Problem returns the reason if the API server does not tell of the node; nil if it does, or is not
// asked.
func (c *Cluster) Problem() error { return c.client.Problem().Value() }

// headStart is how long after the start of the process nothing is done here: GPUs are registered
// first.
const headStart = 500 * time.Millisecond

// later has a task begin after the head start.
func later(task daemon.Task) daemon.Task {
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

// watchNode watches the node while something needs it.
func (c *Cluster) watchNode(ctx context.Context, configs *feed.Feed[config.Config]) error {
	return runWhileUnchanged(ctx, func() (bool, []<-chan struct{}) {
		_, seen := c.client.Nodes().Latest()
		now, changed := configs.Latest()
		return c.needed(now), []<-chan struct{}{changed, seen}
	}, func(ctx context.Context, needed bool) error {
		if needed {
			c.follow(ctx)
		}
		return nil
	})
}

// runWhileUnchanged runs something for a value until that is another one, and then anew for that,
// until ctx ends or a run returns an error. Value returns the value, and what is closed when it may
// have changed.
func runWhileUnchanged[T comparable](
	ctx context.Context, value func() (T, []<-chan struct{}), run func(ctx context.Context, value T) error,
) error {
	for ctx.Err() == nil {
		running, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		first, changed := value()
		go func() { ended <- run(running, first) }()
		for now := first; now == first && ctx.Err() == nil; now, changed = value() {
			feed.WaitAny(ctx, changed...)
		}
		stop()
		if err := <-ended; err != nil {
			return err
		}
	}
	return nil
}

// follow watches the node until ctx ends, from when this process may make its first request.
func (c *Cluster) follow(ctx context.Context) {
	c.spread.begin(ctx, c.client)
	c.client.Watch(ctx, clock.RealClock{})
}

// keepSize keeps the size of the cluster for the next process while something is asked of the API
// server.
func (c *Cluster) keepSize(ctx context.Context, configs *feed.Feed[config.Config]) error {
	return runWhileUnchanged(ctx, func() (bool, []<-chan struct{}) {
		_, seen := c.client.Nodes().Latest()
		now, changed := configs.Latest()
		return c.needed(now) || now.DRA.Mode != config.DRAOff, []<-chan struct{}{changed, seen}
	}, func(ctx context.Context, needed bool) error {
		if needed {
			c.spread.begin(ctx, c.client)
			c.spread.keep(ctx, c.client)
		}
		return nil
	})
}

// needed reports whether the daemon has to watch its own Node: for a configuration, to remove a
// taint, or to resume a DaemonSet. ResourceSlices need no watch.
func (c *Cluster) needed(now config.Config) bool {
	node := c.client.Nodes().Value()
	return now.NodeConfig.Dir != "" || now.Features.NeedAPIServer() || now.MIG.NeedsAPIServer() ||
		isTainted(node, now.Features) || len(pausedOn(node)) > 0
}

// isTainted reports whether a node has a taint that this program is to remove.
func isTainted(n kubeapi.Node, f config.Features) bool {
	return slices.ContainsFunc(kubeapi.OwnTaints(), func(o kubeapi.OwnTaint) bool {
		return o.IsOn(n) && (o != kubeapi.Startup || f.StartupTaint)
	})
}

// Outputs returns the tasks that tell the API server of the node. Each one follows the
// configurations, and does nothing while what it is for is off.
func (c *Cluster) Outputs(d daemon.View) []daemon.Task {
	c.client.Count(d.APIRequested)
	c.client.Fence(d.Lead.Check)
	return append(append(c.Labels(d), c.allocation(d)...),
		c.underLead("MIG label", d, c.followLayout), c.underLead("paused clients", d, c.resumeClients), c.underLead("report",
			d, c.report),
		c.underLead("taint for fewer devices", d, c.announceFewer), c.underLead("start-up taint", d, c.endStartup),
		c.underLead("quiesce by annotation", d, c.followRelease))
}

// Labels returns the tasks that write labels.
func (c *Cluster) Labels(d daemon.View) []daemon.Task {
	return []daemon.Task{c.underLead("labels of the node", d, c.labelNode), c.underLead("NodeFeature", d, c.labelFeature)}
}

// underLead returns a task that writes to the API server: it runs while this process leads on the
// node.
func (c *Cluster) underLead(name string, d daemon.View, run func(context.Context, daemon.View)) daemon.Task {
	return later(daemon.Task{Name: name, Lead: true, Run: func(ctx context.Context) error {
		run(ctx, d)
		return nil
	}})
}
