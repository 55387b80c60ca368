// Package cli is the command line: it turns flags into values for other packages, prints
// their results, and handles the process of the daemon. It imports all packages except the
// packages for the API server.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// Execute runs the command in args, with the name of the process, until the command is
// done or ctx ends, and writes the command's output to output. The error is a sentence for
// the user.
func (p Program) Execute(ctx context.Context, process string, args []string, output io.Writer) error {
	root, err := p.commandOf(process)
	if err != nil {
		return err
	}
	root.SetArgs(doubleDashed(args, root))
	safe := &terminal.Writer{To: output}
	root.SetOut(safe)
	return errors.Join(root.ExecuteContext(ctx), safe.Close())
}

// doubleDashed returns args with a second dash before the command's flags with a single dash:
// NVIDIA's programs accept both.
func doubleDashed(args []string, root *cobra.Command) []string {
	args = slices.Clone(args)
	flags := root.Flags()
	if len(args) > 0 && titles[args[0]] != "" {
		if cmd, _, err := root.Find(args[:1]); err == nil {
			flags = cmd.Flags()
		}
	}
	for i, arg := range args {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "-"), "=")
		if len(name) > 1 && strings.HasPrefix(arg, "-") && flags.Lookup(name) != nil {
			args[i] = "-" + arg
		}
	}
	return args
}

func (p Program) newRootCommand() *cobra.Command {
	root := p.newDaemonCommand()
	addLogFlags(root, "v")
	asRoot(root)
	root.AddCommand(
		newVersionCommand(), newPlanCommand(), newTopologyCommand(), newSimulateCommand(), newRecordCommand(),
		newStatusCommand(), newReadyCommand(),
		newAliveCommand(), newCheckContainerCommand(),
		newDoctorCommand(), newDriverCommand(), p.newConfigCommand(), newHealthCommand(), newQuiesceCommand(),
		newResumeCommand(),
		p.newMPSCommand(),
		p.newDiscoveryCommand(), newResetCommand(), newCleanupCommand(),
		newMIGCommand(), newSetMIGModeCommand(), newClaimCommand(), newValidateCommand(), newProveCommand(),
		newSimulatedSMICommand(),
	)
	if p.Cluster != nil {
		root.AddCommand(p.Cluster.Commands()...)
	}
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	refuseUnknown(root)
	nameExamples(root, p.Name)
	return root
}

// refuseUnknown makes the command, and all below it, fail for a mistyped subcommand. Cobra prints
// the help of a command group for any arguments, with exit status 0.
func refuseUnknown(cmd *cobra.Command) {
	switch {
	case cmd.Name() == "help":
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			found, unknown, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			return noArguments(found, unknown)
		}
	case cmd.HasSubCommands():
		cmd.Args, cmd.SuggestionsMinimumDistance = noArguments, 2
		if !cmd.Runnable() {
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	for _, c := range cmd.Commands() {
		refuseUnknown(c)
	}
}

// newDaemonCommand returns the command of the daemon.
func (p Program) newDaemonCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: p.Name, Short: p.Short, Long: p.Long,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cmd.ResetCommands() // their flags would take memory as long as the daemon runs
			return untilItEnds(cmd.Context(), func(ctx context.Context, own *ownProcess) error {
				return p.runDaemon(ctx, cmd.Flags(), own)
			}, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
		},
	}
	config.AddFlags(cmd.Flags())
	return cmd
}

// asRoot makes a command return its errors like Execute.
func asRoot(cmd *cobra.Command) {
	showFurtherFlags(cmd)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if mistyped := noArguments(cmd, cmd.Flags().Args()); mistyped != nil && cmd.HasSubCommands() {
			return mistyped // the flag may belong to the intended command
		}
		return fmt.Errorf("%w; %s --help lists the flags", err, cmd.CommandPath())
	})
}

// nameExamples puts the program's name into the examples of a command and its subcommands.
func nameExamples(cmd *cobra.Command, name string) {
	cmd.Example = exampleName.ReplaceAllString(cmd.Example, "${1}"+name+" ")
	for _, c := range cmd.Commands() {
		nameExamples(c, name)
	}
}

var exampleName = regexp.MustCompile(`(^|\s)gpu-device-plugin `)

// addLogFlags adds klog's level to all commands, under the name in Kubernetes' components, and
// under a letter; none if the letter is empty.
func addLogFlags(root *cobra.Command, letter string) {
	var all flag.FlagSet
	klog.InitFlags(&all)
	level := all.Lookup("v")
	f := root.PersistentFlags().VarPF(goValue{level.Value}, "v", letter,
		"log level: 0 changes and problems, 2 decisions, 4 details, 6 debugging")
	f.DefValue = "0" // what klog gives is the present level
}

// goValue adapts a flag of package flag to cobra.
type goValue struct{ flag.Value }

func (goValue) Type() string { return "level" }

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	problem := fmt.Sprintf("unknown command %q", args[0])
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		problem += `, did you mean "` + strings.Join(near, `" or "`) + `"?`
	}
	return errors.New(problem + "; " + cmd.CommandPath() + " --help lists the commands")
}

// needs returns the check of a command's arguments: from one to most of the named kind.
func needs(what string, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 && len(args) <= most {
			return nil
		}
		path := cmd.CommandPath()
		name := strings.TrimPrefix(path, cmd.Root().CommandPath()+" ")
		more := ""
		if len(args) > most {
			more = " and no more arguments"
		}
		return fmt.Errorf("%s needs %s%s: %s%s", name, what, more, path, strings.TrimPrefix(cmd.Use, cmd.Name()))
	}
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version.String())
			return err
		},
	}
}
