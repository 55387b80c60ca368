package cluster

import (
	"context"
	"sync"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/handover"
)

// A publisher keeps the ResourceSlices of the node as the pool of its devices says. One process of
// a node does that at a time.
type publisher struct {
	client  *kubeapi.Client
	devices *handover.Devices
	spread  *spread
	driver  *feed.Feed[draplugin.Status]

	there   *feed.Feed[kubeapi.Slices] // as the watch sees them
	problem *feed.Feed[error]          // of the watch
	again   *feed.Alarm
	ledger  sliceLedger
}

// newPublisher returns the publisher of a process.
func newPublisher(
	client *kubeapi.Client, devices *handover.Devices, driver *feed.Feed[draplugin.Status], first *spread,
) *publisher {
	return &publisher{
		client: client, devices: devices, spread: first, driver: driver,
		there: feed.New(kubeapi.Slices{}), problem: feed.New[error](nil), again: new(feed.Alarm), ledger: newSliceLedger(),
	}
}

// run publishes until ctx ends. While there is nothing to publish and nothing that was published,
// it makes no request.
func (p *publisher) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("slices"))
	for ctx.Err() == nil {
		changed := p.changes()
		if p.needed() {
			p.keep(ctx)
			continue
		}
		feed.WaitAny(ctx, changed...)
	}
}

// keep publishes while there is something to do.
func (p *publisher) keep(ctx context.Context) {
	p.ledger.seen = map[string]string{} // what is written meanwhile is judged anew
	ctx, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel()
	tasks.Go(func() {
		defer cancel()
		for changed := p.changes(); ctx.Err() == nil && p.needed(); changed = p.changes() {
			feed.WaitAny(ctx, changed...)
		}
	})
	watching := false
	kubeapi.Keep(ctx, clock.RealClock{}, "slices", func() []<-chan struct{} {
		_, seen := p.there.Latest()
		_, failed := p.problem.Latest()
		return append(p.changes(), seen, failed)
	}, func(ctx context.Context) error {
		if !watching {
			if p.spread.begin(ctx, p.client); ctx.Err() != nil {
				return ctx.Err()
			}
			watching = true
			tasks.Go(func() { p.watch(ctx) })
		}
		return p.tell(p.publish(ctx))
	})
}

// changes returns what is closed when it may have changed what is to be published.
func (p *publisher) changes() []<-chan struct{} {
	_, pool := p.devices.Pools().Latest()
	_, published := p.devices.Published().Latest()
	_, driver := p.driver.Latest()
	return []<-chan struct{}{pool, published, driver, p.again.Rings()}
}

// needed reports whether there is something to publish or to remove. Nothing is published before
// kubelet has registered the driver, which it does not while a driver of another program has its
// name.
func (p *publisher) needed() bool {
	pool, driver, published := p.devices.Pools().Value(), p.driver.Value(), p.devices.Published().Value()
	switch {
	case driver.Foreign != "" || p.devices.Driverless(): // without a driver the kubelet removes the slices
		return false
	case pool.Name == "":
		return p.devices.Lost() // who decides about the pool waits for that
	case len(pool.Slices) > 0:
		return driver.Registrations > 0
	}
	return published == nil || len(published) > 0
}

// watch watches the slices, and begins anew with each registration: a kubelet that starts has
// removed them.
func (p *publisher) watch(ctx context.Context) {
	type watched struct {
		registrations int
		only          string // the name of the slice, if there is to be one
	}
	_ = runWhileUnchanged(ctx, func() (watched, []<-chan struct{}) {
		status, registered := p.driver.Latest()
		pool, changed := p.devices.Pools().Latest()
		now := watched{registrations: status.Registrations}
		if len(pool.Slices) == 1 {
			now.only = pool.SliceName(0)
		}
		return now, []<-chan struct{}{registered, changed}
	}, func(ctx context.Context, now watched) error { // it returns nil
		p.client.WatchSlices(ctx, clock.RealClock{}, p.devices.Driver(), now.only, p.there, p.problem)
		return nil
	})
}
