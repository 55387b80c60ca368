package command

import (
	"fmt"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/machines"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// simulated is the annotation of slices that no node publishes.
const simulated = view.Domain + "/simulated"

func (p *plugin) newSlices() *cobra.Command {
	var profile, template string
	cmd := &cobra.Command{
		Use:   "slices --profile MACHINE",
		Short: "Print the ResourceSlices that a type of machine will have",
		Long: "slices prints the ResourceSlices that gpu-node-agent publishes of a machine, before there is one. They are those of a\n" +
			"simulated machine, and marked so. No cluster is asked.\n\n" +
			"With --template karpenter they are in the form of the spec.resourceSlices that Karpenter's design has for a NodeOverlay, without\n" +
			"what only one machine has, such as UUIDs and PCI addresses. Add the requirements that select your type of instance.",
		Example: "  kubectl gpu slices --profile dgx-h100\n  kubectl gpu slices --profile dgx-h100 --template karpenter",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			slices, err := machines.Slices(profile)
			if err != nil {
				return fmt.Errorf("--profile: %w", err)
			}
			mark := map[string]string{simulated: profile}
			var objects []any
			switch template {
			case "":
				for i := range slices {
					slices[i].TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSlice"}
					slices[i].Annotations = mark
					objects = append(objects, slices[i])
				}
			case "karpenter":
				objects = []any{map[string]any{
					"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay", "metadata": map[string]any{"name": profile,
						"annotations": mark},
					"spec": map[string]any{"requirements": []any{}, "resourceSlices": machines.Template(slices)},
				}}
			default:
				return fmt.Errorf("--template %s: the one template is karpenter", template)
			}
			for _, object := range objects {
				text, err := yaml.Marshal(object)
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "---\n%s", text)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&profile, "profile", "", "the type of machine, such as dgx-h100")
	cmd.Flags().StringVar(&template, "template", "", "another form: karpenter")
	_ = cmd.MarkFlagRequired("profile") // the flags were added above
	_ = cmd.RegisterFlagCompletionFunc("profile", cobra.FixedCompletions(machines.Names(),
		cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("template", cobra.FixedCompletions([]string{"karpenter"},
		cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
