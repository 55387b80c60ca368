package nodeevents

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "update the tables in docs/reference.md")

const (
	docs       = "../../../docs/reference.md"
	tableBegin = "<!-- reasons: written by internal/report/nodeevents's TestDocs -->\n"
	tableEnd   = "<!-- end of reasons -->\n"
)

// TestDocs compares the tables of docs/reference.md with the code. `go test
// ./internal/report/nodeevents -run TestDocs -update` rewrites them.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegin)
	tables, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		t.Fatalf("docs/reference.md has no place for the tables: %q … %q", tableBegin, tableEnd)
	}
	var b strings.Builder
	b.WriteString("\n### Reasons of Events\n\n| reason | type | action | pods too | when |\n|---|---|---|---|---|\n")
	for _, r := range Rows {
		pods := ""
		if r.Pods {
			pods = "yes"
		}
		fmt.Fprintf(&b, "| `%s` | %s | `%s` | %s | %s |\n", r.Reason, r.Type, r.Action, pods, r.When)
	}
	b.WriteString("\n### Reasons of the condition\n\n" +
		"The first row that applies counts, from bad to good: False, Unknown, True.\n\n" +
		"| status | reason | when |\n|---|---|---|\n")
	for _, r := range conditionRows {
		fmt.Fprintf(&b, "| %s | `%s` | %s |\n", r.Status, r.Reason, r.When)
	}
	if tables == b.String() {
		return
	}
	if !*update {
		t.Fatal("the tables in docs/reference.md differ from the code; update them: go test " +
			"./internal/report/nodeevents -run TestDocs -update")
	}
	if err := os.WriteFile(docs, []byte(before+tableBegin+b.String()+tableEnd+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestRows: each row is complete and valid in Kubernetes.
func TestRows(t *testing.T) {
	for _, r := range Rows {
		if r.Type != normal && r.Type != warning || r.Action == "" || len(r.Action) > 128 || len(r.Reason) > 128 ||
			r.When == "" {
			t.Errorf("%+v", r)
		}
		if r.Reason.Row() != r {
			t.Errorf("%s is there twice", r.Reason)
		}
	}
}

// TestListThatJustFits: a text that just fits is complete.
func TestListThatJustFits(t *testing.T) {
	items := []string{"a", strings.Repeat("b", maxText-len("a; "))}
	if got := list("", items); got != strings.Join(items, "; ") {
		t.Errorf("%d bytes that end with %q", len(got), got[len(got)-10:])
	}
}

// TestEntries: entries of a message can be parsed back.
func TestEntries(t *testing.T) {
	for _, v := range []verdict{
		{state: unhealthy, xid: 79, remedy: "reboot"}, {state: lost, source: "reset-required",
			remedy: "drain+reset"}, {state: unhealthy, source: "hang"},
	} {
		for _, id := range []string{"GPU-5f1f", "MIG-GPU-aaaa-bbbb/1/0"} {
			uuid, got, ok := parseEntry(v.entry(id))
			if !ok || uuid != id || got != v {
				t.Errorf("%q: %v %q %+v", v.entry(id), ok, uuid, got)
			}
		}
	}
	for _, text := range []string{"", "all GPUs are healthy", "and 5 more", "GPU 3 cannot be read, remedy: reconnect",
		"no verdict yet: GPU-1"} {
		if uuid, v, ok := parseEntry(text); ok {
			t.Errorf("%q: %q %+v", text, uuid, v)
		}
	}
}
