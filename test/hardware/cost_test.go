package hardware_test

import (
	"sync"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// The targets of make bench for eight simulated GPUs, whose driver costs nothing, three times.
const (
	mostCPU = 3 * 2.0  // ms a second, without metrics
	mostRSS = 3 * 30.0 // MB
)

const idleFor = 30 * time.Second

// TestCost: what an idle daemon uses, by default, with metrics that are read each second, and with
// GPUs that are measured as often.
func TestCost(t *testing.T) {
	needGPU(t)
	var all sync.WaitGroup
	defer all.Wait()
	for name, m := range map[string]*machine{
		"by default": start(t), "with metrics": measured(t), "measuring each second": measured(t, "--gpu-metrics-interval",
			"1s"),
	} {
		pid := m.Running().Pid
		all.Go(func() {
			calls := 0.0
			before := footprintOf(t, pid)
			if m.at != "" {
				calls = -m.driver()
			}
			m.idle()
			if m.at != "" {
				calls += m.driver()
				m.logDriver(name)
			}
			after := footprintOf(t, pid)
			ms := float64((after.cpu - before.cpu).Microseconds()) / 1000 / idleFor.Seconds()
			calls *= 1000 / idleFor.Seconds()
			t.Logf("%s: %.1f ms of CPU a second; %v", name, ms, after)
			if m.at != "" {
				t.Logf("%s: calls into the driver take %.1f ms a second, without the wait for events", name, calls)
			}
			if m.at == "" && ms > mostCPU {
				t.Errorf("%s: %.1f ms of CPU a second, want at most %.0f", name, ms, mostCPU)
			}
			if after.rss > mostRSS {
				t.Errorf("%s: %.0f MB resident, want at most %.0f", name, after.rss, mostRSS)
			}
		})
	}
}

// idle lets time pass, and reads metrics each second where there are any.
func (m *machine) idle() {
	end := time.After(idleFor)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-end:
			return
		case <-tick.C:
		}
		if m.at != "" {
			if _, err := get(m.Context(), "http://"+m.at+"/metrics"); err != nil {
				m.Error(err)
			}
		}
	}
}

// groups are the groups of calls into the driver.
var groups = []string{"session", "inventory", "reading", "events", "mig"}

const callMetric = "gpu_device_plugin_nvml_call_duration_seconds"

// driver returns how many seconds calls into the driver took since the start, without waits for
// events.
func (m *machine) driver() (seconds float64) {
	now := m.scrape()
	for _, g := range groups {
		v, _ := now.value(callMetric+"_sum", `group="`+g+`"`)
		seconds += v
	}
	return seconds
}

// logDriver logs how long calls into the driver took since the start.
func (m *machine) logDriver(name string) {
	now := m.scrape()
	for _, g := range groups {
		sum, _ := now.value(callMetric+"_sum", `group="`+g+`"`)
		n, _ := now.value(callMetric+"_count", `group="`+g+`"`)
		if n > 0 {
			m.Logf("%s: calls of group %s: %.0f, %.3f ms each", name, g, n, 1000*sum/n)
		}
	}
}

// TestReleases: each time the driver is released nothing of it is open, each time it is used again
// the GPUs are Healthy, and nothing is left over.
func TestReleases(t *testing.T) {
	const times, first = 60, 5
	m := start(t)
	pid := m.Running().Pid
	var released, resumed []time.Duration
	var early footprint
	for i := range times {
		began := time.Now()
		m.call(daemon.CallQuiesce, nil, nil)
		released = append(released, time.Since(began))
		if open := footprintOf(t, pid).nvidia; len(open) > 0 {
			t.Fatalf("release %d: still open: %v", i+1, open)
		}
		began = time.Now()
		m.call(daemon.CallResume, nil, nil)
		resumed = append(resumed, time.Since(began))
		poll.Until(t, "the GPUs are Healthy", func() bool {
			for _, g := range m.status().GPUs {
				if g.State != "Healthy" {
					return false
				}
			}
			return true
		})
		if i+1 == first {
			early = footprintOf(t, pid)
		}
	}
	late := footprintOf(t, pid)
	t.Logf("a release takes %s: the wait for events under way, of at most 500 ms, has to end first", spread(released))
	t.Logf("to use the driver again takes %s", spread(resumed))
	t.Logf("after %d releases: %v", first, early)
	t.Logf("after %d releases: %v", times, late)
	if late.threads > early.threads+3 || late.descriptors > early.descriptors+2 || late.rss > early.rss+8 {
		t.Errorf("after %d releases: %v; after %d: %v", first, early, times, late)
	}
}
