package config_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

var update = flag.Bool("update", false, "update the table of docs/reference.md")

const (
	flagsPage  = "../../docs/reference.md"
	tableBegin = "<!-- flags: written by internal/config's TestFlagsPage -->\n"
	tableEnd   = "<!-- end of flags -->\n"
)

// TestFlagsPage holds the table in docs/reference.md to the options there are. `go test
// ./internal/config -run TestFlagsPage -update` updates the table.
func TestFlagsPage(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(flagsPage)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegin)
	table, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		t.Fatalf("docs/reference.md has no place for the table: %q … %q", tableBegin, tableEnd)
	}
	var b strings.Builder
	b.WriteString("| flag | variable | key in the file | default | what it does |\n|---|---|---|---|---|\n")
	var restart []string
	for _, o := range config.Options() {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", code("--", append([]string{o.Flag}, o.Aliases...)...),
			code("", o.Env...), code("", o.Key),
			code("", o.Default), strings.ReplaceAll(o.Usage, "|", "\\|"))
		if o.Restart {
			restart = append(restart, o.Key)
		}
	}
	fmt.Fprintf(&b, "\nA change of these keys in the file needs a restart of the daemon: %s.\n", code("", restart...))
	if table == b.String() {
		return
	}
	if !*update {
		t.Fatal("the table in docs/reference.md is not that of the options; write it again: " +
			"go test ./internal/config -run TestFlagsPage -update")
	}
	if err := os.WriteFile(flagsPage, []byte(before+tableBegin+b.String()+tableEnd+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// code returns names as Markdown shows code.
func code(prefix string, names ...string) string {
	var shown []string
	for _, name := range names {
		if name != "" {
			shown = append(shown, "`"+prefix+name+"`")
		}
	}
	return strings.Join(shown, ", ")
}
