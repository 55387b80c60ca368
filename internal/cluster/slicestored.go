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
		{"counters", &l.dropped.Counters, dra.Slice.Counted, func(log klog.Logger) {
			log.Info("The API server drops counters; MIG devices created for claims are not published in slices")
		}},
		{"shares", &l.dropped.Shares, dra.Slice.Shared, func(log klog.Logger) {
			log.Info("The API server does not support shared devices; claims get whole GPUs")
		}},
		l.taints(),
	}
}

func (l *sliceLedger) taints() slicePart {
	return slicePart{"taints", &l.dropped.Taints, dra.Slice.Tainted, func(log klog.Logger) {
		log.Info("The API server drops taints of devices; tainted devices are not published in slices")
	}}
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
	p.ledger.taintsChecked = p.ledger.taintsChecked || sent.Tainted()
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
		i := lastWith(part, pool)
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
		switch {
		case kubeapi.IsContentRejected(err): // Kubernetes 1.34 has other rules for counters
		case err != nil:
			klog.FromContext(ctx).Error(err, "Cannot check whether the API server now keeps all of a slice", "what",
				part.name)
		case part.isIn(stored):
			*part.dropped, more = false, true
			clear(l.stored)
			klog.FromContext(ctx).Info("The API server now keeps more of slices", "what", part.name)
		}
	}
	return more
}

// lastWith returns the last slice with a part; -1 if there is none. The last slice with counters
// has devices, and Kubernetes 1.34 accepts counters only in the slice of their devices.
func lastWith(part slicePart, pool dra.Pool) int {
	for i, slice := range slices.Backward(pool.Slices) {
		if part.isIn(slice) {
			return i
		}
	}
	return -1
}

// checkTaints asks the API server whether it stores taints, by a dry run. Without this request, a
// device that is new in its slice would be without its taint until the next write, and the scheduler
// may give it to a claim, which would then wait until the device is repaired. checkTaints returns an
// error if a retry may help.
func (p *publisher) checkTaints(ctx context.Context, pool dra.Pool) error {
	part := p.ledger.taints()
	stored, err := p.dryRun(ctx, pool, lastWith(part, pool))
	switch {
	// a webhook may not support dry runs, or the name may be in use: the write decides
	case kubeapi.IsInvalid(err) || kubeapi.IsForbidden(err) || kubeapi.IsStale(err):
		klog.FromContext(ctx).Info("Cannot check whether the API server keeps taints of devices", "reason", err.Error())
	case err != nil:
		return err
	case !part.isIn(stored):
		*part.dropped, p.ledger.checkedAt = true, time.Now()
		part.report(klog.FromContext(ctx))
	}
	p.ledger.taintsChecked = true
	return nil
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
