package telemetry

import (
	"flag"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
)

var update = flag.Bool("update", false, "update the tables of metrics in docs")

// TestDocs checks the tables of docs/monitoring.md against the metrics, and docs/dev/metrics.md
// against their costs. `go test ./internal/report/telemetry -run TestDocs -update` rewrites them.
func TestDocs(t *testing.T) {
	var tables, costs strings.Builder
	for _, c := range chapters {
		c.write(&tables)
	}
	writeCost(&costs)
	documents.HoldPart(t, "../../../docs/monitoring.md", "metrics", tables.String(), *update)
	documents.HoldPart(t, "../../../docs/dev/metrics.md", "metrics", costs.String(), *update)
}

// write writes a chapter as a table. Labels of devices are written once for all metrics that have
// them. Metrics of dcgm-exporter are lists, because dcgm-exporter defines their meanings.
func (c chapter) write(b *strings.Builder) {
	exporters := map[metricType][]string{}
	fmt.Fprintf(b, "\n### %s\n\n| metric | type; labels | meaning |\n|---|---|---|\n", c.title)
	for _, m := range c.metrics {
		if strings.HasPrefix(m.name, "DCGM_") {
			exporters[m.kind] = append(exporters[m.kind], "`"+m.name+"`")
			continue
		}
		labels := m.labels
		if len(labels) >= len(deviceLabels) && slices.Equal(labels[:len(deviceLabels)], deviceLabels) {
			labels = labels[len(deviceLabels):]
		}
		how := string(m.kind)
		for i, l := range labels {
			how += []string{"; `", ", `"}[min(i, 1)] + l + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", m.name, how, strings.ReplaceAll(m.help, "|", "\\|"))
	}
	b.WriteString("\n")
	for _, kind := range slices.Sorted(maps.Keys(exporters)) {
		fmt.Fprintf(b, "Of dcgm-exporter, each a %s: %s.\n\n", kind, strings.Join(exporters[kind], ", "))
	}
}

// writeCost writes how many series a metric has, and which calls into the driver a sample takes.
func writeCost(b *strings.Builder) {
	b.WriteString("\n## Series\n\n| metric | series at most |\n|---|---|\n")
	for _, c := range chapters {
		for _, m := range c.metrics {
			fmt.Fprintf(b, "| `%s` | %s |\n", m.name, m.series)
		}
	}
	b.WriteString("\n## Calls into the driver for one sample\n\n")
	b.WriteString("| query | metrics | calls for a GPU | calls for a GPU in MIG mode |\n|---|---|---|---|\n")
	sums := [4]int{} // for a GPU, a GPU in MIG mode and a GPU instance; blocking calls for a GPU
	for _, q := range nvidia.SampleQueries() {
		var names []string
		for _, m := range q.Measures {
			i := slices.IndexFunc(gpuRows, func(row gpuMetric) bool { return row.measure == m })
			names = append(names, "`"+gpuRows[i].name+"`")
		}
		if len(names) == 0 {
			names = []string{"those of GPU instances"}
		}
		whole, mig := fmt.Sprint(q.Calls), fmt.Sprint(q.Calls)
		switch {
		case q.Blocks > 0:
			whole = fmt.Sprintf("%d, which takes %v; only with `--gpu-metrics-pcie-throughput`, and where performance "+
				"monitoring has no value", q.Calls, q.Blocks)
			mig = fmt.Sprintf("%d, the same", q.Calls)
			sums[3] += q.Calls
		case q.InstancesOnly:
			whole, mig = "0", fmt.Sprintf("%d a GPU instance", q.Calls)
			sums[2] += q.Calls
		case q.Instances:
			mig = fmt.Sprintf("%d a GPU instance", q.Calls)
			sums[0] += q.Calls
			sums[2] += q.Calls
		case q.WithoutMIG:
			mig = "0"
			sums[0] += q.Calls
		default:
			sums[0] += q.Calls
			sums[1] += q.Calls
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", q.Function, strings.Join(names, ", "), whole, mig)
	}
	fmt.Fprintf(b, "| all | | %d, and %d that block | %d, %d a GPU instance, and %d that block |\n\n", sums[0], sums[3],
		sums[1], sums[2], sums[3])
}

// TestRows checks that rows are complete and the names of the program's own metrics regular.
func TestRows(t *testing.T) {
	t.Parallel()
	ours := regexp.MustCompile(`^gpu_device_plugin_[a-z0-9_]+$`)
	seen := map[string]bool{}
	for _, c := range chapters {
		for _, m := range c.metrics {
			switch {
			case seen[m.name]:
				t.Errorf("%s: two metrics have this name", m.name)
			case m.help == "" || m.series == "" || m.kind == "":
				t.Errorf("%s: the row lacks help, series or kind", m.name)
			case strings.ContainsAny(m.help, "\"\\\n"):
				t.Errorf("%s: the help has a sign that the text formats escape, which a page does not", m.name)
			case strings.HasPrefix(m.name, "DCGM_FI_"):
			case !ours.MatchString(m.name):
				t.Errorf("%s: the name is not of our metrics", m.name)
			case strings.HasSuffix(m.name, "_total") != (m.kind == counter):
				t.Errorf("%s: counters, and only they, end in _total", m.name)
			case strings.HasSuffix(strings.TrimSuffix(m.name, "_total"), "_seconds") != (m.unit == "s"):
				t.Errorf("%s: the name and the unit %q do not match", m.name, m.unit)
			}
			seen[m.name] = true
		}
	}
}
