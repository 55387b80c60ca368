package monitor_test

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

const sampleEvery = 15 * time.Second

// simulateSampled is simulate for a Monitor that measures GPUs.
func simulateSampled(t *testing.T, profile string) simulation {
	t.Helper()
	s := simulate(t, profile)
	s.sample(sampleEvery)
	return s
}

func (s simulation) sample(every time.Duration) {
	s.t.Helper()
	if err := s.SetSampling(s.t.Context(), monitor.Sampling{Every: every}); err != nil {
		s.t.Fatal(err)
	}
}

// ages returns how old the samples are, by the index of the GPU; -1 where there is none.
func (s simulation) ages() []time.Duration {
	var ages []time.Duration
	for _, g := range s.Snapshots().Value().GPUs {
		age := time.Duration(-1)
		for _, sample := range s.Samples().Value() {
			if sample.UUID == g.UUID {
				age = time.Since(sample.Taken)
			}
		}
		ages = append(ages, age)
	}
	return ages
}

func (s simulation) wantFresh(but ...int) {
	s.t.Helper()
	for i, age := range s.ages() {
		if !slices.Contains(but, i) && (age < 0 || age > sampleEvery+5*time.Second) {
			s.t.Errorf("the sample of GPU %d is %v old", i, age)
		}
	}
}

func TestSamples(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulateSampled(t, "dgx-h100")
		pass(2 * time.Second)
		s.wantFresh()
		samples := s.Samples().Value()
		if len(samples) != 8 {
			t.Fatalf("%d samples", len(samples))
		}
		for i, g := range s.Snapshots().Value().GPUs {
			if samples[i].UUID != g.UUID {
				t.Errorf("sample %d is of %s", i, samples[i].UUID)
			}
		}
		for range 10 {
			_, changed := s.Samples().Latest()
			pass(sampleEvery)
			select {
			case <-changed:
			default:
				t.Fatal("there are no new samples after the time between two")
			}
			s.wantFresh()
		}
	})
}

// TestSamplingIsSwitched: off and on again, at another pace.
func TestSamplingIsSwitched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulateSampled(t, "dgx-h100")
		pass(2 * time.Second)
		s.sample(0)
		pass(time.Minute)
		if got := s.Samples().Value(); got != nil {
			t.Errorf("%d samples", len(got))
		}
		s.sample(5 * time.Second)
		for range 10 {
			pass(5 * time.Second)
			if age := slices.Max(s.ages()); age > 5*time.Second {
				t.Errorf("a sample is %v old", age)
			}
		}
	})
}

// TestNoSamples: nothing is measured while nobody wants it.
func TestNoSamples(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		pass(time.Hour)
		if m.Samples().Value() != nil || n.count(func(n *node) int { return n.samples }) != 0 {
			t.Error("GPUs were measured")
		}
	})
}

// TestSamplesOfAGPUThatHangs: the others have new ones, and its last one stays with its time.
func TestSamplesOfAGPUThatHangs(t *testing.T) {
	for _, call := range []string{"", "DeviceGetPowerUsage"} {
		synctest.Test(t, func(t *testing.T) {
			s := simulateSampled(t, "dgx-h100")
			pass(20 * time.Second)
			s.inject(hang("3", call))
			pass(3 * time.Minute)
			s.wantFresh(3)
			if age := s.ages()[3]; age < 2*time.Minute {
				t.Errorf("the sample of the GPU that hangs is %v old", age)
			}
			s.others(time.Minute, 3)
			s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
			s.until("all are Healthy", allHealthy(8))
			pass(sampleEvery + time.Second)
			s.wantFresh()
		})
	}
}

// TestSamplesOfADriverThatHangs: the last ones stay, and there are new ones once it answers.
func TestSamplesOfADriverThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulateSampled(t, "dgx-h100")
		pass(20 * time.Second)
		s.inject(hang("", ""))
		pass(5 * time.Minute)
		if ages := s.ages(); len(ages) != 8 || slices.Min(ages) < 4*time.Minute {
			t.Errorf("samples are %v old", ages)
		}
		s.inject(simulator.Fault{Kind: simulator.KindRestore})
		s.until("all are Healthy", allHealthy(8))
		pass(sampleEvery + time.Second)
		s.wantFresh()
	})
}

