package daemon

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
)

// TestMetricsAreSwitched: samples start one second after the address is set, and end with it.
func TestMetricsAreSwitched(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		on := config.Config{Live: config.Live{MetricsAddress: ":9400", GPUMetrics: config.GPUMetrics{Enabled: true, Interval: 15 * time.Second}}}
		configs, address, gpus := feed.New(on), feed.New(""), feed.New(telemetry.GPUSettings{})
		var sampling monitor.Sampling
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			followMetrics(ctx, configs, address, gpus, func(_ context.Context, how monitor.Sampling) error {
				sampling = how
				return nil
			})
		}()
		for i, step := range []struct {
			config config.Config
			every  time.Duration
		}{
			{on, 15 * time.Second}, {config.Config{}, 0}, {on, 15 * time.Second}, {config.Config{}, 0},
		} {
			configs.Publish(step.config)
			time.Sleep(time.Minute) // the bubble's clock
			synctest.Wait()
			if sampling.Every != step.every || gpus.Value().Every != step.every {
				t.Errorf("step %d: samples every %v, metrics of GPUs every %v", i, sampling.Every, gpus.Value().Every)
			}
			if got := address.Value(); got != step.config.MetricsAddress {
				t.Errorf("step %d: address %q", i, got)
			}
		}
		cancel()
		<-ended
	})
}

// TestShrink: memory that only the start needed is released, and garbage is collected earlier from
// then on, unless GOGC is set.
func TestShrink(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	read := func(name string) uint64 {
		sample := []metrics.Sample{{Name: name}}
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	for _, test := range []struct {
		environment string
		percent     uint64
	}{{"100", 100}, {"", gcPercent}} {
		t.Setenv("GOGC", test.environment)
		garbage := make([]byte, 64<<20)
		for i := range garbage {
			garbage[i] = 1
		}
		before := read("/memory/classes/heap/released:bytes")
		runtime.KeepAlive(garbage)
		shrink()
		if after := read("/memory/classes/heap/released:bytes"); after < before+32<<20 {
			t.Errorf("GOGC=%q: %d bytes were given back", test.environment, int64(after-before))
		}
		if percent := read("/gc/gogc:percent"); percent != test.percent {
			t.Errorf("GOGC=%q: collected at %d percent, want %d", test.environment, percent, test.percent)
		}
	}
}
