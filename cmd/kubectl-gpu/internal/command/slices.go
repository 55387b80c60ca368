package command

import (
	"fmt"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/machines"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// simulatedAnnotation marks slices that no node publishes.
const simulatedAnnotation = view.Domain + "/simulated"

func (p *plugin) newSlices() *cobra.Command {
	var profile, template string
	cmd := &cobra.Command{
		Use:   "slices --profile MACHINE",
		Short: "Print the ResourceSlices of a machine type",
		Long: "slices prints the ResourceSlices that gpu-node-agent publishes on a machine type, for planning. The\n" +
			"slices come from a simulated machine, and an annotation says so. The command does not need a\n" +
			"cluster.\n\n" +
			"With --template karpenter the output is a NodeOverlay with spec.resourceSlices, as in Karpenter's\n" +
			"design, without values of a single machine such as UUIDs and PCI addresses. Add the requirements\n" +
			"that select your instance type.",
		Example: "  kubectl gpu slices --profile dgx-h100\n  kubectl gpu slices --profile dgx-h100 --template " +
			"karpenter",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			slices, err := machines.Slices(profile)
			if err != nil {
				return fmt.Errorf("--profile: %w", err)
			}
			mark := map[string]string{simulatedAnnotation: profile}
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
					"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay",
					"metadata": map[string]any{"name": profile, "annotations": mark},
					"spec":     map[string]any{"requirements": []any{}, "resourceSlices": machines.Template(slices)},
				}}
			default:
				return fmt.Errorf("--template %s: the only template is karpenter", template)
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
	cmd.Flags().StringVar(&profile, "profile", "", "machine type, for example dgx-h100")
	cmd.Flags().StringVar(&template, "template", "", "output format for another program: karpenter")
	_ = cmd.MarkFlagRequired("profile") // the flags were added above
	_ = cmd.RegisterFlagCompletionFunc("profile", cobra.FixedCompletions(machines.Names(),
		cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("template", cobra.FixedCompletions([]string{"karpenter"},
		cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
