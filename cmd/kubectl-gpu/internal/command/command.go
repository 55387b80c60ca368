// Package command implements the commands of kubectl gpu: their flags and their output.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/util/exec"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
)

// Run runs a command, and returns the exit status of the process: the status of the daemon's
// command if one was run, otherwise 0 or 1.
func Run(ctx context.Context, arguments []string, in io.Reader, out, problems io.Writer) int {
	root := newRoot() //nolint:contextcheck // completion uses the context of its command
	root.SetArgs(arguments)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(problems)
	err := root.ExecuteContext(ctx)
	var code exec.CodeExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code): // the daemon's command has printed the reason
		return code.Code
	}
	// the exit status says so too
	_, _ = io.WriteString(problems, terminal.Printable(lines(fmt.Sprintln("error:", err)), terminal.Caret))
	return 1
}

// needs returns the check of a command's arguments: from one to most names of the given
// kind.
func needs(what string, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, arguments []string) error {
		if len(arguments) > 0 && len(arguments) <= most {
			return nil
		}
		path, more := cmd.CommandPath(), ""
		if len(arguments) > most {
			more = " and no more arguments"
		}
		return fmt.Errorf("%s needs %s%s: %s%s", cmd.Name(), what, more, path, strings.TrimPrefix(cmd.Use, cmd.Name()))
	}
}

// plugin is the state shared by all commands.
type plugin struct {
	flags   *genericclioptions.ConfigFlags
	options cluster.Options
	format  string
	ask     string
	// unhealthy leaves healthy nodes and GPUs out.
	unhealthy bool
}

func newRoot() *cobra.Command {
	p := &plugin{flags: genericclioptions.NewConfigFlags(true)}
	root := &cobra.Command{
		Use:   "gpu [NODE...]",
		Short: "Show the GPUs of a cluster by node",
		Long: "kubectl gpu prints a row for each node with GPUs: the model, the number of healthy, allocated and\n" +
			"existing devices, the MIG layout, the driver version, the version and age of the daemon, and the\n" +
			"source and age of this data. Devices are GPUs, MIG devices, shares and units. The first line has the\n" +
			"totals, and the worst nodes come first.\n\n" +
			"The data comes from Nodes, Pods, ResourceSlices, ResourceClaims and the daemon's DaemonSet. If the\n" +
			"model, the driver version or the reason of unhealthy devices is missing there, kubectl gpu asks the\n" +
			"node's daemon by pods/exec. If no daemon runs on a node, the reason is printed on standard error.\n\n" +
			"Objects that you may not read and daemons that do not respond are reported on standard error.\n" +
			"Everything else is printed, and the exit status is 1.",
		Example: "  kubectl gpu\n  kubectl gpu --unhealthy\n  kubectl gpu node-1 node-2 -o wide\n  kubectl gpu list " +
			"node-1\n  kubectl gpu why my-pod -n my-namespace\n" +
			"  kubectl gpu doctor node-1",
		SilenceUsage: true, SilenceErrors: true, SuggestionsMinimumDistance: 2,
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpu"},
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: p.completeNodes(-1),
		RunE:              func(cmd *cobra.Command, names []string) error { return p.printNodes(cmd, names) },
		Version:           version.String(),
	}
	p.flags.AddFlags(root.PersistentFlags())
	root.PersistentFlags().StringVar(&p.options.DaemonSelector, "daemon-selector",
		"app.kubernetes.io/name=gpu-device-plugin",
		"label selector of the daemon's pods")
	root.PersistentFlags().StringVar(&p.options.DaemonNamespace, "daemon-namespace", "",
		"namespace of the daemon's pods (default: any)")
	p.addOutput(root)
	root.AddCommand(p.newList(), p.newWhy(), p.newSlices(), p.newStatus(), p.newDoctor(), p.newValidate(),
		p.newReset(), p.newHealth(), p.newQuiesce(), p.newResume(), p.newDriver(), p.newRollout(), p.newRepair())
	return root
}

// addOutput adds the flags of commands that print rows.
func (p *plugin) addOutput(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "output format: table, wide, json or yaml")
	cmd.Flags().BoolVar(&p.unhealthy, "unhealthy", false, "only what is not healthy")
	cmd.Flags().StringVar(&p.ask, "ask", "auto", "ask daemons by pods/exec: auto, always or never")
	for flag, values := range map[string][]string{"output": {"table", "wide", "json", "yaml"},
		"ask": {"auto", "always", "never"}} {
		// the flag was added above
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
}

// client returns a Client for the API server selected by the flags.
func (p *plugin) client() (*cluster.Client, error) {
	config, err := p.flags.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	config.UserAgent = "kubectl-gpu/" + version.String()
	return cluster.New(config, p.options)
}

// completeNodes completes up to limit names of nodes; -1 for any number.
func (p *plugin) completeNodes(limit int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, previous []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		client, err := p.client()
		if err != nil || limit >= 0 && len(previous) >= limit {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, err := client.NodeNames(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveError | cobra.ShellCompDirectiveNoFileComp
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// validate checks the values of flags before the first request.
func (p *plugin) validate() error {
	switch p.format {
	case "table", "wide", "json", "yaml":
	default:
		return fmt.Errorf("-o %s: use table, wide, json or yaml", p.format)
	}
	switch p.ask {
	case "auto", "always", "never":
		return nil
	}
	return fmt.Errorf("--ask %s: use auto, always or never", p.ask)
}

// statuses asks the daemons of the pods for their status, and prints the daemons without a
// response on standard error.
func (p *plugin) statuses(cmd *cobra.Command, client *cluster.Client, pods []*corev1.Pod) map[string]view.Answer {
	answers := map[string]view.Answer{}
	for _, a := range client.Statuses(cmd.Context(), pods) {
		answers[a.Pod.Spec.NodeName] = a
		if a.Err != nil {
			_ = printLine(cmd.ErrOrStderr(), fmt.Sprintf("node %s: its daemon's pod %s/%s does not respond: %v",
				a.Pod.Spec.NodeName, a.Pod.Namespace, a.Pod.Name, a.Err)) // the exit status says so too
		}
	}
	return answers
}

// now is the time for durations.
var now = metav1.Now
