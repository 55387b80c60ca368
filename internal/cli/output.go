package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// An output is how a command prints its result: as a table for people, or as YAML or JSON.
type output string

func (o *output) String() string { return string(*o) }
func (*output) Type() string     { return "table|yaml|json" }

func (o *output) Set(text string) error {
	switch text {
	case "table", "yaml", "json":
		*o = output(text)
		return nil
	}
	return fmt.Errorf("unknown output %q: give table, yaml or json", text)
}

// addOutputFlag adds -o to a command.
func addOutputFlag(cmd *cobra.Command) *output {
	o := output("table")
	cmd.Flags().VarP(&o, "output", "o", "output format")
	return &o
}

// print prints value, or what table writes if the output is a table. The columns of a table are separated by tabs.
func (o output) print(w io.Writer, value any, table func(io.Writer)) error {
	var text []byte
	var err error
	switch o {
	case "yaml":
		text, err = yaml.Marshal(value)
	case "json":
		text, err = json.MarshalIndent(value, "", "  ")
		text = append(text, '\n')
	default:
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
