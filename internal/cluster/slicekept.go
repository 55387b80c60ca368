package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

const (
	// gateInterval is how often the API server is asked whether it keeps now what it did not keep.
	gateInterval = time.Hour
	// triedSlice is the number of a slice that is never made.
	triedSlice = 1000
)

type keptSlice struct{ sent, kept dra.Slice }

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
	p.ledger.kept[name], p.ledger.asked = keptSlice{sent, kept}, p.clock.Now()
	if !p.ledger.noCounters && sent.Counted() && !kept.Counted() {
		p.ledger.noCounters = true
		klog.FromContext(ctx).Info("The API server does not keep counters; MIG devices that are made for claims are left out of slices")
		return nil
	}
	if !p.ledger.noShares && sent.Shared() && !kept.Shared() {
		p.ledger.noShares = true
		klog.FromContext(ctx).Info("The API server knows no devices that several claims can have; GPUs are given whole")
		return nil
	}
	if !p.ledger.noTaints && sent.Tainted() && !kept.Tainted() {
		p.ledger.noTaints = true
		klog.FromContext(ctx).Info("The API server does not keep taints of devices; devices with taints are left out of slices")
		return nil
	}
	klog.FromContext(ctx).Info("The API server does not keep all of a slice", "name", name)
	return nil
}

// keepsMore asks the API server once in an hour whether it keeps now what it did not keep: its version or its gates may have changed. It
// reports whether it does, so that other slices are due. The creation that it asks by makes nothing: the scheduler never sees a device
// without a taint or counters that it is to have.
func (p *publisher) keepsMore(ctx context.Context) bool {
	l, pool, more := &p.ledger, p.devices.Pools().Value(), false
	due := l.asked.Add(gateInterval).Sub(p.clock.Now())
	for _, feature := range []struct {
		name string
		off  *bool
		in   func(dra.Slice) bool
	}{{"taints", &l.noTaints, dra.Slice.Tainted}, {"counters", &l.noCounters, dra.Slice.Counted}, {"shares", &l.noShares, dra.Slice.Shared}} {
		i := slices.IndexFunc(pool.Slices, feature.in)
		if !*feature.off || i < 0 {
			continue
		}
		if due > 0 {
			p.again.after(ctx, due)
			return false
		}
		l.asked = p.clock.Now()
		p.again.after(ctx, gateInterval)
		kept, err := p.try(ctx, pool, i)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot ask the API server whether it keeps what it did not keep of slices", "what", feature.name)
			continue
		}
		if feature.in(kept) {
			*feature.off, more = false, true
			clear(l.kept)
			klog.FromContext(ctx).Info("The API server keeps now what it did not keep of slices", "what", feature.name)
		}
	}
	return more
}

// try returns what the API server would keep of a slice of a pool.
func (p *publisher) try(ctx context.Context, pool dra.Pool, i int) (dra.Slice, error) {
	s := kubeapi.Slice{
		Name: pool.SliceName(triedSlice), Driver: dra.Driver, Pool: pool.Name, Generation: p.ledger.generation, Count: len(pool.Slices),
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
