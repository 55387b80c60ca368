package cli

import (
	"context"
	"runtime/metrics"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/telemetry"
)

// TestMetricsAreSwitched: with the address come samples and the earlier collection of garbage, after a second; without it both end.
func TestMetricsAreSwitched(t *testing.T) {
	t.Setenv("GOGC", "")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		on := config.Config{MetricsAddress: ":9400", GPUMetrics: config.GPUMetrics{Enabled: true, Interval: 15 * time.Second}}
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
			gc     uint64
			every  time.Duration
		}{
			{on, 50, 15 * time.Second}, {config.Config{}, 100, 0}, {on, 50, 15 * time.Second}, {config.Config{}, 100, 0},
		} {
			configs.Publish(step.config)
			time.Sleep(time.Minute) // the bubble's clock
			synctest.Wait()
			gc := []metrics.Sample{{Name: "/gc/gogc:percent"}}
			metrics.Read(gc)
			if gc[0].Value.Uint64() != step.gc || sampling.Every != step.every || gpus.Value().Every != step.every {
				t.Errorf("step %d: GOGC %d, samples every %v, metrics of GPUs every %v", i, gc[0].Value.Uint64(), sampling.Every, gpus.Value().Every)
			}
			if got := address.Value(); got != step.config.MetricsAddress {
				t.Errorf("step %d: address %q", i, got)
			}
		}
		cancel()
		<-ended
	})
}
