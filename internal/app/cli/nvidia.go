package cli

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
)

// The names of NVIDIA's programs.
const (
	nvidiaDevicePlugin  = "nvidia-device-plugin"
	nvidiaMPS           = "mps-control-daemon"
	nvidiaDiscovery     = "gpu-feature-discovery"
	nvidiaConfigManager = "config-manager"
)

// titles are the titles of NVIDIA's programs, by name.
var titles = map[string]string{
	nvidiaDevicePlugin: "NVIDIA Device Plugin", nvidiaMPS: "NVIDIA MPS Control Daemon",
	nvidiaDiscovery:     "GPU Feature Discovery",
	nvidiaConfigManager: nvidiaConfigManager,
}

// commandOf returns the command for a process with this argv[0]: this program, or one of
// NVIDIA's programs if argv[0] is its name.
func (p Program) commandOf(process string) (*cobra.Command, error) {
	name := filepath.Base(process)
	title, known := titles[name]
	if !known {
		return p.newRootCommand(), nil
	}
	p.nvidia = true
	var cmd *cobra.Command
	switch name {
	case nvidiaDevicePlugin:
		cmd = p.newDaemonCommand()
	case nvidiaMPS:
		cmd = p.newMPSCommand()
	case nvidiaDiscovery:
		cmd = p.newDiscoveryCommand()
	case nvidiaConfigManager:
		if p.Cluster == nil {
			return nil, fmt.Errorf("%s does not talk to the API server: start gpu-node-agent under the name %s",
				p.Name, name)
		}
		commands := p.Cluster.Commands()
		cmd = commands[slices.IndexFunc(commands, func(c *cobra.Command) bool { return c.Name() == name })]
	}
	addLogFlags(cmd, "") // -v is the version
	cmd.Use = name
	asRoot(cmd)
	cmd.InitDefaultHelpFlag()
	showVersion(cmd, title)
	cmd.CompletionOptions.DisableDefaultCmd = true
	for _, c := range append(cmd.Commands(), cmd) {
		ignoreArguments(c)
	}
	return cmd, nil
}

// showVersion adds the flag --version to a command. Cobra's own template would link
// text/template, and 4 MB of unused methods.
func showVersion(cmd *cobra.Command, title string) {
	show := cmd.Flags().BoolP("version", "v", false, "version for "+cmd.Name())
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if *show {
			fmt.Fprintf(cmd.OutOrStdout(), "%s version %s\n", title, version.String())
			return nil
		}
		return run(cmd, args)
	}
}

// ignoreArguments makes a command accept arguments, and no flags after the first of them, like
// NVIDIA's programs. The command must warn of them.
func ignoreArguments(cmd *cobra.Command) {
	cmd.Flags().SetInterspersed(false)
	cmd.Args = cobra.ArbitraryArgs
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 && (args[0] == "help" || args[0] == "h") {
			return cmd.Help()
		}
		return run(cmd, args)
	}
}
