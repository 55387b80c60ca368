package command

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/why"
)

func (p *plugin) newWhy() *cobra.Command {
	return &cobra.Command{
		Use:   "why POD",
		Short: "Explain why a pod has no GPU or lost it, and what to do",
		Long: "why prints on one line why a pod is Pending, was not admitted, does not start or lost its GPU, and\n" +
			"what to do. For a running pod it prints the GPUs of its containers, as the kubelet reports them to\n" +
			"the node's daemon.\n\n" +
			"For claims, and for resources named by a DeviceClass, why runs the scheduler's own allocator on the\n" +
			"present ResourceSlices, and then checks each selector, taint and constraint alone.\n\n" +
			"With the name of a ReplicaSet or Job without pods it prints why there are none, for example a quota.",
		Example: "  kubectl gpu why my-pod -n my-namespace",
		Args:    needs("a pod", 1),
		RunE: func(cmd *cobra.Command, names []string) error {
			client, err := p.client()
			if err != nil {
				return err
			}
			namespace, _, err := p.flags.ToRawKubeConfigLoader().Namespace()
			if err != nil {
				return err
			}
			objects, missing, err := client.Why(cmd.Context(), namespace, names[0])
			if err != nil {
				return err
			}
			for _, sentence := range missing {
				_ = printLine(cmd.ErrOrStderr(), sentence) // the exit status says so too
			}
			if err := printLine(cmd.OutOrStdout(), why.Explain(cmd.Context(), objects)); err != nil {
				return err
			}
			if len(missing) > 0 {
				return errors.New("the explanation may be wrong: not everything could be read")
			}
			return nil
		},
	}
}
