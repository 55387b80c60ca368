package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

// An output is the format of a command's result: a format for people, YAML or JSON. Some commands
// have further formats.
type output struct {
	format  string
	people  string // format for people: outputTable or outputText
	further []string
}

const (
	outputTable   = "table"
	outputText    = "text"
	outputWide    = "wide"
	outputYAML    = "yaml"
	outputJSON    = "json"
	outputClasses = "classes"
)

func (o *output) formats() []string {
	return append(slices.Compact([]string{o.people, outputYAML, outputJSON}), o.further...)
}

func (o *output) String() string { return o.format }
func (o *output) Type() string   { return strings.Join(o.formats(), "|") }

func (o *output) Set(text string) error {
	if !slices.Contains(o.formats(), text) {
		return fmt.Errorf("unknown output %q: give one of %s", text, strings.Join(o.formats(), ", "))
	}
	o.format = text
	return nil
}

// addOutputFlag adds -o to a command.
func addOutputFlag(cmd *cobra.Command, further ...string) *output {
	return addOutputFlagFor(cmd, outputTable, further...)
}

// addOutputFlagFor is addOutputFlag with a given format for people.
func addOutputFlagFor(cmd *cobra.Command, people string, further ...string) *output {
	o := &output{format: people, people: people, further: further}
	cmd.Flags().VarP(o, "output", "o", "output format")
	return o
}

// print prints the value behind a pointer, or the output of table in the format for people. Tabs
// separate the columns of a table. In the format for people, texts in the value are made printable,
// because they come from others: table must read the value when it is called.
func (o *output) print(w io.Writer, value any, table func(io.Writer)) error {
	var text []byte
	var err error
	switch o.format {
	case outputYAML:
		// YAML has no control characters, and JSON's escapes are equivalent
		if text, err = json.Marshal(value); err == nil {
			text, err = yaml.JSONToYAML([]byte(terminal.Printable(string(text), terminal.Escape)))
		}
	case outputJSON:
		text, err = json.MarshalIndent(value, "", "  ")
		text = append(text, '\n')
	default:
		terminal.Clean(value)
		columns := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
		table(columns)
		return columns.Flush()
	}
	if err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	_, err = w.Write(text)
	return err
}
