// Package agent is the daemon: the tree of its long-lived tasks, and the loop at its root that joins what the node has
// (Snapshots) with what its operator wants (Configs) into the plan, and hands the plan on.
//
// Package cli builds what the agent works with and runs it; nothing else imports it.
package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// A Task is something that lives as long as the daemon.
type Task struct {
	Name string
	// Run blocks until ctx ends, and then returns nil. An error ends the daemon.
	Run func(ctx context.Context) error
}

// An Agent is one daemon, and runs once.
type Agent struct {
	Configs *feed.Feed[config.Config]
	Monitor *monitor.Monitor
	Set     *plugin.Set
	Specs   Specs
	MPS     MPS
	// Offered is where the Agent publishes what is offered, and what is not.
	Offered *feed.Feed[resource.Plan]
	// Tasks run beside the Monitor and the Set.
	Tasks []Task
}

// Run runs the daemon until ctx ends, and then returns nil; it returns an error when a task of it failed, or when the
// driver cannot be used and the configuration says that this is an error.
func (a *Agent) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	keeper := newKeeper(a.Specs)
	tasks := append([]Task{
		{Name: "monitor", Run: a.Monitor.Run},
		{Name: "plugin servers", Run: a.Set.Run},
		{Name: "first look", Run: a.checkFirstLook},
		{Name: "driver", Run: func(ctx context.Context) error { return FollowDriver(ctx, a.Monitor) }},
		{Name: "CDI specs", Run: keeper.run},
		{Name: "MPS", Run: a.MPS.Run},
		{Name: "plan", Run: func(ctx context.Context) error { return a.followPlan(ctx, keeper) }},
	}, a.Tasks...)
	for _, task := range tasks {
		group.Go(func() error {
			if err := task.Run(ctx); err != nil && ctx.Err() == nil {
				return fmt.Errorf("%s: %w", task.Name, err)
			}
			return nil
		})
	}
	return group.Wait()
}

// checkFirstLook fails when the first look at the node does and the configuration wants the daemon to end then.
func (a *Agent) checkFirstLook(ctx context.Context) error {
	err := a.Monitor.First(ctx)
	if err == nil || ctx.Err() != nil {
		return nil
	}
	if a.Configs.Value().FailOnInitError {
		// Not wrapped: that the library does not fit the kernel module is no reason for a new process in the place of one that
		// just began. It would find the same, and so would the one after it.
		return fmt.Errorf("%v; use --fail-on-init-error=false to wait for the driver instead", err) //nolint:errorlint // see above
	}
	klog.FromContext(ctx).Info("Waiting for the driver; nothing is offered until it is there", "reason", err.Error())
	return nil
}

// How long a process lives at least before it makes place for another: while a driver is being replaced, one after the other
// finds that its library and the kernel's module do not fit.
const (
	youth = 10 * time.Second
	// age is how long when that is all that it ever found: only a library that nobody saw come makes another better off.
	age = time.Minute
)

// FollowDriver fails when only a new process can talk to the driver: the error wraps inventory.ErrDriverReplaced. It
// returns nil when ctx ends.
func FollowDriver(ctx context.Context, m *monitor.Monitor) error {
	grown, old := time.After(youth), time.After(age)
	for {
		snapshot, looked := m.Snapshots().Latest()
		worked, err := replaced(ctx, m, snapshot)
		var due <-chan time.Time
		switch {
		case err == nil:
		case worked || !errors.Is(err, inventory.ErrDriverMismatch):
			due = grown
		default:
			due = old
		}
		select {
		case <-ctx.Done():
			return nil
		case <-due:
			return err
		case <-looked:
		}
	}
}

// replaced returns the error of the last look if it says that the driver was replaced under this process, and whether that ever
// worked for it.
func replaced(ctx context.Context, m *monitor.Monitor, s inventory.Snapshot) (worked bool, err error) {
	if s.Stale == "" {
		return true, nil
	}
	status, err := m.Status(ctx)
	if err != nil || !errors.Is(status.Err, inventory.ErrDriverReplaced) {
		return false, nil // the monitor cannot be reached when the daemon ends
	}
	return !status.Looked.IsZero(), status.Err
}

// MPS asks the control daemons of resources that are shared by CUDA's Multi-Process Service whether they are there.
type MPS interface {
	// Follow has the daemons of these resources asked from now on, and no others. It answers at once.
	Follow(resources []string)
	// Unready is the feed of those whose daemons do not answer, by name, each with the reason.
	Unready() *feed.Feed[map[string]string]
	// Run asks until ctx ends, and returns nil then.
	Run(ctx context.Context) error
}

// followPlan makes a plan of every Snapshot and Config and has the Set serve it. Health goes the same way: what is
// Unhealthy in the Snapshot is Unhealthy in the plan, and so is what is shared by MPS while its control daemon is missing.
func (a *Agent) followPlan(ctx context.Context, keeper *keeper) error {
	log := klog.FromContext(ctx)
	var wanted config.Config
	var warned []string
	epoch := uint64(0)
	for {
		c, configured := a.Configs.Latest()
		snapshot, looked := a.Monitor.Snapshots().Latest()
		_, written := keeper.tried.Latest()
		_, answered := a.MPS.Unready().Latest()
		if epoch == 0 || !reflect.DeepEqual(c.Resource, wanted.Resource) {
			epoch++
		}
		if !reflect.DeepEqual(c.Health, wanted.Health) {
			if err := a.Monitor.Apply(ctx, c.Health); err != nil {
				return err
			}
		}
		wanted = c
		if snapshot.Generation > 0 { // somebody has looked
			plan := resource.New(snapshot, c.Resource)
			a.MPS.Follow(plan.Shared(resource.MPS))
			offered, way := keeper.offer(snapshot, plan.Unfit(resource.MPS, a.MPS.Unready().Value()), c)
			inspect := way.PreStart.Checks != config.PreStartNone
			a.Set.Apply(offered, plugin.Options{Edits: way.Edits, Inspect: inspect}, epoch)
			a.Offered.Publish(offered)
			warned = warn(log, plan.Warnings, warned)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-configured:
		case <-looked:
		case <-written:
		case <-answered:
		}
	}
}

// warn logs those warnings that were not in force before, and returns those that are now.
func warn(log klog.Logger, now, before []string) []string {
	for _, w := range now {
		if !slices.Contains(before, w) {
			log.Info("The plan is not all that one might expect", "warning", w)
		}
	}
	return now
}
