// Package findings formats the findings of doctor and of preflight for people.
package findings

import (
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

// The columns of the text: the severity, the check, and the rest.
const (
	MessageColumn = 32 // where messages begin
	commandColumn = 4
)

// Text returns findings as text of at most width columns, 60 or more. The first line has the name of
// the command, the numbers of findings by severity, and the place of the node's files.
func Text(command, place string, all []diagnosis.Finding, width int) string {
	var b strings.Builder
	var counts []string
	for s := diagnosis.Error; s >= diagnosis.OK; s-- {
		n := 0
		for _, f := range all {
			if f.Severity == s {
				n++
			}
		}
		if text := fmt.Sprint(n, " ", s); n > 1 && s >= diagnosis.Warning {
			counts = append(counts, text+"s")
		} else if n > 0 {
			counts = append(counts, text)
		}
	}
	result := command + ": "
	if diagnosis.Worst(all) < diagnosis.Warning {
		result += "no problems found: "
	}
	b.WriteString(terminal.Wrap(result+strings.Join(counts, ", ")+" ("+place+")", width, "", "") + "\n")
	for _, f := range all {
		b.WriteString(Lines(f, width))
	}
	return b.String()
}

// Lines returns a finding as lines of at most width columns, 60 or more. In a narrow text, the
// message and the evidence have lines of their own.
func Lines(f diagnosis.Finding, width int) string {
	var b strings.Builder
	column, between := MessageColumn, ""
	if width < terminal.DefaultColumns && f.Severity != diagnosis.OK {
		column, between = commandColumn, "\n   "
	}
	indent := strings.Repeat(" ", column)
	head := strings.TrimRight(fmt.Sprintf("%-12s %-18s", f.Severity, f.Check), " ")
	if between == "" {
		head = fmt.Sprintf("%-12s %-18s", f.Severity, f.Check)
	}
	b.WriteString(head + between + " " + terminal.Wrap(f.Message, width-column, "", indent))
	if f.Severity == diagnosis.OK {
		return b.String()
	}
	for _, e := range f.Evidence {
		b.WriteString(indent + terminal.Wrap("seen: "+e, width-column, "", indent+"  "))
	}
	for _, command := range f.Remedy {
		indent := strings.Repeat(" ", commandColumn)
		b.WriteString(indent + terminal.Wrap("$ "+command, width-commandColumn, " \\", indent+"    "))
	}
	b.WriteString("\n")
	return b.String()
}
