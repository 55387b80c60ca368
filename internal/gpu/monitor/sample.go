package monitor

import (
	"context"
	"maps"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Sampling is how GPUs are measured, for metrics. At first they are not.
type Sampling struct {
	// Every is the time between two samples of a GPU; 0 for no samples.
	Every time.Duration
	// Blocking adds the PCIe throughput, whose measurement takes 20 ms of each GPU.
	Blocking bool
}

// firstSample is the time from the end of a look to the first samples: a daemon that starts serves
// its GPUs first.
const firstSample = time.Second

// A sampler is what the loop knows of samples. It is used by the loop only.
type sampler struct {
	Sampling
	due     time.Time // zero: as soon as there was a look
	running bool
	look    atomic.Pointer[chan struct{}] // nil while no look is under way, else closed when it ends
	results chan []sampled
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

func newSampler(m *Monitor) sampler {
	return sampler{
		results: make(chan []sampled, 1), feed: m.samples,
		last: map[string]inventory.Sample{}, xids: map[string]uint64{}, failed: map[string]string{},
	}
}

// Samples returns the feed of samples of the GPUs that are there, by index. A GPU that could not be
// measured has the sample of the time before, and none if there was none. Nothing is published
// while no samples are wanted.
func (m *Monitor) Samples() *feed.Feed[[]inventory.Sample] { return m.samples }

// SetSampling says how GPUs are measured from now on.
func (m *Monitor) SetSampling(ctx context.Context, how Sampling) error {
	return m.do(ctx, func(l *loop) {
		if l.samples.Sampling == how {
			return
		}
		l.samples.Sampling, l.samples.due = how, time.Time{}
		if how.Every == 0 {
			l.samples.last = map[string]inventory.Sample{}
			l.samples.feed.Publish(nil)
		}
	})
}

// hold keeps GPUs from being measured while a look is under way, until goOn. The measuring stops
// after the call that is being made, or after the calls of 100 ms where these are fast.
func (s *sampler) hold() {
	ended := make(chan struct{})
	s.look.Store(&ended)
}

func (s *sampler) goOn() { close(*s.look.Swap(nil)) }

// pause waits for the end of the look that is under way, if there is one.
func (s *sampler) pause(ctx context.Context) {
	if look := s.look.Load(); look != nil {
		select {
		case <-*look:
		case <-ctx.Done():
		}
	}
}

// beginSamples has the GPUs measured if it is time for that.
func (l *loop) beginSamples(ctx context.Context) {
	if !l.maySample() {
		return
	}
	s, now := &l.samples, time.Now()
	if s.due.IsZero() {
		s.due = now.Add(firstSample)
	}
	if now.Before(s.due) {
		return
	}
	s.due, s.running = now.Add(s.Every), true
	session, blocking := l.prober.session, s.Blocking // no look is under way, which could change it
	gpus := make([]string, 0, len(l.state.scan.GPUs))
	for _, g := range l.state.scan.GPUs {
		gpus = append(gpus, g.UUID)
	}
	l.start(func() error {
		results := make([]sampled, 0, len(gpus))
		for _, uuid := range gpus {
			if ctx.Err() != nil {
				break
			}
			sample, err := session.Sample(ctx, uuid, blocking, s.pause)
			results = append(results, sampled{Sample: sample, uuid: uuid, err: err})
		}
		s.results <- results // there is room: one is under way at a time
		return nil
	})
}

// maySample reports whether GPUs can be measured once it is time for that.
func (l *loop) maySample() bool {
	return l.samples.Every > 0 && !l.samples.running && !l.looking && l.looked && !l.isQuiesced() &&
		l.prober.session != nil
}

// endSamples publishes what was measured. A GPU of which a call hangs, or that is lost, is looked
// at soon.
func (l *loop) endSamples(ctx context.Context, results []sampled) {
	s := &l.samples
	s.running = false
	for _, r := range results {
		before := s.failed[r.uuid]
		delete(s.failed, r.uuid)
		switch {
		case r.err == nil:
			s.last[r.uuid] = r.Sample
		default:
			s.failed[r.uuid] = r.err.Error()
			if before == "" {
				klog.FromContext(ctx).V(2).Info("Cannot measure a GPU", "gpu", r.uuid, "reason", r.err.Error())
				l.nudge()
			}
		}
	}
	there := map[string]bool{}
	for _, g := range l.state.scan.GPUs {
		there[g.UUID] = true
	}
	maps.DeleteFunc(s.last, func(uuid string, _ inventory.Sample) bool { return !there[uuid] })
	maps.DeleteFunc(s.xids, func(uuid string, _ uint64) bool { return !there[uuid] })
	maps.DeleteFunc(s.failed, func(uuid, _ string) bool { return !there[uuid] })
	if s.Every == 0 {
		return
	}
	var all []inventory.Sample
	for _, g := range l.state.scan.GPUs {
		if sample, ok := s.last[g.UUID]; ok {
			sample.LastXID = s.xids[g.UUID]
			all = append(all, sample)
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
