package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

func newMIGApplyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Have a running daemon divide the GPUs by a MIG layout",
		Long: "apply prints the effect of a layout on the GPUs, has the daemon apply the layout, and waits for\n" +
			"the result. The daemon changes a GPU when the GPU is not in use, and continues after the end of\n" +
			"the command. A layout that is not possible on a GPU changes nothing, and the exit status is 1.\n\n" +
			"Layouts come from the daemon's file (mig.configFile), or are built in: all-disabled, all-enabled,\n" +
			"all-balanced, and all-PROFILE such as all-1g.10gb. The layout is valid until the daemon's\n" +
			"configuration file or the label nvidia.com/mig.config of the node names another layout, or until\n" +
			"mig apply --forget. The daemon needs mig.enabled.",
		Example: "  gpu-device-plugin mig apply --layout all-balanced --dry-run\n" +
			"  gpu-device-plugin mig apply --layout all-1g.10gb --gpu 6,7 --wait 5m",
		Args: noArguments,
	}
	socket := addControlFlag(cmd.Flags())
	var a daemon.ApplyArguments
	cmd.Flags().StringVar(&a.Layout, "layout", "", "name of the layout")
	cmd.Flags().StringSliceVar(&a.GPUs, "gpu", nil,
		"GPUs to change, by index or UUID; other GPUs stay unchanged; default: all")
	cmd.Flags().BoolVar(&a.DryRun, "dry-run", false, "print what the layout makes of the GPUs, and change nothing")
	cmd.Flags().BoolVar(&a.Forget, "forget", false,
		"forget an earlier apply: the label or the configuration file counts again")
	wait := cmd.Flags().Duration("wait", time.Minute, "how long to wait for the layout; 0: do not wait")
	o := addOutputFlagFor(cmd, outputText)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if a.Forget == (a.Layout != "") || a.Forget && (a.DryRun || a.GPUs != nil) {
			return errors.New("give either --layout, or --forget alone")
		}
		if cmd.Flags().Changed("gpu") && len(a.GPUs) == 0 {
			return errors.New("--gpu names no GPU: give an index or a UUID, or leave it out for all GPUs")
		}
		var ordered daemon.OrderedMIG
		if err := control.Call(cmd.Context(), *socket, daemon.CallMIGApply, a, &ordered); err != nil {
			return notStarted(err)
		}
		if p := ordered.Plan; p != nil {
			if err := o.print(cmd.OutOrStdout(), p, func(w io.Writer) { printMIGPlan(w, *p) }); err != nil {
				return err
			}
			if !p.Possible || a.DryRun {
				return p.Err()
			}
		}
		if *wait <= 0 {
			return nil
		}
		out := cmd.OutOrStdout()
		if o.format != outputText {
			out = cmd.ErrOrStderr() // a program reads the plan
		}
		return awaitMIG(cmd.Context(), out, *socket, ordered.Again, *wait)
	}
	return cmd
}

const (
	// migPoll is the interval of questions about the progress of the daemon.
	migPoll = 200 * time.Millisecond
	// migQuiet is the time without output about a pending layout: most layouts are applied within
	// this time.
	migQuiet = time.Second
)

// awaitMIG prints the progress of an order until the layout is applied or fails, or the time is
// over.
func awaitMIG(ctx context.Context, w io.Writer, socket string, again uint64, most time.Duration) error {
	start, over := time.Now(), time.After(most)
	var last string
	for {
		var s daemon.MIGProgress
		if err := control.Call(ctx, socket, daemon.CallMIGStatus, nil, &s); err != nil {
			return cmp.Or(ctx.Err(), err) // the end of ctx says nothing about the daemon
		}
		if s.Again >= again {
			quiet := s.State == string(mig.StatePending) && time.Since(start) < min(migQuiet, most/2)
			if line := migLine(s); line != last && !quiet {
				fmt.Fprint(w, "\n"+terminal.Wrap(line, textWidth(w), "", "  "))
				last = line
			}
			switch mig.ConfigState(s.State) {
			case mig.StateSuccess, mig.StateNone:
				return nil
			case mig.StateFailed:
				return fmt.Errorf("layout %s is not made: mig status says how each GPU is", s.Layout)
			default: // the daemon continues
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over:
			return fmt.Errorf("layout not applied after %v: the daemon keeps trying; check progress with: "+
				"gpu-device-plugin mig status", most)
		case <-time.After(migPoll):
		}
	}
}
