package command

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

func (p *plugin) newStatus() *cobra.Command {
	return p.forward("status", "Show the status of a node's daemon",
		"  kubectl gpu status node-1\n  kubectl gpu status node-1 -- -o wide", false)
}

func (p *plugin) newDoctor() *cobra.Command {
	return p.forward("doctor", "Show the problems of a node, and the commands that solve them",
		"  kubectl gpu doctor node-1", false)
}

func (p *plugin) newValidate() *cobra.Command {
	cmd := p.forward("validate", "Check that CUDA works on the unused GPUs of a node",
		"  kubectl gpu validate node-1\n  kubectl gpu validate node-1 --gpu 3", false)
	cmd.Flags().String("gpu", "", "comma-separated indexes or UUIDs of the GPUs and MIG devices to check (default: "+
		"all)")
	return cmd
}

func (p *plugin) newQuiesce() *cobra.Command {
	return p.forward("quiesce", "Release the driver of a node, so that GPUs can be reset or the driver replaced",
		"  kubectl gpu quiesce node-1", true)
}

func (p *plugin) newResume() *cobra.Command {
	return p.forward("resume", "Let a node's daemon use the driver again after quiesce",
		"  kubectl gpu resume node-1", true)
}

func (p *plugin) newReset() *cobra.Command {
	var gpus []string
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "reset NODE --gpu GPU", Short: "Reset GPUs of a node",
		Example: "  kubectl gpu reset node-1 --gpu 3\n  kubectl gpu reset node-1 --gpu 2,3 --wait 30m",
		Long: "reset runs gpu-device-plugin reset in the daemon's pod on the node NODE: the daemon stops offering\n" +
			"the GPUs to new pods, releases the driver, and resets the GPUs together with nvidia-smi --gpu-reset.\n" +
			"If pods or processes use the GPUs, it names them and resets nothing, unless --wait is set. The\n" +
			"daemon keeps waiting if this command is interrupted, until --wait is over.",
		Args: needs("a node", 1), ValidArgsFunction: p.completeNodes(1),
		RunE: func(cmd *cobra.Command, arguments []string) error {
			words := []string{"reset", "--gpu=" + strings.Join(gpus, ",")}
			if wait != 0 {
				words = append(words, "--wait="+wait.String())
			}
			return p.runInPods(cmd, arguments[0], false, words)
		},
	}
	cmd.Flags().StringSliceVar(&gpus, "gpu", nil, "index or UUID of a GPU; may be repeated")
	cmd.Flags().DurationVar(&wait, "wait", 0, "how long to wait for pods and processes that use the GPUs (0: do not "+
		"wait)")
	if err := cmd.MarkFlagRequired("gpu"); err != nil {
		panic(err) // the flag was declared above
	}
	return cmd
}

func (p *plugin) newHealth() *cobra.Command {
	health := &cobra.Command{Use: "health", Short: "Clear faults of GPUs of a node"}
	var gpu string
	clearing := &cobra.Command{
		Use: "clear NODE --gpu GPU", Short: "Clear the faults of a GPU or MIG device of a node",
		Example: "  kubectl gpu health clear node-1 --gpu 3",
		Long: "clear runs gpu-device-plugin health clear in the daemon's pod on the node NODE. It removes the " +
			"recorded\n" +
			"faults of a GPU or MIG device, including those that only an operator can remove. Run it after the\n" +
			"repair: the daemon checks the device at once, and finds a fault again that still exists. During a\n" +
			"rolling update a node can have two such pods; the command then runs in both, because both have a\n" +
			"record of the faults.",
		Args: needs("a node", 1), ValidArgsFunction: p.completeNodes(1),
		RunE: func(cmd *cobra.Command, arguments []string) error {
			return p.runInPods(cmd, arguments[0], true, []string{"health", "clear", "--gpu=" + gpu})
		},
	}
	clearing.Flags().StringVar(&gpu, "gpu", "", "index or UUID of the GPU or MIG device")
	if err := clearing.MarkFlagRequired("gpu"); err != nil {
		panic(err) // the flag was declared above
	}
	health.AddCommand(clearing)
	return health
}

// forward returns a command that runs the daemon's command of the same name in the
// daemon's pod on a node. During a rolling update a node has two such pods. The command
// runs in the leader's pod; with each, the command runs in both pods, because both have
// the driver open.
func (p *plugin) forward(name, short, example string, each bool) *cobra.Command {
	where := "During a rolling update a node can have two such pods; the\ncommand then runs in the pod of the leader."
	if each {
		where = "During a rolling update a node can have two such pods; the\n" +
			"command then runs in both, first in the pod of the leader, because both have the driver open."
	}
	return &cobra.Command{
		Use: name + " NODE [-- ARGUMENTS]", Short: short, Example: example,
		Long: fmt.Sprintf("%s runs gpu-device-plugin %s in the daemon's pod on the node NODE. %s\n\n"+
			"Arguments after -- are passed to the daemon's command. The exit status is the status of that\n"+
			"command.", name, name, where),
		Args: needs("a node", math.MaxInt), ValidArgsFunction: p.completeNodes(1),
		RunE: func(cmd *cobra.Command, arguments []string) error {
			if at := cmd.ArgsLenAtDash(); at > 1 || at < 0 && len(arguments) > 1 {
				return fmt.Errorf("name one node, and put arguments for %s after --", name)
			} else if at == 0 {
				return errors.New("name a node before --")
			}
			command := []string{name}
			if gpu := cmd.Flags().Lookup("gpu"); gpu != nil && gpu.Changed {
				command = append(command, "--gpu="+gpu.Value.String())
			}
			return p.runInPods(cmd, arguments[0], each, append(command, arguments[1:]...))
		},
	}
}

// runInPods runs a command in the daemon's pod on a node; with each, in all of the node's daemon
// pods.
func (p *plugin) runInPods(cmd *cobra.Command, node string, each bool, words []string) error {
	client, err := p.client()
	if err != nil {
		return err
	}
	pods, err := client.DaemonsOf(cmd.Context(), node)
	if err != nil {
		return err
	}
	if !each {
		pods = pods[:1]
	}
	var failed error
	for _, pod := range pods {
		out, problems := &terminal.Writer{To: cmd.OutOrStdout()}, &terminal.Writer{To: cmd.ErrOrStderr()}
		err := client.Run(cmd.Context(), pod, out, problems, words...)
		if cmd.Context().Err() == nil { // otherwise the command may still write to them
			err = errors.Join(err, out.Close(), problems.Close())
		}
		if err != nil && len(pods) > 1 {
			// the exit status says so too
			_ = printLine(cmd.ErrOrStderr(), fmt.Sprintf("in pod %s/%s: %v", pod.Namespace, pod.Name, err))
		}
		failed = errors.Join(failed, err)
	}
	return failed
}
