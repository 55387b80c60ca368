package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A metric is a row of docs/monitoring.md, which is generated from the metrics. The name is unique.
type metric struct {
	name string
	kind metricType
	// unit is the unit of the value; empty for counts.
	unit string
	help string
	// labels are the names of the labels, in the order of the values given to send.
	labels []string
	// series is the greatest number of series.
	series string
}

// metricType is the type of a metric.
type metricType string

const (
	gauge     metricType = "gauge"
	counter   metricType = "counter"
	histogram metricType = "histogram"
)

// send adds a value of the metric. Parameter values are the values of the labels.
func (m *metric) send(out *page, value float64, values ...string) {
	pairs := make([]label, len(values))
	for i, v := range values {
		pairs[i] = label{m.labels[i], v}
	}
	out.add(m, value, newLabels(pairs))
}

// sendBool sends 1 for true and 0 for false.
func (m *metric) sendBool(out *page, value bool, values ...string) {
	number := 0.0
	if value {
		number = 1
	}
	m.send(out, number, values...)
}

// sendTime sends the seconds since 1970. It sends nothing for the zero time.
func (m *metric) sendTime(out *page, at time.Time, values ...string) {
	if !at.IsZero() {
		m.send(out, float64(at.UnixMilli())/1000, values...)
	}
}

// histogramVec returns the metric as a histogram with the given classic buckets and native buckets.
func (m *metric) histogramVec(buckets []float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: m.name, Help: m.help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100,
		NativeHistogramMinResetDuration: time.Hour,
	}, m.labels)
}

// counterVec returns the metric as a counter.
func (m metric) counterVec() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.name, Help: m.help}, m.labels)
}

func (m metric) gaugeVec() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: m.name, Help: m.help}, m.labels)
}

// A chapter is a part of docs/monitoring.md.
type chapter struct {
	title   string
	metrics []metric
}

// chapters are all metrics.
var chapters = []chapter{
	{"The daemon", daemonMetrics},
	{"The GPUs", gpuMetrics()},
}
