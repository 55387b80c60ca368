package agent

import (
	"context"
	"reflect"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// An Offer joins Snapshots and Configs into a plan and has the Set serve what of it can be given out. It runs once.
type Offer struct {
	Configs *feed.Feed[config.Config]
	Monitor *monitor.Monitor
	Set     *plugin.Set
	Specs   Specs
	MPS     MPS
	// Offered is where the Offer publishes what is offered, and what is not.
	Offered *feed.Feed[resource.Plan]
}

// Run makes plans, and writes their CDI specs, until ctx ends, and then returns nil.
func (o *Offer) Run(ctx context.Context) error {
	keeper := newKeeper(o.Specs)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return keeper.run(ctx) })
	group.Go(func() error { return o.followPlan(ctx, keeper) })
	return group.Wait()
}

// MPS asks the control daemons of resources that are shared by CUDA's Multi-Process Service whether they are there.
type MPS interface {
	// Follow has the daemons of these resources asked from now on, and no others. It answers at once.
	Follow(resources []string)
	// Unready is the feed of those whose daemons do not answer, by name, each with the reason.
	Unready() *feed.Feed[map[string]string]
}

// followPlan makes a plan of every Snapshot and Config and has the Set serve it. Health goes the same way: what is
// Unhealthy in the Snapshot is Unhealthy in the plan, and so is what is shared by MPS while its control daemon is missing.
func (o *Offer) followPlan(ctx context.Context, keeper *keeper) error {
	log := klog.FromContext(ctx)
	var wanted config.Config
	var warned []string
	epoch := uint64(0)
	for {
		c, configured := o.Configs.Latest()
		snapshot, looked := o.Monitor.Snapshots().Latest()
		_, written := keeper.tried.Latest()
		_, answered := o.MPS.Unready().Latest()
		if epoch == 0 || !reflect.DeepEqual(c.Resource, wanted.Resource) {
			epoch++
		}
		if !reflect.DeepEqual(c.Health, wanted.Health) {
			if err := o.Monitor.Apply(ctx, c.Health); err != nil {
				return err
			}
		}
		wanted = c
		if snapshot.Generation > 0 { // somebody has looked
			plan := resource.New(snapshot, c.Resource)
			o.MPS.Follow(plan.Shared(resource.MPS))
			offered, way := keeper.offer(snapshot, plan.Unfit(resource.MPS, o.MPS.Unready().Value()), c)
			inspect := way.PreStart.Checks != config.PreStartNone
			o.Set.Apply(offered, plugin.Options{Edits: way.Edits, Inspect: inspect}, epoch)
			o.Offered.Publish(offered)
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
