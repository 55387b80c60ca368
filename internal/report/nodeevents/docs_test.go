package nodeevents_test

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
)

var update = flag.Bool("update", false, "update the table of Events in docs/reference.md")

const docs = "../../../docs/reference.md"

// TestDocs compares the table of Events in docs/reference.md with the code. `go test
// ./internal/report/nodeevents -run TestDocs -update` rewrites it.
func TestDocs(t *testing.T) {
	var b strings.Builder
	b.WriteString("\n### Reasons of Events\n\n| reason | type | action | pods too | when |\n|---|---|---|---|---|\n")
	for _, r := range nodeevents.Rows {
		pods := ""
		if r.Pods {
			pods = "yes"
		}
		fmt.Fprintf(&b, "| `%s` | %s | `%s` | %s | %s |\n", r.Reason, r.Type, r.Action, pods, r.When)
	}
	documents.HoldPart(t, docs, "reasons", b.String(), *update)
}

// TestDocsOfTheCondition: docs/reference.md explains each reason of the condition.
func TestDocsOfTheCondition(t *testing.T) {
	text, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "\n### Reasons of the condition\n")
	table, _, _ := strings.Cut(after, "\n\nOne fact")
	var got []string
	for _, row := range regexp.MustCompile("(?m)^\\| (True|False|Unknown) \\| `([A-Za-z]+)` \\| [A-Z].{20,} \\|$").
		FindAllStringSubmatch(table, -1) {
		got = append(got, row[1]+" "+row[2])
	}
	var want []string
	for status, reasons := range map[string][]nodeevents.Reason{
		nodeevents.True:  {nodeevents.AllHealthy},
		nodeevents.False: {nodeevents.GPUUnhealthy, nodeevents.GPULost},
		nodeevents.Unknown: {nodeevents.DriverNotReady, nodeevents.DriverChanging, nodeevents.GPUUnknown,
			nodeevents.GPUNotReady, nodeevents.MonitorStalled},
	} {
		for _, r := range reasons {
			want = append(want, status+" "+string(r))
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("reasons in docs/reference.md (-want +got):\n%s", diff)
	}
}

// TestRows: each row is complete and valid in Kubernetes.
func TestRows(t *testing.T) {
	for _, r := range nodeevents.Rows {
		if r.Type != "Normal" && r.Type != "Warning" || r.Action == "" || len(r.Action) > 128 || len(r.Reason) > 128 ||
			r.When == "" {
			t.Errorf("%+v", r)
		}
		if r.Reason.Row() != r {
			t.Errorf("%s is there twice", r.Reason)
		}
	}
}
