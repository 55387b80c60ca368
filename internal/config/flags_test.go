package config_test

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
)

var update = flag.Bool("update", false, "update the table of docs/reference.md")

// TestFlagsPage holds the table in docs/reference.md to the options there are. `go test
// ./internal/config -run TestFlagsPage -update` updates the table.
func TestFlagsPage(t *testing.T) {
	t.Parallel()
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
	documents.HoldPart(t, "../../docs/reference.md", "flags", b.String(), *update)
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
