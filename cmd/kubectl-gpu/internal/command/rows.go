package command

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// errIncomplete is the error of a command that has shown a part: a script must not take it for all.
var errIncomplete = errors.New("not everything could be read: see above")

// printNodes prints a row for each node.
func (p *plugin) printNodes(cmd *cobra.Command, names []string) error {
	client, facts, err := p.read(cmd, names)
	if err != nil {
		return err
	}
	daemons := facts.Daemons(client.IsDaemon)
	rows := facts.Rows(daemons, nil, len(names) > 0)
	var pods []*corev1.Pod
	for _, row := range rows {
		if pod := daemons[row.Name]; pod != nil && (p.ask == "always" || p.ask == "auto" && row.IsIncomplete()) {
			pods = append(pods, pod)
		}
	}
	answers := p.asked(cmd, client, pods)
	rows = facts.Rows(daemons, answers, len(names) > 0)
	err = p.print(cmd.OutOrStdout(), map[string]any{"nodes": rows}, func(w io.Writer) {
		fmt.Fprint(w, "NODE\tMODEL\tHEALTHY\tALLOCATED\tALL\tMIG\tDRIVER\tVERSION\tSINCE")
		if p.format == "wide" {
			fmt.Fprint(w, "\tGPUS\tCONDITION\tDAEMON\tMESSAGE")
		}
		fmt.Fprintln(w)
		for _, r := range rows {
			layout := r.Layout
			if r.LayoutState != "" {
				layout += " (" + r.LayoutState + ")"
			}
			fmt.Fprint(w, strings.Join([]string{r.Name, dash(r.Model), fmt.Sprint(r.Healthy), fmt.Sprint(r.Allocated), fmt.Sprint(r.All),
				dash(layout), dash(r.DriverVersion), dash(r.Version), age(r.Since)}, "\t"))
			if p.format == "wide" {
				fmt.Fprintf(w, "\t%s\t%s\t%s\t%s", number(r.GPUs), dash(r.Condition), dash(r.Daemon), dash(r.Message))
			}
			fmt.Fprintln(w)
		}
	})
	return errors.Join(err, incomplete(facts, answers))
}

func (p *plugin) newList() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list [NODE...]",
		Short: "Show each GPU and MIG device, and the pods that hold it",
		Long: "list prints a line for each GPU and MIG device: its state, the containers that hold it, by a resource, a claim or a share, and\n" +
			"utilisation and memory where the daemon serves metrics of GPUs.\n\n" +
			"Each node's daemon is asked by pods/exec, at most 20 at once. With --ask never, what ResourceSlices, ResourceClaims and Pods\n" +
			"have is shown.",
		Args: cobra.ArbitraryArgs, ValidArgsFunction: p.completeNodes(-1),
		RunE: func(cmd *cobra.Command, names []string) error { return p.printGPUs(cmd, names) },
	}
	p.addOutput(cmd)
	return cmd
}

// printGPUs prints a row for each GPU.
func (p *plugin) printGPUs(cmd *cobra.Command, names []string) error {
	client, facts, err := p.read(cmd, names)
	if err != nil {
		return err
	}
	daemons := facts.Daemons(client.IsDaemon)
	var pods []*corev1.Pod
	for _, row := range facts.Rows(daemons, nil, false) {
		if pod := daemons[row.Name]; pod != nil && p.ask != "never" {
			pods = append(pods, pod)
		}
	}
	answers := p.asked(cmd, client, pods)
	rows := facts.GPUs(daemons, answers)
	for i, text := range client.Metrics(cmd.Context(), pods) {
		view.AddMetrics(rows, pods[i].Spec.NodeName, text)
	}
	err = p.print(cmd.OutOrStdout(), map[string]any{"gpus": rows}, func(w io.Writer) {
		fmt.Fprint(w, "NODE\tGPU\tMODEL\tSTATE\tHELD BY\tUTIL\tMEMORY")
		if p.format == "wide" {
			fmt.Fprint(w, "\tUUID\tSINCE\tREASON\tCURE")
		}
		fmt.Fprintln(w)
		for _, r := range rows {
			fmt.Fprint(w, strings.Join([]string{
				r.Node, cell(r.Index), dash(r.Model), cell(r.State), cell(held(r)), percent(r.Utilization), memory(r),
			}, "\t"))
			if p.format == "wide" {
				fmt.Fprintf(w, "\t%s\t%s\t%s\t%s", dash(r.UUID), age(r.Since), dash(r.Reason), dash(r.Cure))
			}
			fmt.Fprintln(w)
		}
	})
	return errors.Join(err, incomplete(facts, answers))
}

// read reads what the API server has, and says on standard error what it does not show.
func (p *plugin) read(cmd *cobra.Command, names []string) (*cluster.Client, view.Facts, error) {
	if err := p.validate(); err != nil {
		return nil, view.Facts{}, err
	}
	client, err := p.client()
	if err != nil {
		return nil, view.Facts{}, err
	}
	facts := client.Read(cmd.Context(), names...)
	for _, sentence := range facts.Missing {
		_ = say(cmd.ErrOrStderr(), sentence) // the exit status says so, too
	}
	return client, facts, nil
}

func incomplete(f view.Facts, answers map[string]view.Answer) error {
	if len(f.Missing) > 0 {
		return errIncomplete
	}
	for _, a := range answers {
		if a.Err != nil {
			return errIncomplete
		}
	}
	return nil
}

// print prints a value in the format of the flag -o.
func (p *plugin) print(out io.Writer, value any, table func(io.Writer)) error {
	if p.format == "json" || p.format == "yaml" {
		text, err := toJSON(value)
		if err == nil && p.format == "yaml" {
			text, err = toYAML(text)
		}
		if err != nil {
			return err
		}
		_, err = io.WriteString(out, text)
		return err
	}
	var text strings.Builder
	table(&text)
	_, err := io.WriteString(out, aligned(printable(text.String(), caret)))
	return err
}

// dash returns a text for a cell.
func dash(text string) string {
	return cmp.Or(cell(text), "-")
}

func number(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// age says how long ago a time was.
func age(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return duration.HumanDuration(now().Sub(t))
}

func held(r view.GPU) string {
	var names []string
	for _, h := range r.Holders {
		names = append(names, h.String())
	}
	switch {
	case len(names) > 0:
		return strings.Join(names, ", ")
	case r.HoldersKnown:
		return "-"
	}
	return "not known"
}

func percent(n *int64) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprintf("%d%%", *n)
}

func memory(r view.GPU) string {
	if r.MemoryUsed == nil || r.MemoryTotal == nil {
		return "-"
	}
	return fmt.Sprintf("%d/%d MiB", *r.MemoryUsed, *r.MemoryTotal)
}
