package command

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

func (p *plugin) newStatus() *cobra.Command {
	return p.forward("status", "Show what the daemon of a node knows",
		"  kubectl gpu status node-1\n  kubectl gpu status node-1 -- -o wide", false)
}

func (p *plugin) newDoctor() *cobra.Command {
	return p.forward("doctor", "Show what is wrong with a node, and the commands that cure it",
		"  kubectl gpu doctor node-1", false)
}

func (p *plugin) newValidate() *cobra.Command {
	cmd := p.forward("validate", "Prove that CUDA works on the GPUs of a node that no process uses",
		"  kubectl gpu validate node-1\n  kubectl gpu validate node-1 --gpu 3", false)
	cmd.Flags().String("gpu", "", "GPUs and MIG devices to try, by index or UUID, separated by commas; default: all")
	return cmd
}

func (p *plugin) newQuiesce() *cobra.Command {
	return p.forward("quiesce", "Release the driver of a node, so that GPUs can be reset or the driver replaced",
		"  kubectl gpu quiesce node-1", true)
}

func (p *plugin) newResume() *cobra.Command {
	return p.forward("resume", "Have the daemon of a node use the driver again after quiesce",
		"  kubectl gpu resume node-1", true)
}

func (p *plugin) newReset() *cobra.Command {
	var gpus []string
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "reset NODE --gpu GPU", Short: "Reset GPUs of a node",
		Example: "  kubectl gpu reset node-1 --gpu 3\n  kubectl gpu reset node-1 --gpu 2,3 --wait 30m",
		Long: "reset runs gpu-device-plugin reset in the daemon's pod on the node NODE: the GPUs are withdrawn from new pods, the driver is\n" +
			"released, and nvidia-smi --gpu-reset resets them together. Pods and processes that use them are named, and nothing is reset,\n" +
			"unless --wait is given. The wait may outlive this command: it ends after --wait.",
		Args: cobra.ExactArgs(1), ValidArgsFunction: p.completeNodes(1),
		RunE: func(cmd *cobra.Command, arguments []string) error {
			words := []string{"reset", "--gpu=" + strings.Join(gpus, ",")}
			if wait != 0 {
				words = append(words, "--wait="+wait.String())
			}
			return p.inPods(cmd, arguments[0], false, words)
		},
	}
	cmd.Flags().StringSliceVar(&gpus, "gpu", nil, "index or UUID of a GPU; may be repeated")
	cmd.Flags().DurationVar(&wait, "wait", 0, "how long to wait for the pods and processes that use the GPUs; 0: not at all")
	if err := cmd.MarkFlagRequired("gpu"); err != nil {
		panic(err) // the flag was declared above
	}
	return cmd
}

// forward returns a command that runs the daemon's command of the same name in the pod of a node.
// During a roll-out a node has two pods of the daemon. Then it is run in the one that leads; with
// each, in all of them, because each of them has the driver open.
func (p *plugin) forward(name, short, example string, each bool) *cobra.Command {
	where := "While two pods of the daemon run on it, as during a roll-out, the one that leads is asked."
	if each {
		where = "While two pods of the daemon run on it, as during a roll-out, both are told, the one that leads first: each of them has the\n" +
			"driver open."
	}
	return &cobra.Command{
		Use: name + " NODE [-- ARGUMENTS]", Short: short, Example: example,
		Long: fmt.Sprintf("%s runs gpu-device-plugin %s in the daemon's pod on the node NODE, and in no other node's. %s\n\n"+
			"Arguments after -- are those of the daemon's command. The exit status is that of the command.", name, name, where),
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: p.completeNodes(1),
		RunE: func(cmd *cobra.Command, arguments []string) error {
			if at := cmd.ArgsLenAtDash(); at > 1 || at < 0 && len(arguments) > 1 {
				return fmt.Errorf("give one node, and arguments for %s after --", name)
			} else if at == 0 {
				return errors.New("give a node before --")
			}
			command := []string{name}
			if gpu := cmd.Flags().Lookup("gpu"); gpu != nil && gpu.Changed {
				command = append(command, "--gpu="+gpu.Value.String())
			}
			return p.inPods(cmd, arguments[0], each, append(command, arguments[1:]...))
		},
	}
}

// inPods runs a command in the pod of the daemon on a node; with each, in all of them.
func (p *plugin) inPods(cmd *cobra.Command, node string, each bool, words []string) error {
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
		if cmd.Context().Err() == nil { // otherwise they may be written to still
			err = errors.Join(err, out.Close(), problems.Close())
		}
		if err != nil && len(pods) > 1 {
			// the exit status says so, too
			_ = say(cmd.ErrOrStderr(), fmt.Sprintf("in pod %s/%s: %v", pod.Namespace, pod.Name, err))
		}
		failed = errors.Join(failed, err)
	}
	return failed
}
