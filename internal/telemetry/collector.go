package telemetry

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

// statusTimeout is how long a scrape waits for the daemon's status, which is in memory.
const statusTimeout = time.Second

// statusCollector has the metrics that are made of the daemon's status at each scrape.
type statusCollector struct {
	status func(context.Context) (status.Status, error)
}

// Describe implements prometheus.Collector. What there is depends on the node, so it describes nothing.
func (c statusCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c statusCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), statusTimeout)
	defer cancel()
	s, err := c.status(ctx)
	if err != nil {
		return // the monitor's loop does not answer: /healthz says so
	}
	buildInfo.send(out, 1, s.Version)
}

var buildInfo = metric{
	name: "gpu_device_plugin_build_info", kind: gauge, labels: []string{"version"}, series: "1",
	help: "The version of the daemon. The value is always 1.",
}
