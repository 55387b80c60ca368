package command

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/why"
)

func (p *plugin) newWhy() *cobra.Command {
	return &cobra.Command{
		Use:   "why POD",
		Short: "Say why a pod has no GPU, or lost it, and what to do",
		Long: "why prints in one line why a pod is Pending, was not admitted, does not start or lost its GPU, and what to do; or which\n" +
			"GPUs its containers have, as the daemon of its node hears it from the kubelet.\n\n" +
			"For a claim, and for a resource that a DeviceClass names, the scheduler's own allocator decides on the ResourceSlices as they are\n" +
			"now; then each selector, taint and constraint is looked at by itself.\n" +
			"With the name of a ReplicaSet or Job that has no pods it says why, such as a quota.",
		Example: "  kubectl gpu why my-pod -n my-namespace",
		Args:    cobra.ExactArgs(1),
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
				_ = say(cmd.ErrOrStderr(), sentence) // the exit status says so, too
			}
			if err := say(cmd.OutOrStdout(), why.Explain(cmd.Context(), objects)); err != nil {
				return err
			}
			if len(missing) > 0 {
				return errors.New("the sentence may be wrong: not everything could be read")
			}
			return nil
		},
	}
}
