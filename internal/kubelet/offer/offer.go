// Package offer makes a plan of every Snapshot and Config, adds the holds, and passes the plan to
// the plugin servers. It has the CDI specs of new devices written before the devices are offered.
package offer

import (
	"cmp"
	"context"
	"maps"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Loop makes plans and applies them to the Servers. It runs once.
type Loop struct {
	Configs   *feed.Feed[config.Config]
	Snapshots *feed.Feed[inventory.Snapshot]
	Set       Set
	Specs     Specs
	MPS       MPS
	// MIG are the holds on GPUs whose MIG layout is being changed, by UUID. A GPU
	// without an entry is not offered. The value is nil if nothing changes layouts.
	MIG *feed.Feed[map[string]resource.GPUHold]
	// Owners says which GPUs belong to the device plugin. While the value is nil,
	// nothing is offered.
	Owners *feed.Feed[dra.Owners]
	// Proofs says on which devices CUDA is not proven.
	Proofs Proofs
	// Driver is the progress of a change of the driver. During a change all devices are withheld.
	Driver *feed.Feed[driverchange.Status]
	// Run publishes to Followed the owners used for the offered plan.
	Followed *feed.Feed[dra.Owners]
	// Clock is the clock to wait by; nil means the real one.
	Clock clock.Clock
	// Pulse shows that the Loop makes plans.
	Pulse supervise.Pulse
}

// A Set serves plans: serve.Servers.
type Set interface {
	// Apply serves a plan of the configuration with that number.
	Apply(plan resource.Plan, o serve.Options, epoch uint64)
	// Offered is the feed of the plan with all holds.
	Offered() *feed.Feed[resource.Plan]
}

// Proofs knows on which devices CUDA is proven.
type Proofs interface {
	// Unproven returns why devices may not be given to pods, by UUID.
	Unproven(inventory.Snapshot) map[string]string
	// Changed returns a channel that is closed when the answer changes for a Snapshot.
	Changed() <-chan struct{}
}

// MPS checks whether the control daemons of resources shared by CUDA's Multi-Process Service run.
type MPS interface {
	// Follow sets the resources whose daemons are checked from now on. It does not wait for them.
	Follow(resources []string)
	// Unready is the feed of the resources whose daemons do not answer, each with the reason.
	Unready() *feed.Feed[map[string]string]
	// HasResult reports whether the daemon of a followed resource has answered or
	// has used up its time to answer.
	HasResult(resource string) bool
}

// Run makes a plan of every Snapshot and Config, and writes CDI specs, until ctx
// ends. Then it returns nil.
func (l *Loop) Run(ctx context.Context) error {
	specs := newSpecTask(l.Specs)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return specs.run(ctx) })
	group.Go(func() error { return l.follow(ctx, specs) })
	group.Go(func() error { return warn(ctx, l.Set.Offered()) })
	return group.Wait()
}

// follow makes plans until ctx ends. A device that is Unhealthy in the Snapshot is
// Unhealthy in the plan.
func (l *Loop) follow(ctx context.Context, specs *specTask) error {
	var wanted config.Config
	var epoch uint64
	uvm := uvmWait{clock: l.Clock}
	uvm.clock = cmp.Or[clock.Clock](uvm.clock, clock.RealClock{})
	for {
		c, configChanged := l.Configs.Latest()
		snapshot, snapshotChanged := l.Snapshots.Latest()
		_, specsChanged := specs.tried.Latest()
		_, mpsChanged := l.MPS.Unready().Latest()
		proofsChanged := l.Proofs.Changed()
		divisions, divisionsChanged := l.MIG.Latest()
		driver, driverChanged := l.Driver.Latest()
		owners, ownersChanged := l.Owners.Latest()
		if !reflect.DeepEqual(c.Resource, wanted.Resource) || !reflect.DeepEqual(c.DRA, wanted.DRA) {
			epoch++
		}
		wanted = c
		if snapshot.Generation > 0 && owners != nil { // the monitor has read the node
			plan := l.plan(snapshot, c, owners)
			if divisions != nil {
				plan = plan.UnderGPUs(divisions)
			}
			if driver.Withholds {
				plan = plan.UnderGPUs(holdAll(snapshot))
			}
			holds, way, problem := specs.prepare(snapshot, plan, c)
			if problem != "" {
				plan.Warnings = append(slices.Clone(plan.Warnings), oldWay+problem)
			}
			plan = uvm.plan(plan.Under(holds), snapshot, way)
			inspect := way.PreStart.Checks != config.PreStartNone
			l.Set.Apply(plan, serve.Options{Edits: way.Edits, Inspect: inspect, AnnounceShrink: c.Features.ChangeTaint},
				epoch)
			if l.Followed != nil && !maps.Equal(owners, l.Followed.Value()) {
				l.Followed.Publish(owners)
			}
		}
		for checked := true; checked; {
			checked = false
			select {
			case <-ctx.Done():
				return nil
			case l.Pulse.Heartbeat() <- struct{}{}:
				checked = true
			case <-configChanged:
			case <-snapshotChanged:
			case <-specsChanged:
			case <-mpsChanged:
			case <-divisionsChanged:
			case <-driverChanged:
			case <-proofsChanged:
			case <-ownersChanged:
			case <-uvm.ended():
				uvm.over = true
			}
		}
	}
}

