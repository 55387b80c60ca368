package config_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

var update = flag.Bool("update", false, "write the table of docs/flags.md anew")

const (
	flagsPage  = "../../docs/flags.md"
	tableBegin = "<!-- written by internal/config's TestFlagsPage -->\n"
)

// TestFlagsPage holds the table in docs/flags.md to the options there are. `go test ./internal/config -run TestFlagsPage -update` writes
// it anew.
func TestFlagsPage(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(flagsPage)
	if err != nil {
		t.Fatal(err)
	}
	before, table, begins := strings.Cut(string(text), tableBegin)
	if !begins {
		t.Fatalf("docs/flags.md has no place for the table: %q", tableBegin)
	}
	var b strings.Builder
	b.WriteString("| flag | variable | key in the file | default | what it does |\n|---|---|---|---|---|\n")
	for _, o := range config.Options() {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", code("--", append([]string{o.Flag}, o.Aliases...)...), code("", o.Env...), code("", o.Key),
			code("", o.Default), strings.ReplaceAll(o.Usage, "|", "\\|"))
	}
	if table == b.String() {
		return
	}
	if !*update {
		t.Fatal("the table in docs/flags.md is not that of the options; write it anew: go test ./internal/config -run TestFlagsPage -update")
	}
	if err := os.WriteFile(flagsPage, []byte(before+tableBegin+b.String()), 0o644); err != nil {
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
