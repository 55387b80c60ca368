package telemetry

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tables in docs/metrics.md anew")

const (
	docs       = "../../docs/metrics.md"
	tableBegin = "<!-- metrics: written by internal/telemetry's TestDocs -->\n"
	tableEnd   = "<!-- end of metrics -->\n"
)

// TestDocs holds the tables of docs/metrics.md to the metrics that there are. `go test ./internal/telemetry -run TestDocs -update`
// writes them anew.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegin)
	tables, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		t.Fatalf("docs/metrics.md has no place for the tables: %q … %q", tableBegin, tableEnd)
	}
	var b strings.Builder
	for _, c := range chapters {
		c.write(&b)
	}
	if tables == b.String() {
		return
	}
	if !*update {
		t.Fatal("the tables in docs/metrics.md are not those of the metrics; write them anew: go test ./internal/telemetry -run TestDocs -update")
	}
	if err := os.WriteFile(docs, []byte(before+tableBegin+b.String()+tableEnd+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// write writes a chapter as a table. Only metrics that are made of samples cost calls into the driver.
func (c chapter) write(b *strings.Builder) {
	calls := slices.ContainsFunc(c.metrics, func(m metric) bool { return m.calls != "" })
	fmt.Fprintf(b, "\n### %s\n\n| metric | type | unit | labels | series at most |", c.title)
	if calls {
		b.WriteString(" driver calls |")
	}
	b.WriteString(" meaning |\n|---|---|---|---|---|")
	if calls {
		b.WriteString("---|")
	}
	b.WriteString("---|\n")
	for _, m := range c.metrics {
		labels := make([]string, len(m.labels))
		for i, l := range m.labels {
			labels[i] = "`" + l + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s |", m.name, m.kind, m.unit, strings.Join(labels, ", "), m.series)
		if calls {
			fmt.Fprintf(b, " %s |", m.calls)
		}
		fmt.Fprintf(b, " %s |\n", strings.ReplaceAll(m.help, "|", "\\|"))
	}
	b.WriteString("\n")
}

// TestRows keeps rows complete and the names of our own metrics regular.
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
