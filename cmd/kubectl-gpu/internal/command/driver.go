package command

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/exec"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

func (p *plugin) newDriver() *cobra.Command {
	cmd := &cobra.Command{Use: "driver", Short: "Prepare and watch changes of the NVIDIA driver", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(p.newPreflight(), p.newDriverStatus())
	return cmd
}

func (p *plugin) newDriverStatus() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status [NODE...]",
		Short: "Show which nodes change their driver, and what they wait for",
		Long: "status prints a row for each node that changes its driver, has changed it or is to change it\n" +
			"(driver.version), the worst nodes first. It asks the daemons of the nodes by pods/exec. Nodes without\n" +
			"driver.version are only counted, unless you name them.\n\n" +
			"The states are failed, blocked, next-boot, waiting, changing, done and off.",
		Example: "  kubectl gpu driver status\n  kubectl gpu driver status node-1 -o json",
		Args:    cobra.ArbitraryArgs, ValidArgsFunction: p.completeNodes(-1),
		RunE: func(cmd *cobra.Command, names []string) error { return p.printDriverChanges(cmd, names) },
	}
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "output format: table, wide, json or yaml")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "wide", "json", "yaml"},
		cobra.ShellCompDirectiveNoFileComp)) // the flag was added above
	return cmd
}

// printDriverChanges prints a row for each node with a change of its driver.
func (p *plugin) printDriverChanges(cmd *cobra.Command, names []string) error {
	client, facts, nodes, err := p.readDaemons(cmd, names)
	if err != nil {
		return err
	}
	answers := p.statuses(cmd, client, nodes.pods)
	all := view.NewDriverChanges(answers)
	totals, several := view.DriverTotals(all), len(answers) > 1
	if len(names) == 0 {
		all = slices.DeleteFunc(all, func(c view.DriverChange) bool { return c.State == view.DriverOff })
	}
	err = p.print(cmd.OutOrStdout(), map[string]any{"nodes": all}, func(w io.Writer) {
		if several {
			fmt.Fprintln(w, totals)
		}
		fmt.Fprintln(w, "NODE\tSTATE\tPROGRESS\tSINCE\tLOADED\tWANTED\tREASON")
		for _, c := range all {
			reason := c.Reason
			if c.Reboot != "" {
				reason = strings.TrimPrefix(reason+"; restart the node", "; ")
			}
			fmt.Fprintln(w, strings.Join([]string{c.Node, string(c.State), dash(c.Bar()), age(c.Since), dash(c.Loaded),
				dash(c.Wanted), dash(reason)}, "\t"))
		}
	})
	if err == nil && (nodes.silent || incomplete(facts, answers) != nil) {
		return errIncomplete
	}
	return err
}

// nodeDaemons are the pods of daemons on nodes. silent is true if a node has none or cannot be read.
type nodeDaemons struct {
	pods   []*corev1.Pod
	silent bool
}

// readDaemons returns the daemons of the named nodes; of all nodes with GPUs without a name.
func (p *plugin) readDaemons(cmd *cobra.Command, names []string) (*cluster.Client, view.Facts, nodeDaemons, error) {
	p.ask = "always"
	client, facts, err := p.read(cmd, names)
	if err != nil {
		return nil, facts, nodeDaemons{}, err
	}
	daemons := facts.Daemons(client.IsDaemon)
	nodes := facts.Rows(daemons, nil, len(names) > 0)
	var n nodeDaemons
	for _, row := range nodes {
		if pod := daemons[row.Name]; pod != nil {
			n.pods = append(n.pods, pod)
		}
	}
	absent := p.explainAbsence(cmd, client, facts, nodes, len(names) == 0)
	n.silent = len(facts.Missing) > 0 || len(absent) > 0
	return client, facts, n, nil
}

func (p *plugin) newPreflight() *cobra.Command {
	var target string
	cmd := &cobra.Command{
		Use:   "preflight [NODE...]",
		Short: "Check whether the driver can be changed, and name everything that uses it",
		Long: "preflight runs gpu-device-plugin driver preflight in the daemon's pods, and prints a row for each " +
			"node:\n" +
			"ready, in use or blocked, and why. For one node it prints the whole report: the users of the driver\n" +
			"with what makes each let go, and the findings. It changes nothing.\n\n" +
			"--to is a version, a branch such as 580, or the path of a folder on the nodes. Without it, preflight\n" +
			"judges the present driver: whether it can be unloaded, and whether each boot can load it again.\n\n" +
			"The exit status is 0 if all nodes are ready, 2 if the worst finding is a warning, 3 if a node is\n" +
			"blocked, and 1 if a node did not answer.",
		Example: "  kubectl gpu driver preflight\n  kubectl gpu driver preflight node-1\n  kubectl gpu driver " +
			"preflight --to 580.95.05 -o json",
		Args: cobra.ArbitraryArgs, ValidArgsFunction: p.completeNodes(-1),
		RunE: func(cmd *cobra.Command, names []string) error {
			if len(names) == 1 && p.format == "table" {
				words := []string{"driver", "preflight"}
				if target != "" {
					words = append(words, "--to="+target)
				}
				return p.runInPods(cmd, names[0], false, words)
			}
			return p.printPreflights(cmd, names, target)
		},
	}
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "output format: table, wide, json or yaml")
	cmd.Flags().StringVar(&target, "to", "", "wanted driver: a version, a branch such as 580, or a folder on the nodes")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "wide", "json", "yaml"},
		cobra.ShellCompDirectiveNoFileComp)) // the flag was added above
	return cmd
}

// printPreflights prints a row for each node.
func (p *plugin) printPreflights(cmd *cobra.Command, names []string, target string) error {
	client, _, nodes, err := p.readDaemons(cmd, names)
	if err != nil {
		return err
	}
	reports := client.Preflights(cmd.Context(), nodes.pods, target)
	view.SortPreflights(reports)
	worst, silent := 0, nodes.silent
	values := []any{}
	for _, r := range reports {
		if r.Err != nil {
			silent = true
			// the exit status says so too
			_ = printLine(cmd.ErrOrStderr(), fmt.Sprintf("node %s: no answer of driver preflight: %v", r.Node, r.Err))
			continue
		}
		worst = max(worst, r.Exit)
		values = append(values, r.Report)
	}
	err = p.print(cmd.OutOrStdout(), map[string]any{"nodes": values}, func(w io.Writer) {
		if len(reports) > 1 {
			fmt.Fprintln(w, view.PreflightTotals(reports))
		}
		fmt.Fprintln(w, "NODE\tVERDICT\tDRIVER\tKERNEL\tNEXT BOOT\tHOLDERS\tNOT CHECKED\tREASON")
		for _, r := range reports {
			verdict, reason := r.Verdict, strings.TrimPrefix(r.Summary, r.Verdict+": ")
			if r.Err != nil {
				verdict, reason = "unknown", r.Err.Error()
			}
			next := dash(r.NextKernel)
			if r.NextKernel != "" && r.NextKernel == r.Kernel {
				next = "same"
			}
			fmt.Fprintln(w, strings.Join([]string{r.Node, verdict, dash(r.Driver), dash(r.Kernel), next,
				fmt.Sprint(r.Holders),
				fmt.Sprint(r.NotChecked), dash(reason)}, "\t"))
		}
	})
	switch {
	case err != nil:
		return err
	case silent:
		return errIncomplete
	case worst > 0:
		return exec.CodeExitError{Code: worst, Err: errors.New("the nodes are not ready")}
	}
	return nil
}
