package cli

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// The daemon's flags that commands also read.
var (
	// nodeFlags select the node.
	nodeFlags = []string{"config-file", "node-config-dir", "control-socket", "driver-root-ctr-path",
		"library-search-path", "simulate"}
	// judgedFlags affect whether a file is valid.
	judgedFlags = []string{"mig-strategy", "compatibility", "mps-root", "mig-enabled", "mig-layout", "mig-config-file",
		"dra-mode", "state-dir"}

	planFlags = slices.Concat(nodeFlags, judgedFlags, []string{
		"driver-root", "dev-root", "device-list-strategy", "device-id-strategy", "pass-device-specs",
		"void-visible-devices",
		"cdi-annotation-prefix",
		"gdrcopy-enabled", "gds-enabled", "mofed-enabled", "imex-channel-ids", "imex-required", "cdi-dir",
		"dra-dynamic-mig",
		"dra-switch-mig", "dra-shares", "dra-share-by", "node-name",
	})
	replayFlags = append([]string{"config-file"}, judgedFlags...)
	doctorFlags = slices.Concat(nodeFlags, judgedFlags, []string{
		"driver-root", "dev-root", "device-list-strategy", "pass-device-specs", "cdi-dir", "kubelet-root",
		"kubelet-socket",
		"pod-resources-socket",
	})
	mpsFlags = slices.Concat(judgedFlags, []string{
		"config-file", "driver-root-ctr-path", "simulate", "mps-root-ctr-path", "logging-format", "kubeconfig",
		"node-name",
		"node-config-dir",
		"node-config-label", "node-config-default", "node-config-fallbacks",
	})
)

// showFurtherFlags makes the help of a command and its subcommands show the common flags
// first.
func showFurtherFlags(root *cobra.Command) {
	usual := root.UsageFunc()
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		further := pflag.NewFlagSet("", pflag.ContinueOnError)
		ignores := false
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			ignores = ignores || f.Annotations[config.NoEffect] != nil
			if f.Annotations[config.Further] != nil && !f.Hidden {
				further.AddFlag(f)
				f.Hidden = true
			}
		})
		err := usual(cmd)
		further.VisitAll(func(f *pflag.Flag) { f.Hidden = false })
		if err == nil && further.HasFlags() {
			_, err = fmt.Fprintf(cmd.OutOrStderr(), "\nFurther flags:\n%s", further.FlagUsages())
		}
		if err == nil && ignores {
			_, err = fmt.Fprintln(cmd.OutOrStderr(), "\nOther flags of the daemon are accepted and have no effect.")
		}
		return err
	})
}
