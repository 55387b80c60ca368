package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// The daemon's flags that commands also read.
var (
	// nodeFlags select the node.
	nodeFlags = []string{"config-file", "node-config-dir", "control-socket", "driver-root-ctr-path",
		"library-search-path", "simulate"}
	// judgedFlags affect whether a file is valid.
	judgedFlags = []string{"mig-strategy", "compatibility", "mps-root", "mig-enabled", "mig-layout", "mig-config-file",
		"dra-mode", "state-dir"}

	planFlags = slices.Concat(nodeFlags, judgedFlags, []string{
		"driver-root", "dev-root", "device-list-strategy", "device-id-strategy", "pass-device-specs",
		"void-visible-devices",
		"cdi-annotation-prefix",
		"gdrcopy-enabled", "gds-enabled", "mofed-enabled", "imex-channel-ids", "imex-required", "cdi-dir",
		"dra-dynamic-mig",
		"dra-switch-mig", "dra-shares", "dra-share-by", "node-name",
	})
	replayFlags = append([]string{"config-file"}, judgedFlags...)
	doctorFlags = slices.Concat(nodeFlags, judgedFlags, []string{
		"driver-root", "dev-root", "device-list-strategy", "pass-device-specs", "cdi-dir", "kubelet-root",
		"kubelet-socket",
		"pod-resources-socket",
	})
	mpsFlags = slices.Concat(judgedFlags, []string{
		"config-file", "driver-root-ctr-path", "simulate", "mps-root-ctr-path", "logging-format", "kubeconfig",
		"node-name",
		"node-config-dir",
		"node-config-label", "node-config-default", "node-config-fallbacks",
	})
)

// showFurtherFlags makes the help of a command and its subcommands show the common flags
// first. The descriptions of flags fit the terminal; without a terminal each is one line.
func showFurtherFlags(root *cobra.Command) {
	usual, help := root.UsageFunc(), root.HelpFunc()
	var columns int // of the terminal; 0 for none
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		columns = terminal.Columns(cmd.OutOrStdout()) // the usage is written to a buffer
		help(cmd, args)
	})
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		further := pflag.NewFlagSet("", pflag.ContinueOnError)
		ignores := false
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			ignores = ignores || f.Annotations[config.NoEffect] != nil
			if f.Annotations[config.Further] != nil && !f.Hidden {
				further.AddFlag(f)
				f.Hidden = true
			}
		})
		out := cmd.OutOrStderr()
		var text strings.Builder
		cmd.SetOut(&text)
		err := usual(cmd)
		cmd.SetOut(out)
		further.VisitAll(func(f *pflag.Flag) { f.Hidden = false })
		if further.HasFlags() {
			fmt.Fprintf(&text, "\nFurther flags:\n%s", further.FlagUsages())
		}
		if ignores {
			fmt.Fprintln(&text, "\nOther flags of the daemon are accepted and have no effect.")
		}
		if err == nil {
			_, err = io.WriteString(out, foldFlags(text.String(), columns))
		}
		return err
	})
}

// foldFlags returns a usage in which each flag with a line of more than the given columns has its
// description below its name. With 0 columns the usage is unchanged. pflag's own wrapping is no
// help: it does not break a description after a word that is wider than the space beside the names.
func foldFlags(usage string, columns int) string {
	var b strings.Builder
	for line := range strings.Lines(usage) {
		flag := strings.TrimLeft(line, " ")
		name, description, _ := strings.Cut(flag, "   ")
		if columns == 0 || !strings.HasPrefix(flag, "-") || utf8.RuneCountInString(line) <= columns+1 {
			b.WriteString(line) // which ends with a newline
			continue
		}
		indent := line[:len(line)-len(flag)]
		b.WriteString(indent + name + "\n" + terminal.Fold(description, columns, "          ") + "\n")
	}
	return b.String()
}