// TestSamplesOfAGPUThatIsGone: they are gone too.
func TestSamplesOfAGPUThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulateSampled(t, "dgx-h100")
		pass(20 * time.Second)
		gone := s.Snapshots().Value().GPUs[3].UUID
		s.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "3"})
		pass(sampleEvery + time.Minute)
		samples := s.Samples().Value()
		if len(samples) != 7 || slices.ContainsFunc(samples, func(s inventory.Sample) bool { return s.UUID == gone }) {
			t.Errorf("%d samples, one may be of the GPU that is gone", len(samples))
		}
		s.wantFresh()
	})
}

// TestSamplesWhileTheDriverIsReleased: no sample is taken, and the release waits for the end of a
// sample.
func TestSamplesWhileTheDriverIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulateSampled(t, "dgx-h100")
		s.inject(simulator.Fault{Kind: simulator.KindSlow, Call: "DeviceGetPowerUsage", Delay: "300ms"})
		pass(firstSample + time.Second) // three GPUs are measured
		if err := s.Quiesce(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		s.wantReleased()
		synctest.Wait() // until what was measured before is published
		_, changed := s.Samples().Latest()
		pass(10 * time.Minute)
		select {
		case <-changed:
			t.Error("there are new samples while the driver is released")
		default:
		}
		s.wantReleased()
		if err := s.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		pass(sampleEvery + 5*time.Second)
		s.wantFresh()
	})
}

const firstSample = time.Second // as package monitor has it

func (s simulation) wantReleased() {
	s.t.Helper()
	if stats := s.node.Stats(); stats != (simulator.Stats{}) {
		s.t.Errorf("left behind on the node: %+v", stats)
	}
}

// TestLooksDoNotWaitForSamples: a look waits for the call that is being made, and not for all GPUs,
// nor for all of one.
func TestLooksDoNotWaitForSamples(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulateSampled(t, "dgx-h100")
		for _, call := range []string{"Temperature", "PowerUsage", "ClockInfo", "UtilizationRates",
			"EncoderUtilization"} {
			s.inject(simulator.Fault{Kind: simulator.KindSlow, Call: "DeviceGet" + call, Delay: "1.5s"})
		}
		pass(firstSample + 500*time.Millisecond)
		start := time.Now()
		if _, err := s.Look(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > 3*time.Second {
			t.Errorf("the look took %v", took)
		}
		pass(80 * time.Second) // nine seconds a GPU
		for i, age := range s.ages() {
			if age < 0 || age > 80*time.Second {
				t.Errorf("the sample of GPU %d is %v old", i, age)
			}
		}
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "6", XID: 48})
		start = time.Now()
		synctest.Wait()
		if h := s.Snapshots().Value().GPUs[6].Health; h.XID != 48 || time.Since(start) > 0 {
			t.Errorf("an XID was not published at once: %+v", h)
		}
	})
}

// TestLastXID: samples say which XID came last, also of a GPU that cannot be measured any more.
func TestLastXID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulateSampled(t, "dgx-h100")
		pass(20 * time.Second)
		for _, xid := range []uint64{31, 43} {
			s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "2", XID: xid})
		}
		s.inject(hang("5", ""))
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 119})
		pass(time.Minute)
		for i, want := range []uint64{0, 0, 43, 0, 0, 119, 0, 0} {
			if got := s.Samples().Value()[i].LastXID; got != want {
				t.Errorf("the last XID of GPU %d is %d, want %d", i, got, want)
			}
		}
	})
}

// TestGPUThatIsGoneIsForgotten: of a GPU that went before it could be measured nothing is known
// when it comes back.
func TestGPUThatIsGoneIsForgotten(t *testing.T) {
	n := newNode(2)
	n.sampleErr = map[string]error{uuid(1): errors.New("no")}
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		if err := m.SetSampling(t.Context(), monitor.Sampling{Every: sampleEvery}); err != nil {
			t.Fatal(err)
		}
		n.xid(1, 13)
		pass(time.Minute)
		n.set(func(n *node) { n.gpus = n.gpus[:1] })
		pass(time.Minute)
		n.set(func(n *node) { n.gpus, n.sampleErr = append(n.gpus, gpu(1)), nil })
		pass(time.Minute)
		samples := m.Samples().Value()
		if len(samples) != 2 || samples[1].LastXID != 0 {
			t.Errorf("samples %+v, want two, without an XID", samples)
		}
	})
}
