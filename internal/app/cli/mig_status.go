package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func newMIGStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print how far a running daemon is with the MIG layout",
		Long: "status prints the present layout, its source and its state. For each GPU with multi-instance mode\n" +
			"it prints the present and the wanted division, and what the daemon waits for. The states are none,\n" +
			"pending, rebooting, success and failed.",
		Example: "  gpu-device-plugin mig status -o json",
		Args:    noArguments,
	}
	socket := addControlFlag(cmd.Flags())
	o := addOutputFlagFor(cmd, outputText)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var s daemon.MIGProgress
		if err := control.Call(cmd.Context(), *socket, daemon.CallMIGStatus, nil, &s); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), &s, func(w io.Writer) { printMIGStatus(w, s) })
	}
	return cmd
}

// migLine describes the progress of the daemon in one sentence.
func migLine(s daemon.MIGProgress) string {
	if s.Layout == "" {
		return "No layout is selected. GPUs stay unchanged."
	}
	text := fmt.Sprintf("Layout %s of %s: %s", s.Layout, s.From, s.State)
	if s.Reason != "" {
		text += ": " + s.Reason
	}
	return text
}

// printMIGStatus writes the status for people.
func printMIGStatus(w io.Writer, s daemon.MIGProgress) {
	fmt.Fprint(w, terminal.Wrap(migLine(s), textWidth(w), "", "  "))
	for _, g := range s.GPUs {
		fmt.Fprintln(w)
		printMIGGPU(w, g)
	}
}

// printMIGGPU writes the progress of one GPU.
func printMIGGPU(w io.Writer, g daemon.MIGGPU) {
	fmt.Fprintf(w, "GPU %d  %s  %s\n", g.Index, g.Model, g.UUID)
	line := g.Phase
	if g.Reason != "" {
		line += ": " + g.Reason
	}
	if !g.Retry.IsZero() {
		line += "; tried again at " + status.Stamp(g.Retry)
	}
	fmt.Fprint(w, "  "+terminal.Wrap(line, textWidth(w)-2, "", "    "))
	if g.Before == nil {
		return
	}
	before, after := rowOf(*g.Before), rowOf(*g.After)
	if slices := max(g.Before.MemorySlices, g.After.MemorySlices); strings.Contains(before+after, "|") {
		fmt.Fprintln(w, "  slice    "+ruler(slices))
	}
	if before == after {
		fmt.Fprintln(w, "  now     "+before)
		return
	}
	fmt.Fprintf(w, "  before  %s\n  after   %s\n", before, after)
}
