package config

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of options in README.md anew")

const (
	readme     = "../../README.md"
	tableBegin = "<!-- flags: written by internal/config's TestREADME -->\n"
	tableEnd   = "<!-- end of flags -->\n"
)

// TestREADME holds the README's table of options to the options there are. `go test ./internal/config -run TestREADME
// -update` writes it anew.
func TestREADME(t *testing.T) {
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegin)
	table, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		t.Fatalf("README.md has no place for the table: %q … %q", tableBegin, tableEnd)
	}
	var b strings.Builder
	b.WriteString("| flag | variable | key in the file | default | what it does |\n|---|---|---|---|---|\n")
	for _, o := range options {
		names := []string{code("--" + o.flag)}
		for _, alias := range o.aliases {
			names = append(names, code("--"+alias))
		}
		var variables []string
		for _, v := range o.env {
			variables = append(variables, code(v))
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", strings.Join(names, ", "), strings.Join(variables, ", "), code(o.key),
			code(o.fallback), strings.ReplaceAll(o.usage, "|", "\\|"))
	}
	if table == b.String() {
		return
	}
	if !*update {
		t.Fatalf("the table in README.md is not that of the options; write it anew: go test ./internal/config -run TestREADME -update")
	}
	if err := os.WriteFile(readme, []byte(before+tableBegin+b.String()+tableEnd+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}
