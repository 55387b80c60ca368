package cli

import (
	"context"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/telemetry"
)

// serveMetrics serves metrics and probes by HTTP, at the address that the configuration has.
func (d *daemon) serveMetrics(ctx context.Context) error {
	address := feed.New(d.watcher.Configs().Value().MetricsAddress)
	go d.followMetricsAddress(ctx, address)
	return telemetry.New(telemetry.Options{
		Address: address, Status: d.status, Stuck: d.liveness.Stuck, Ready: d.readyNow, Collectors: d.collectors(),
	}).Run(ctx)
}

// collectors are the sources of metrics beside the daemon's status.
func (d *daemon) collectors() []telemetry.Collector { return nil }

// followMetricsAddress publishes the address of each Config that has another one than the last.
func (d *daemon) followMetricsAddress(ctx context.Context, address *feed.Feed[string]) {
	for {
		c, changed := d.watcher.Configs().Latest()
		if c.MetricsAddress != address.Value() {
			address.Publish(c.MetricsAddress)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}
