package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/migwish"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
)

func newMIGApplyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Have a running daemon divide the GPUs by a MIG layout",
		Long: "apply prints what a layout makes of the GPUs, has the daemon make it, and waits until that is done. The daemon changes a GPU\n" +
			"when nobody uses it, and goes on after the command has ended. A layout that is not possible on some GPU changes nothing, and\n" +
			"the exit status is 1.\n\n" +
			"Layouts are those of the daemon's file (mig.configFile), and the built-in ones without a file: all-disabled, all-enabled,\n" +
			"all-balanced, and all-PROFILE such as all-1g.10gb. The layout counts until the daemon's configuration file or the label\n" +
			"nvidia.com/mig.config of the node names another one, or until mig apply --forget. The daemon needs mig.enabled.",
		Example: "  gpu-device-plugin mig apply --layout all-balanced --dry-run\n" +
			"  gpu-device-plugin mig apply --layout all-1g.10gb --gpu 6,7 --wait 5m",
		Args: noArguments,
	}
	socket := addControlFlag(cmd.Flags())
	var a applyArguments
	cmd.Flags().StringVar(&a.Layout, "layout", "", "name of the layout")
	cmd.Flags().StringSliceVar(&a.GPUs, "gpu", nil, "GPUs to change, by index or UUID, the others stay as they are; default: all")
	cmd.Flags().BoolVar(&a.DryRun, "dry-run", false, "print what the layout makes of the GPUs, and change nothing")
	cmd.Flags().BoolVar(&a.Forget, "forget", false, "forget an earlier apply: the label or the configuration file counts again")
	wait := cmd.Flags().Duration("wait", time.Minute, "how long to wait until the layout is made; 0: do not wait")
	o := addOutputFlagFor(cmd, outputText)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if a.Forget == (a.Layout != "") || a.Forget && (a.DryRun || a.GPUs != nil) {
			return errors.New("give either --layout, or --forget alone")
		}
		if cmd.Flags().Changed("gpu") && len(a.GPUs) == 0 {
			return errors.New("--gpu names no GPU: give an index or a UUID, or leave it out for all GPUs")
		}
		var ordered orderedMIG
		if err := control.Call(cmd.Context(), *socket, callMIGApply, a, &ordered); err != nil {
			return err
		}
		if p := ordered.Plan; p != nil {
			if err := o.print(cmd.OutOrStdout(), p, p.text); err != nil {
				return err
			}
			if !p.Possible || a.DryRun {
				return p.err()
			}
		}
		if *wait <= 0 {
			return nil
		}
		out := cmd.OutOrStdout()
		if o.format != outputText {
			out = cmd.ErrOrStderr() // the plan is read by a program
		}
		return awaitMIG(cmd.Context(), out, *socket, ordered.Again, *wait)
	}
	return cmd
}

const (
	// migPoll is how often a command asks how far the daemon is.
	migPoll = 200 * time.Millisecond
	// migQuiet is how long a command says nothing of a layout that is being made: most are made by then.
	migQuiet = time.Second
)

// awaitMIG prints how far the daemon is with an order until the layout is made, cannot be made, or the time is over.
func awaitMIG(ctx context.Context, w io.Writer, socket string, again uint64, most time.Duration) error {
	began, over := time.Now(), time.After(most)
	var last string
	for {
		var s migStatus
		if err := control.Call(ctx, socket, callMIGStatus, nil, &s); err != nil {
			return err
		}
		if s.Again >= again {
			quiet := s.State == string(mig.StatePending) && time.Since(began) < min(migQuiet, most/2)
			if line := s.line(); line != last && !quiet {
				fmt.Fprint(w, "\n"+wrap(line, textWidth, "", "  "))
				last = line
			}
			switch mig.ConfigState(s.State) {
			case mig.StateSuccess, mig.StateNone:
				return nil
			case mig.StateFailed:
				return fmt.Errorf("layout %s is not made: mig status says how each GPU is", s.Layout)
			default: // it goes on
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over:
			return fmt.Errorf("the layout is not made within %v; the daemon goes on, and mig status says how far it is", most)
		case <-time.After(migPoll):
		}
	}
}

// applyArguments are those of callMIGApply.
type applyArguments struct {
	Layout string   `json:"layout,omitempty"`
	GPUs   []string `json:"gpus,omitempty"`
	DryRun bool     `json:"dryRun,omitempty"`
	Forget bool     `json:"forget,omitempty"`
}

// An orderedMIG is the answer to callMIGApply.
type orderedMIG struct {
	// Plan is what the layout makes of the GPUs; nil where an earlier one is forgotten.
	Plan *migPlan `json:"plan,omitempty"`
	// Again is the number of the order; 0 if nothing was ordered.
	Again uint64 `json:"again,omitempty"`
}

// migOff returns why the daemon does not change layouts; nil if it does.
func (d *daemon) migOff() error {
	if enabled := d.watcher.Configs().Value().MIG.Enabled; d.wishes == nil && enabled {
		return errors.New("this daemon does not change MIG layouts yet: mig.enabled was not set when it was started; start it again")
	} else if !enabled {
		return migwish.ErrOff
	}
	return nil
}

func (d *daemon) applyMIG(ctx context.Context, a applyArguments) (any, error) {
	if err := d.migOff(); err != nil {
		return nil, err
	}
	var ordered orderedMIG
	var gpus []string // by UUID: the order is not about another GPU that gets the index later
	if !a.Forget {
		p, err := d.planMIG(ctx, a)
		if err != nil {
			return nil, err
		}
		if ordered.Plan = &p; a.DryRun || !p.Possible {
			return ordered, nil
		}
		for _, g := range p.GPUs {
			if len(a.GPUs) > 0 {
				gpus = append(gpus, g.UUID)
			}
		}
	}
	chosen, err := d.wishes.Apply(ctx, a.Layout, gpus)
	if err != nil {
		return nil, err
	}
	ordered.Again = chosen.Wish.Again
	return ordered, nil
}

// planMIG returns what a layout makes of the GPUs that arguments name.
func (d *daemon) planMIG(ctx context.Context, a applyArguments) (migPlan, error) {
	file, err := d.wishes.Layouts()
	if err != nil {
		return migPlan{}, err
	}
	n := partitioned{architectures: map[string]string{}}
	n.read(ctx, d.monitor.Snapshots().Value(), asked{d.monitor})
	l, err := layout.Find(a.Layout, file, n.gpus)
	if err != nil {
		return migPlan{}, err
	}
	changes := layout.Plan(l, n.gpus)
	if len(a.GPUs) > 0 {
		if changes.GPUs, err = selectGPUs(changes.GPUs, a.GPUs); err != nil {
			return migPlan{}, fmt.Errorf("--gpu: %w", err)
		}
	}
	return newMIGPlan(changes, n), nil
}

// asked reads partitions by requests to the monitor.
type asked struct{ *monitor.Monitor }

func (a asked) Processes(ctx context.Context, uuid string) ([]inventory.Process, error) {
	found, err := a.Monitor.Processes(ctx, []string{uuid})
	return found[uuid], err
}
