package cluster

import (
	"context"
	"sync"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
)

// A publisher publishes the pool of the node's devices as ResourceSlices. Only one process of a
// node publishes at a time.
type publisher struct {
	client  *kubeapi.Client
	devices *pool.Devices
	spread  *spread
	driver  *feed.Feed[draplugin.Status]

	observed *feed.Feed[kubeapi.Slices] // as observed by the watch
	problem  *feed.Feed[error]          // of the watch
	alarm    *feed.Alarm
	ledger   sliceLedger
}

// newPublisher returns a publisher.
func newPublisher(
	client *kubeapi.Client, devices *pool.Devices, driver *feed.Feed[draplugin.Status], first *spread,
) *publisher {
	return &publisher{
		client: client, devices: devices, spread: first, driver: driver,
		observed: feed.New(kubeapi.Slices{}), problem: feed.New[error](nil), alarm: new(feed.Alarm),
		ledger: newSliceLedger(),
	}
}

// run publishes until ctx ends. It sends no request while there is nothing to publish or remove.
func (p *publisher) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("slices"))
	for ctx.Err() == nil {
		changes := p.changes()
		if p.isNeeded() {
			p.publishWhileNeeded(ctx)
			continue
		}
		feed.WaitAny(ctx, changes...)
	}
}

// publishWhileNeeded publishes until nothing is left to publish or remove.
func (p *publisher) publishWhileNeeded(ctx context.Context) {
	p.ledger.checkedVersions = map[string]string{} // slices written in the meantime are checked again
	ctx, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel()
	tasks.Go(func() {
		defer cancel()
		for changed := p.changes(); ctx.Err() == nil && p.isNeeded(); changed = p.changes() {
			feed.WaitAny(ctx, changed...)
		}
	})
	watching := false
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "slices", func() []<-chan struct{} {
		_, observedChanged := p.observed.Latest()
		_, problemChanged := p.problem.Latest()
		return append(p.changes(), observedChanged, problemChanged)
	}, func(ctx context.Context) error {
		if !watching {
			if p.spread.awaitStart(ctx, p.client); ctx.Err() != nil {
				return ctx.Err()
			}
			watching = true
			tasks.Go(func() { p.watch(ctx) })
		}
		return p.reportProblem(p.publish(ctx))
	})
}

// changes returns channels that are closed when the wanted slices may change.
func (p *publisher) changes() []<-chan struct{} {
	_, poolChanged := p.devices.Pools().Latest()
	_, publishedChanged := p.devices.Published().Latest()
	_, driverChanged := p.driver.Latest()
	return []<-chan struct{}{poolChanged, publishedChanged, driverChanged, p.alarm.Rings()}
}

// isNeeded reports whether there is something to publish or to remove. Slices are published only
// after the kubelet has registered the driver, and it does not register a driver while another
// program's driver has the same name.
func (p *publisher) isNeeded() bool {
	pool, driver, published := p.devices.Pools().Value(), p.driver.Value(), p.devices.Published().Value()
	switch {
	case driver.NameConflict != "" || p.devices.Driverless(): // without a driver the kubelet removes the slices
		return false
	case pool.Name == "":
		return p.devices.Lost() // the decision about the pool waits for it
	case len(pool.Slices) > 0:
		return driver.Registrations > 0
	}
	return published == nil || len(published) > 0
}

// watch watches the slices, and restarts the watch after each registration: a starting kubelet has
// removed the slices.
func (p *publisher) watch(ctx context.Context) {
	type target struct {
		registrations int
		only          string // name of the slice, if there is exactly one
	}
	_ = runWhileUnchanged(ctx, func() (target, []<-chan struct{}) {
		status, driverChanged := p.driver.Latest()
		pool, changed := p.devices.Pools().Latest()
		t := target{registrations: status.Registrations}
		if len(pool.Slices) == 1 {
			t.only = pool.SliceName(0)
		}
		return t, []<-chan struct{}{driverChanged, changed}
	}, func(ctx context.Context, t target) error { // always returns nil
		p.client.WatchSlices(ctx, clock.RealClock{}, p.devices.Driver(), t.only, p.observed, p.problem)
		return nil
	})
}
