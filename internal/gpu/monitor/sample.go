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

// Sampling has the settings of measurements for metrics. The zero value disables samples.
type Sampling struct {
	// Every is the time between two samples of a GPU; 0 for none.
	Every time.Duration
	// Blocking adds the PCIe throughput, a measurement of 20 ms for each GPU.
	Blocking bool
}

// firstSample is the wait from a look to the first samples: a starting daemon first offers its
// GPUs.
const firstSample = time.Second

// A sampler is the state of the measurements. It belongs to the loop.
type sampler struct {
	Sampling
	nextSample  time.Time // zero: after the next look
	running     bool
	look        atomic.Pointer[chan struct{}] // nil without a running look, else closed at its end
	results     chan []sampleResult
	lastSamples map[string]inventory.Sample // by UUID
	xids        map[string]uint64           // the last XID of each GPU, by UUID
	failures    map[string]string           // why the last measurement failed, by UUID
	feed        *feed.Feed[[]inventory.Sample]
}

// A sampleResult is the result of measuring a GPU.
type sampleResult struct {
	inventory.Sample
	uuid string
	err  error
}

func newSampler(m *Monitor) sampler {
	return sampler{
		results: make(chan []sampleResult, 1), feed: m.samples,
		lastSamples: map[string]inventory.Sample{}, xids: map[string]uint64{}, failures: map[string]string{},
	}
}

// Samples returns the feed of samples of all present GPUs, by index. After a failed measurement a
// GPU keeps its previous sample, if any. Nothing is published while samples are disabled.
func (m *Monitor) Samples() *feed.Feed[[]inventory.Sample] { return m.samples }

// SetSampling replaces the settings for samples.
func (m *Monitor) SetSampling(ctx context.Context, how Sampling) error {
	return m.do(ctx, func(l *loop) {
		if l.samples.Sampling == how {
			return
		}
		l.samples.Sampling, l.samples.nextSample = how, time.Time{}
		if how.Every == 0 {
			l.samples.lastSamples = map[string]inventory.Sample{}
			l.samples.feed.Publish(nil)
		}
	})
}

// suspend suspends measurements during a look, until goOn. A measurement stops after the running
// call, or after 100 ms of fast calls.
func (s *sampler) suspend() {
	ended := make(chan struct{})
	s.look.Store(&ended)
}

func (s *sampler) resume() { close(*s.look.Swap(nil)) }

// pause waits for the end of a running look.
func (s *sampler) pause(ctx context.Context) {
	if look := s.look.Load(); look != nil {
		select {
		case <-*look:
		case <-ctx.Done():
		}
	}
}

// beginSamples starts the measurements if they are due.
func (l *loop) beginSamples(ctx context.Context) {
	if !l.maySample() {
		return
	}
	s, now := &l.samples, time.Now()
	if s.nextSample.IsZero() {
		s.nextSample = now.Add(firstSample)
	}
	if now.Before(s.nextSample) {
		return
	}
	s.nextSample, s.running = now.Add(s.Every), true
	session, blocking := l.prober.session, s.Blocking // stable: no look is running
	gpus := make([]string, 0, len(l.state.scan.GPUs))
	for _, g := range l.state.scan.GPUs {
		gpus = append(gpus, g.UUID)
	}
	l.start(func() error {
		results := make([]sampleResult, 0, len(gpus))
		for _, uuid := range gpus {
			if ctx.Err() != nil {
				break
			}
			sample, err := session.Sample(ctx, uuid, blocking, s.pause)
			results = append(results, sampleResult{Sample: sample, uuid: uuid, err: err})
		}
		s.results <- results // does not block: only one measurement runs at a time
		return nil
	})
}

// maySample reports whether measurements are possible once they are due.
func (l *loop) maySample() bool {
	return l.samples.Every > 0 && !l.samples.running && !l.lookRunning && l.hasLooked && !l.isQuiesced() &&
		l.prober.session != nil
}

// endSamples publishes the measurements. It requests a look for a GPU with a new failure, such as a
// hanging call.
func (l *loop) endSamples(ctx context.Context, results []sampleResult) {
	s := &l.samples
	s.running = false
	for _, r := range results {
		before := s.failures[r.uuid]
		delete(s.failures, r.uuid)
		switch {
		case r.err == nil:
			s.lastSamples[r.uuid] = r.Sample
		default:
			s.failures[r.uuid] = r.err.Error()
			if before == "" {
				klog.FromContext(ctx).V(2).Info("Cannot measure a GPU", "gpu", r.uuid, "reason", r.err.Error())
				l.requestLook()
			}
		}
	}
	there := map[string]bool{}
	for _, g := range l.state.scan.GPUs {
		there[g.UUID] = true
	}
	maps.DeleteFunc(s.lastSamples, func(uuid string, _ inventory.Sample) bool { return !there[uuid] })
	maps.DeleteFunc(s.xids, func(uuid string, _ uint64) bool { return !there[uuid] })
	maps.DeleteFunc(s.failures, func(uuid, _ string) bool { return !there[uuid] })
	if s.Every == 0 {
		return
	}
	var all []inventory.Sample
	for _, g := range l.state.scan.GPUs {
		if sample, ok := s.lastSamples[g.UUID]; ok {
			sample.LastXID = s.xids[g.UUID]
			all = append(all, sample)
		}
	}
	s.feed.Publish(all)
}

// noteXID records the XID of an event for the samples of its GPU.
func (s *sampler) noteXID(e inventory.Event) {
	if e.Kind == inventory.EventXID && e.UUID != "" {
		s.xids[e.UUID] = e.XID
	}
}
