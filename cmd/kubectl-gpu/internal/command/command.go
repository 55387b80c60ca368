// Package command is the commands of kubectl gpu: their flags, and what they print.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"

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

// Run runs a command, and returns the exit status of the process: that of the daemon's command
// where one was run, otherwise 0 or 1.
func Run(ctx context.Context, arguments []string, in io.Reader, out, problems io.Writer) int {
	root := newRoot() //nolint:contextcheck // completion has the context of its command
	root.SetArgs(arguments)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(problems)
	err := root.ExecuteContext(ctx)
	var code exec.CodeExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code): // the daemon's command has printed why
		return code.Code
	}
	// the exit status says so, too
	_, _ = io.WriteString(problems, terminal.Printable(lines(fmt.Sprintln("error:", err)), terminal.Caret))
	return 1
}

// plugin is what all commands share.
type plugin struct {
	flags   *genericclioptions.ConfigFlags
	options cluster.Options
	format  string
	ask     string
}

func newRoot() *cobra.Command {
	p := &plugin{flags: genericclioptions.NewConfigFlags(true)}
	root := &cobra.Command{
		Use:   "kubectl gpu [NODE...]",
		Short: "Show the GPUs of a cluster, node by node",
		Long: "kubectl gpu prints a line for each node that has GPUs: their model, how many devices are healthy, allocated and there at\n" +
			"all, the MIG layout, the driver, the version of the daemon and since when it runs, and who tells that and how old it is.\n" +
			"Devices are GPUs, MIG devices, shares and units.\n\n" +
			"It reads Nodes, Pods, ResourceSlices, ResourceClaims and the daemon's DaemonSet. Where they do not tell the model, the\n" +
			"driver or why devices cannot be given to pods, it asks the daemon of that node by pods/exec. Where no daemon runs, standard\n" +
			"error says why. What may not be read or does not answer is named on standard error, and the rest is shown.",
		Example: "  kubectl gpu\n  kubectl gpu node-1 node-2 -o wide\n  kubectl gpu list node-1\n  kubectl gpu why my-pod -n my-namespace\n" +
			"  kubectl gpu doctor node-1",
		SilenceUsage: true, SilenceErrors: true,
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpu"},
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: p.completeNodes(-1),
		RunE:              func(cmd *cobra.Command, names []string) error { return p.printNodes(cmd, names) },
		Version:           version.String(),
	}
	p.flags.AddFlags(root.PersistentFlags())
	root.PersistentFlags().StringVar(&p.options.DaemonSelector, "daemon-selector",
		"app.kubernetes.io/name=gpu-device-plugin",
		"labels of the daemon's pods")
	root.PersistentFlags().StringVar(&p.options.DaemonNamespace, "daemon-namespace", "",
		"namespace of the daemon's pods; default: any")
	p.addOutput(root)
	root.AddCommand(p.newList(), p.newWhy(), p.newSlices(), p.newStatus(), p.newDoctor(), p.newValidate(),
		p.newReset(), p.newQuiesce(), p.newResume())
	return root
}

// addOutput adds the flags of commands that print rows.
func (p *plugin) addOutput(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "output format: table, wide, json or yaml")
	cmd.Flags().StringVar(&p.ask, "ask", "auto", "whether daemons are asked by pods/exec: auto, always or never")
	for flag, values := range map[string][]string{"output": {"table", "wide", "json", "yaml"},
		"ask": {"auto", "always", "never"}} {
		// the flag was added above
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
}

// client returns a Client of the API server that the flags name.
func (p *plugin) client() (*cluster.Client, error) {
	config, err := p.flags.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	config.UserAgent = "kubectl-gpu/" + version.String()
	return cluster.New(config, p.options)
}

// completeNodes completes the names of nodes, up to so many of them; -1 for any number.
func (p *plugin) completeNodes(most int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, before []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		client, err := p.client()
		if err != nil || most >= 0 && len(before) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, err := client.NodeNames(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveError | cobra.ShellCompDirectiveNoFileComp
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// validate refuses values of flags that are none, before anything is asked.
func (p *plugin) validate() error {
	switch p.format {
	case "table", "wide", "json", "yaml":
	default:
		return fmt.Errorf("-o %s: the formats are table, wide, json and yaml", p.format)
	}
	switch p.ask {
	case "auto", "always", "never":
		return nil
	}
	return fmt.Errorf("--ask %s: give auto, always or never", p.ask)
}

// asked asks the daemons of some nodes for their status, and says on standard error which ones did
// not answer.
func (p *plugin) asked(cmd *cobra.Command, client *cluster.Client, pods []*corev1.Pod) map[string]view.Answer {
	answers := map[string]view.Answer{}
	for _, a := range client.Statuses(cmd.Context(), pods) {
		answers[a.Pod.Spec.NodeName] = a
		if a.Err != nil {
			_ = say(cmd.ErrOrStderr(), fmt.Sprintf("node %s: its daemon's pod %s/%s does not answer: %v",
				a.Pod.Spec.NodeName, a.Pod.Namespace, a.Pod.Name, a.Err)) // the exit status says so, too
		}
	}
	return answers
}

// now is the time for durations.
var now = metav1.Now
