package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const (
	// gateInterval is how often the API server is asked whether it now stores a part that it dropped.
	gateInterval = time.Hour
	// dryRunSlice is the number of a slice that is never created.
	dryRunSlice = 1000
)

type storedSlice struct{ sent, stored dra.Slice }

// A slicePart is a part of a slice that an API server may drop.
type slicePart struct {
	name    string
	dropped *bool // the API server drops the part
	isIn    func(dra.Slice) bool
	report  func(klog.Logger)
}

// parts returns the parts that an API server may drop, in the order of reporting.
func (l *sliceLedger) parts() []slicePart {
	return []slicePart{
		{"counters", &l.noCounters, dra.Slice.Counted, func(log klog.Logger) {
			log.Info("The API server drops counters; MIG devices created for claims are not published in slices")
		}},
		{"shares", &l.noShares, dra.Slice.Shared, func(log klog.Logger) {
			log.Info("The API server does not support shared devices; claims get whole GPUs")
		}},
		{"taints", &l.noTaints, dra.Slice.Tainted, func(log klog.Logger) {
			log.Info("The API server drops taints of devices; tainted devices are not published in slices")
		}},
	}
}

// fill sets the devices or the counters of a slice.
func fill(s *kubeapi.Slice, content dra.Slice) (err error) {
	s.Devices, s.Counters = nil, nil
	if content.SharedCounters != nil {
		s.Counters, err = json.Marshal(content.SharedCounters)
	} else {
		s.Devices, err = json.Marshal(content.Devices)
	}
	if err != nil {
		return fmt.Errorf("write the content of a ResourceSlice: %w", err)
	}
	return nil
}

// checkStored compares a slice with the slice that the API server stored.
func (p *publisher) checkStored(ctx context.Context, name string, sent dra.Slice, s kubeapi.Slice) error {
	stored, err := content(s)
	if err != nil {
		return err
	}
	delete(p.ledger.stored, name)
	if sent.Timed(stored).Equal(stored) {
		return nil
	}
	p.ledger.stored[name], p.ledger.checkedAt = storedSlice{sent, stored}, time.Now()
	for _, part := range p.ledger.parts() {
		if !*part.dropped && part.isIn(sent) && !part.isIn(stored) {
			*part.dropped = true
			part.report(klog.FromContext(ctx))
			return nil
		}
	}
	klog.FromContext(ctx).Info("The API server drops a part of a slice", "name", name)
	return nil
}

// storesMore asks the API server every gateInterval whether it now stores a part that it dropped,
// because its version or feature gates may have changed. It reports whether other slices are due.
// The request is a dry run, so the scheduler never sees a device without its taint or counters.
func (p *publisher) storesMore(ctx context.Context) bool {
	l, pool, more := &p.ledger, p.devices.Pools().Value(), false
	due := time.Until(l.checkedAt.Add(gateInterval))
	for _, part := range l.parts() {
		i := slices.IndexFunc(pool.Slices, part.isIn)
		if !*part.dropped || i < 0 {
			continue
		}
		if due > 0 {
			p.alarm.After(ctx, due)
			return false
		}
		l.checkedAt = time.Now()
		p.alarm.After(ctx, gateInterval)
		stored, err := p.dryRun(ctx, pool, i)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot check whether the API server now keeps all of a slice", "what",
				part.name)
			continue
		}
		if part.isIn(stored) {
			*part.dropped, more = false, true
			clear(l.stored)
			klog.FromContext(ctx).Info("The API server now keeps more of slices", "what", part.name)
		}
	}
	return more
}

// dryRun returns the slice that the API server would store.
func (p *publisher) dryRun(ctx context.Context, pool dra.Pool, i int) (dra.Slice, error) {
	s := kubeapi.Slice{
		Name: pool.SliceName(dryRunSlice), Driver: p.devices.Driver(), Pool: pool.Name, Generation: p.ledger.generation,
		Count: len(pool.Slices),
	}
	if err := fill(&s, pool.Slices[i]); err != nil {
		return dra.Slice{}, err
	}
	s, err := p.client.DryRunSlice(ctx, s)
	if err != nil {
		return dra.Slice{}, err
	}
	return content(s)
}
