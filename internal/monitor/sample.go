package monitor

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// Sampling is how GPUs are measured, for metrics. At first they are not.
type Sampling struct {
	// Every is the time between two samples of a GPU; 0 for no samples.
	Every time.Duration
	// Blocking has what takes 20 ms a question measured, too: the PCIe throughput.
	Blocking bool
}

// firstSample is the time from the end of a look to the first samples: a daemon that starts serves its GPUs first.
const firstSample = time.Second

// A sampler is what the loop knows of samples. It is used by the loop only.
type sampler struct {
	Sampling
	due     time.Time // zero: as soon as there was a look
	running bool
	yield   *atomic.Bool // a look wants to begin
	rest    []string     // the GPUs that were not measured because of that, by UUID
	results chan samples
	last    map[string]inventory.Sample // by UUID
	xids    map[string]uint64           // the last one of each GPU, by UUID
	failed  map[string]string           // why a GPU could not be measured, by UUID
	feed    *feed.Feed[[]inventory.Sample]
}

// sampled is the outcome of measuring a GPU.
type sampled struct {
	inventory.Sample
	uuid string
	err  error
}

// samples is the outcome of measuring GPUs.
type samples struct {
	done []sampled
	rest []string
}

func newSampler(m *Monitor) sampler {
	return sampler{
		results: make(chan samples, 1), feed: m.samples, yield: new(atomic.Bool),
		last: map[string]inventory.Sample{}, xids: map[string]uint64{}, failed: map[string]string{},
	}
}

// Samples returns the feed of samples of the GPUs that are there, by index. A GPU that could not be measured has the sample of the
// time before, and none if there was none. Nothing is published while no samples are wanted.
func (m *Monitor) Samples() *feed.Feed[[]inventory.Sample] { return m.samples }

// SetSampling says how GPUs are measured from now on.
func (m *Monitor) SetSampling(ctx context.Context, how Sampling) error {
	return m.do(ctx, func(l *loop) {
		if l.samples.Sampling == how {
			return
		}
		l.samples.Sampling, l.samples.due, l.samples.rest = how, time.Time{}, nil
		if how.Every == 0 {
			l.samples.last = map[string]inventory.Sample{}
			l.samples.feed.Publish(nil)
		}
	})
}

// beginSamples has the GPUs measured if it is time for that. A look that begins meanwhile waits for one GPU; the rest is measured
// after it.
func (l *loop) beginSamples(ctx context.Context) {
	if !l.maySample() {
		return
	}
	s, now := &l.samples, l.now()
	if s.due.IsZero() {
		s.due = now.Add(firstSample)
	}
	gpus := s.rest
	switch {
	case gpus != nil:
	case now.Before(s.due):
		return
	default:
		s.due = now.Add(s.Every)
		for _, g := range l.state.scan.GPUs {
			gpus = append(gpus, g.UUID)
		}
	}
	s.running, s.rest = true, nil
	s.yield.Store(false)
	session, blocking := l.prober.session, s.Blocking // no look is under way, which could change it
	l.start(func() error {
		var all samples
		for i, uuid := range gpus {
			if ctx.Err() != nil || s.yield.Load() {
				all.rest = gpus[i:]
				break
			}
			sample, err := session.Sample(ctx, uuid, blocking)
			all.done = append(all.done, sampled{Sample: sample, uuid: uuid, err: err})
		}
		s.results <- all // there is room: one is under way at a time
		return nil
	})
}

// maySample reports whether GPUs can be measured once it is time for that.
func (l *loop) maySample() bool {
	return l.samples.Every > 0 && !l.samples.running && !l.looking && l.looked && !l.isQuiesced() && l.prober.session != nil
}

// endSamples publishes what was measured. A GPU of which a call hangs, or that is lost, is looked at soon.
func (l *loop) endSamples(ctx context.Context, results samples) {
	s := &l.samples
	s.running, s.rest = false, results.rest
	for _, r := range results.done {
		before := s.failed[r.uuid]
		delete(s.failed, r.uuid)
		switch {
		case r.err == nil:
			s.last[r.uuid] = r.Sample
		case errors.Is(r.err, inventory.ErrNotAsked):
		default:
			s.failed[r.uuid] = r.err.Error()
			if before == "" {
				klog.FromContext(ctx).V(2).Info("Cannot measure a GPU", "gpu", r.uuid, "reason", r.err.Error())
				l.nudge()
			}
		}
	}
	if s.rest != nil || s.Every == 0 {
		return
	}
	var all []inventory.Sample
	for _, g := range l.state.scan.GPUs {
		if sample, ok := s.last[g.UUID]; ok {
			sample.LastXID = s.xids[g.UUID]
			all = append(all, sample)
		}
	}
	for uuid := range s.last {
		if !slices.ContainsFunc(all, func(a inventory.Sample) bool { return a.UUID == uuid }) {
			delete(s.last, uuid)
			delete(s.xids, uuid)
			delete(s.failed, uuid)
		}
	}
	s.feed.Publish(all)
}

// xid notes the XID of an event for the samples of its GPU.
func (s *sampler) xid(e inventory.Event) {
	if e.Kind == inventory.EventXID && e.UUID != "" {
		s.xids[e.UUID] = e.XID
	}
}
