package telemetry

import "github.com/prometheus/client_golang/prometheus"

// A metric is a row of docs/metrics.md, from which the row is generated.
type metric struct {
	name string
	kind kind
	// unit is the unit of the value; empty for a number of things.
	unit string
	help string
	// labels are the names of the labels, in the order in which their values are given.
	labels []string
	// series is how many series there are at most, as a short sentence.
	series string
	// calls says how many calls into the driver one sampling makes for it; empty for a metric of the daemon.
	calls string
}

// kind is the type of a metric.
type kind string

const (
	gauge     kind = "gauge"
	counter   kind = "counter"
	histogram kind = "histogram"
)

// desc returns the metric's description for Prometheus' client.
func (m metric) desc() *prometheus.Desc { return prometheus.NewDesc(m.name, m.help, m.labels, nil) }

// send hands a value of the metric to Prometheus' client; values are those of its labels.
func (m metric) send(out chan<- prometheus.Metric, value float64, values ...string) {
	valueType := prometheus.GaugeValue
	if m.kind == counter {
		valueType = prometheus.CounterValue
	}
	out <- prometheus.MustNewConstMetric(m.desc(), valueType, value, values...)
}

// A chapter is a part of docs/metrics.md.
type chapter struct {
	title   string
	metrics []metric
}

// chapters are all metrics.
var chapters = []chapter{
	{"The daemon", daemonMetrics},
	{"The GPUs", gpuMetrics()},
}

var daemonMetrics = []metric{buildInfo}