// holdAll returns a hold on each GPU while the driver changes.
func holdAll(s inventory.Snapshot) map[string]resource.GPUHold {
	holds := map[string]resource.GPUHold{}
	for _, g := range s.GPUs {
		holds[g.UUID] = resource.GPUHold{Reason: driverchange.HoldReason}
	}
	return holds
}

// oldWay is the warning, without its reason, of a plan whose devices still use the
// previous configuration.
const oldWay = "containers get devices as before the last change of the configuration, because no device could be " +
	"offered by the new one: "

// plan makes the plan of a Snapshot and a Config, and adds the holds of MPS and of
// devices without a proof of CUDA.
func (l *Loop) plan(snapshot inventory.Snapshot, c config.Config, owners dra.Owners) resource.Plan {
	options := c.Resource
	options.NotOffered = owners.NotOffered(snapshot.GPUs)
	plan := resource.New(snapshot, options)
	byMPS := plan.MPSDaemons()
	l.MPS.Follow(byMPS)
	// Read first, so that an answer arriving now does not make an earlier reason count.
	unasked := slices.DeleteFunc(byMPS, l.MPS.HasResult)
	plan = plan.Under(holdsOfMPS(plan, l.MPS.Unready().Value(), unasked))
	if why := c.Accepted.Refuses(snapshot.Driver); why != "" {
		plan = plan.Under(holdsOnAll(plan, resource.Hold{Reason: why, Row: resource.RowDriver}))
	}
	return plan.Under(holdsOfProofs(plan, l.Proofs.Unproven(snapshot)))
}

// holdsOnAll returns a hold on each device.
func holdsOnAll(plan resource.Plan, h resource.Hold) []resource.Hold {
	var holds []resource.Hold
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			h.Resource, h.UUID = r.Name, d.UUID
			holds = append(holds, h)
		}
	}
	return holds
}

// holdsOfProofs returns the holds on devices on which CUDA is not proven.
func holdsOfProofs(plan resource.Plan, unproven map[string]string) []resource.Hold {
	var holds []resource.Hold
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			if why := unproven[d.UUID]; why != "" {
				holds = append(holds, resource.Hold{Resource: r.Name, UUID: d.UUID, Reason: why, Row: resource.RowCUDA})
			}
		}
	}
	return holds
}

// holdsOfMPS returns the holds on devices whose MPS control daemon does not run. unready has the
// reasons, by daemon. Devices of unasked daemons are hidden: a list with such a device as Unhealthy
// for a moment would change the status of the pods that hold it.
func holdsOfMPS(plan resource.Plan, unready map[string]string, unasked []string) []resource.Hold {
	var holds []resource.Hold
	for _, r := range plan.Resources {
		for _, d := range r.Members() {
			if why, missing := unready[d.MPSDaemon()]; missing {
				holds = append(holds, resource.Hold{
					Resource: r.Name, UUID: d.UUID, Reason: why, Row: resource.RowMPS,
					Hidden: slices.Contains(unasked, d.MPSDaemon()),
				})
			}
		}
	}
	return holds
}

// warnAfter is the delay before the warnings of a plan are logged. During a healthy
// start, CDI specs are written and MPS control daemons answer within that time.
const warnAfter = time.Second

// warn logs the warnings of plans, each one when it appears and persists, until ctx ends.
func warn(ctx context.Context, plans *feed.Feed[resource.Plan]) error {
	var before resource.Plan
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(warnAfter):
		}
		plan, changed := plans.Latest()
		for _, w := range plan.WarningsSince(before) {
			klog.FromContext(ctx).Info("Plan warning", "warning", w)
		}
		before = plan
		if !feed.WaitAny(ctx, changed) {
			return nil
		}
	}
}
