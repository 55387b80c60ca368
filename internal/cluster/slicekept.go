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
	// gateInterval is how often the API server is asked whether it keeps now what it did not keep.
	gateInterval = time.Hour
	// triedSlice is the number of a slice that is never made.
	triedSlice = 1000
)

type keptSlice struct{ sent, kept dra.Slice }

// A slicePart is a part of slices that an API server may not keep.
type slicePart struct {
	name    string
	dropped *bool // the API server does not keep it
	in      func(dra.Slice) bool
	tell    func(klog.Logger)
}

// parts returns the parts of slices that an API server may not keep. Where several are missing, the
// first one is reported first.
func (l *sliceLedger) parts() []slicePart {
	return []slicePart{
		{"counters", &l.noCounters, dra.Slice.Counted, func(log klog.Logger) {
			log.Info("The API server does not keep counters; MIG devices that are made for claims are left out of slices")
		}},
		{"shares", &l.noShares, dra.Slice.Shared, func(log klog.Logger) {
			log.Info("The API server knows no devices that several claims can have; GPUs are given whole")
		}},
		{"taints", &l.noTaints, dra.Slice.Tainted, func(log klog.Logger) {
			log.Info("The API server does not keep taints of devices; devices with taints are left out of slices")
		}},
	}
}

// fill gives a slice its devices or counters.
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

// compare compares what the API server was sent with what it keeps.
func (p *publisher) compare(ctx context.Context, name string, sent dra.Slice, s kubeapi.Slice) error {
	kept, err := content(s)
	if err != nil {
		return err
	}
	delete(p.ledger.kept, name)
	if sent.Timed(kept).Equal(kept) {
		return nil
	}
	p.ledger.kept[name], p.ledger.asked = keptSlice{sent, kept}, time.Now()
	for _, part := range p.ledger.parts() {
		if !*part.dropped && part.in(sent) && !part.in(kept) {
			*part.dropped = true
			part.tell(klog.FromContext(ctx))
			return nil
		}
	}
	klog.FromContext(ctx).Info("The API server does not keep all of a slice", "name", name)
	return nil
}

// keepsMore asks the API server once in an hour whether it keeps now what it did not keep: its
// version or its gates may have changed. It reports whether it does, so that other slices are due.
// The creation that it asks by makes nothing: the scheduler never sees a device without a taint or
// counters that it is to have.
func (p *publisher) keepsMore(ctx context.Context) bool {
	l, pool, more := &p.ledger, p.devices.Pools().Value(), false
	due := time.Until(l.asked.Add(gateInterval))
	for _, part := range l.parts() {
		i := slices.IndexFunc(pool.Slices, part.in)
		if !*part.dropped || i < 0 {
			continue
		}
		if due > 0 {
			p.again.After(ctx, due)
			return false
		}
		l.asked = time.Now()
		p.again.After(ctx, gateInterval)
		kept, err := p.try(ctx, pool, i)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot ask the API server again what it keeps of slices", "what", part.name)
			continue
		}
		if part.in(kept) {
			*part.dropped, more = false, true
			clear(l.kept)
			klog.FromContext(ctx).Info("The API server keeps more of slices now", "what", part.name)
		}
	}
	return more
}

// try returns what the API server would keep of a slice of a pool.
func (p *publisher) try(ctx context.Context, pool dra.Pool, i int) (dra.Slice, error) {
	s := kubeapi.Slice{
		Name: pool.SliceName(triedSlice), Driver: p.devices.Driver(), Pool: pool.Name, Generation: p.ledger.generation, Count: len(pool.Slices),
	}
	if err := fill(&s, pool.Slices[i]); err != nil {
		return dra.Slice{}, err
	}
	s, err := p.client.TrySlice(ctx, s)
	if err != nil {
		return dra.Slice{}, err
	}
	return content(s)
}
