package command

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

func (p *plugin) newRepair() *cobra.Command {
	cmd := &cobra.Command{
		Use: "repair", Short: "Show the repairs of GPUs by the daemon", Args: cobra.NoArgs,
		Long: "repair shows the GPUs of the cluster that need a reset, what the daemon (health.repair)\n" +
			"waits for, and the resets of the last 24 hours with the states before and after. Nodes report\n" +
			"in Leases in the daemon's namespace, or in the one of --namespace.",
		Example: "  kubectl gpu repair\n  kubectl gpu repair -n gpu -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.validate(); err != nil {
				return err
			}
			client, namespace, err := p.slots(cmd)
			if err != nil {
				return err
			}
			r, err := client.Repairs(cmd.Context(), namespace)
			if err != nil {
				return err
			}
			if r.Stopped {
				if err := printLine(cmd.ErrOrStderr(),
					"Stopped: "+r.Reason+". Look for a common cause, and continue with "+
						"kubectl gpu repair resume."); err != nil {
					return err
				}
			}
			return p.print(cmd.OutOrStdout(), r, func(w io.Writer) {
				fmt.Fprintln(w, "NODE\tGPU\tSTATE\tSINCE\tREASON")
				for _, s := range r.Repairs {
					fmt.Fprintln(w,
						strings.Join([]string{s.Node, dash(s.GPU), s.State, age(s.Since), dash(s.Reason)}, "\t"))
				}
			})
		},
	}
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "output format: table, wide, json or yaml")
	cmd.AddCommand(p.newRepairResume())
	return cmd
}

func (p *plugin) newRepairResume() *cobra.Command {
	return &cobra.Command{
		Use: "resume", Short: "Let nodes repair GPUs again, after too many asked for a repair", Args: cobra.NoArgs,
		Example: "  kubectl gpu repair resume",
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, namespace, err := p.slots(cmd)
			if err != nil {
				return err
			}
			resumed, err := client.ResumeRepairs(cmd.Context(), namespace, now())
			if err != nil {
				return err
			}
			if !resumed {
				return printLine(cmd.OutOrStdout(), "Repairs are not stopped.")
			}
			return printLine(cmd.OutOrStdout(), "Nodes repair GPUs again within a minute.")
		},
	}
}
