package command

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

func (p *plugin) newRollout() *cobra.Command {
	cmd := &cobra.Command{
		Use: "rollout", Short: "Show and control changes that take a slot of the cluster",
		Long: "rollout shows and controls the slots of the cluster. A node takes a slot to change its driver, to\n" +
			"repair a GPU or, with mig.budget, to change its MIG layout. A slot is a Lease in the daemon's\n" +
			"namespace, or in the one of --namespace.",
	}
	cmd.AddCommand(p.newRolloutStatus(), p.newRolloutPause(), p.newRolloutResume(), p.newRolloutRetry())
	return cmd
}

// slots returns a Client, and the namespace of the slots.
func (p *plugin) slots(cmd *cobra.Command) (*cluster.Client, string, error) {
	client, err := p.client()
	if err != nil {
		return nil, "", err
	}
	namespace, err := client.SlotNamespace(cmd.Context(), *p.flags.Namespace)
	return client, namespace, err
}

func (p *plugin) newRolloutStatus() *cobra.Command {
	cmd := &cobra.Command{
		Use: "status", Short: "Show which nodes change, which failed and which wait", Args: cobra.NoArgs,
		Example: "  kubectl gpu rollout status\n  kubectl gpu rollout status -n gpu -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.validate(); err != nil {
				return err
			}
			client, namespace, err := p.slots(cmd)
			if err != nil {
				return err
			}
			r, err := client.Rollout(cmd.Context(), namespace, now())
			if err != nil {
				return err
			}
			if err := printLine(cmd.ErrOrStderr(), summary(r)); err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), r, func(w io.Writer) {
				fmt.Fprintln(w, "SLOT\tNODE\tSTATE\tSINCE\tCHANGE\tREASON")
				for _, s := range r.Slots {
					fmt.Fprintln(w,
						strings.Join([]string{s.Name, dash(s.Node), string(s.State), age(s.Since), dash(s.Change),
							dash(s.Reason)}, "\t"))
				}
			})
		},
	}
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "output format: table, wide, json or yaml")
	return cmd
}

// summary says in a sentence how the changes go on.
func summary(r view.Rollout) string {
	count := map[view.SlotState]int{}
	for _, s := range r.Slots {
		count[s.State]++
	}
	text := fmt.Sprintf("%d changing, %d failed, %d waiting", count[view.SlotChanging], count[view.SlotFailed],
		len(r.Waiting))
	for _, state := range []view.SlotState{view.SlotSilent, view.SlotGone} {
		if count[state] > 0 {
			text += fmt.Sprintf(", %d %s", count[state], state)
		}
	}
	if len(r.Waiting) > 0 {
		text += ": " + wording.List(r.Waiting)
	}
	if r.Paused {
		reason := ""
		if r.Reason != "" {
			reason = " (" + r.Reason + ")"
		}
		text += ". Paused" + reason + ": continue with kubectl gpu rollout resume"
	}
	return text + "."
}

func (p *plugin) newRolloutPause() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "pause", Short: "Keep all nodes from beginning a change", Args: cobra.NoArgs,
		Long:    "pause keeps all nodes from taking slots. Nodes that have a slot finish their change.",
		Example: "  kubectl gpu rollout pause --reason 'no changes in December'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, namespace, err := p.slots(cmd)
			if err != nil {
				return err
			}
			paused, err := client.PauseRollout(cmd.Context(), namespace, reason)
			if err != nil {
				return err
			}
			if !paused {
				return printLine(cmd.OutOrStdout(), "Changes are paused already.")
			}
			return printLine(cmd.OutOrStdout(), "Changes are paused. Nodes that are changing finish.")
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason shown to others")
	return cmd
}

func (p *plugin) newRolloutResume() *cobra.Command {
	return &cobra.Command{
		Use: "resume", Short: "Let nodes begin changes again", Args: cobra.NoArgs,
		Example: "  kubectl gpu rollout resume",
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, namespace, err := p.slots(cmd)
			if err != nil {
				return err
			}
			resumed, err := client.ResumeRollout(cmd.Context(), namespace)
			if err != nil {
				return err
			}
			if !resumed {
				return printLine(cmd.OutOrStdout(), "Changes are not paused.")
			}
			return printLine(cmd.OutOrStdout(), "Nodes begin changes again within a minute.")
		},
	}
}

func (p *plugin) newRolloutRetry() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "retry NODE", Short: "Free the slot of a node whose change failed, so that it tries again",
		Long: "retry frees the slot of a node whose change failed. Another node may take the slot. The node itself\n" +
			"tries again within five minutes, when it gets a slot. The slot of a node that is changing, or whose\n" +
			"agent is silent, is freed with --force only: the node may still change, and then one node more than\n" +
			"allowed changes.",
		Example: "  kubectl gpu rollout retry node-1",
		Args:    needs("a node", 1), ValidArgsFunction: p.completeNodes(1),
		RunE: func(cmd *cobra.Command, arguments []string) error {
			client, namespace, err := p.slots(cmd)
			if err != nil {
				return err
			}
			r, err := client.Rollout(cmd.Context(), namespace, now())
			if err != nil {
				return err
			}
			i := slices.IndexFunc(r.Slots, func(s view.Slot) bool { return s.Node == arguments[0] })
			if i < 0 {
				return fmt.Errorf("node %s has no slot; kubectl gpu rollout status shows which nodes have one",
					arguments[0])
			}
			switch state := r.Slots[i].State; {
			case force:
			case state == view.SlotChanging:
				return fmt.Errorf("node %s is changing: wait until the change ends, or free the slot with --force; "+
					"then one node more than allowed may change", arguments[0])
			case state == view.SlotSilent:
				return fmt.Errorf("the agent of node %s has not renewed its slot: if the node does not return, free "+
					"the slot with --force; if it still changes, one node more than allowed may change", arguments[0])
			}
			if err := client.FreeSlot(cmd.Context(), namespace, r.Slots[i]); err != nil {
				return err
			}
			return printLine(cmd.OutOrStdout(), fmt.Sprintf("Slot %s is free. Node %s tries again when it gets a slot.",
				r.Slots[i].Name, arguments[0]))
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "also free the slot of a node that is changing or silent")
	return cmd
}
