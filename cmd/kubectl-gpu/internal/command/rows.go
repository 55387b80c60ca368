package command

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
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
	p.learn(cmd, client, &facts, daemons)
	rows := facts.Rows(daemons, nil, len(names) > 0)
	var pods []*corev1.Pod
	for _, row := range rows {
		if pod := daemons[row.Name]; pod != nil && (p.ask == "always" || p.ask == "auto" && row.IsIncomplete()) {
			pods = append(pods, pod)
		}
	}
	answers := p.asked(cmd, client, pods)
	rows = facts.Rows(daemons, answers, len(names) > 0)
	absent := p.explainAbsence(cmd, client, facts, rows, len(names) == 0)
	for _, row := range rows {
		for _, stale := range row.Stale {
			// the table has what the daemon says
			_ = say(cmd.ErrOrStderr(), fmt.Sprintf("Node %s: %s: the label is stale.", row.Name, stale))
		}
		if !row.NotReadySince.IsZero() {
			_ = say(cmd.ErrOrStderr(), fmt.Sprintf("Node %s has not been ready for %s: its data is out of date.",
				row.Name, age(row.NotReadySince)))
		}
	}
	err = p.print(cmd.OutOrStdout(), map[string]any{"nodes": rows}, func(w io.Writer) {
		fmt.Fprint(w, "NODE\tMODEL\tHEALTHY\tALLOCATED\tALL\tMIG\tDRIVER\tVERSION\tSINCE\tSOURCE")
		if p.format == "wide" {
			fmt.Fprint(w, "\tGPUS\tRESOURCES\tCONDITION\tDAEMON\tMESSAGE")
		}
		fmt.Fprintln(w)
		for _, r := range rows {
			layout := r.Layout
			if r.LayoutState != "" {
				layout += " (" + r.LayoutState + ")"
			}
			version := dash(r.Version)
			if absent[r.Name] != "" {
				version = "no daemon"
				if layout != "" {
					layout += " by its label"
				}
			}
			fmt.Fprint(w, strings.Join([]string{r.Name, dash(r.Model), fmt.Sprint(r.Healthy), fmt.Sprint(r.Allocated),
				fmt.Sprint(r.All),
				dash(layout), dash(r.DriverVersion), version, since(r), sources(r.Told())}, "\t"))
			if p.format == "wide" {
				fmt.Fprintf(w, "\t%s\t%s\t%s\t%s\t%s", number(r.GPUs), resources(r), condition(r), dash(r.Daemon),
					dash(view.Condensed(r.Message)))
			}
			fmt.Fprintln(w)
		}
	})
	return errors.Join(err, incomplete(facts, answers))
}

// learn asks daemons which resources they serve, where a node has one that may be one of GPUs or
// not by its name: one daemon for each such resource. One that does not answer is not told of: it
// may have no part in it.
func (p *plugin) learn(cmd *cobra.Command, client *cluster.Client, facts *view.Facts, daemons map[string]*corev1.Pod) {
	if p.ask == "never" {
		return
	}
	var pods []*corev1.Pod
	for _, pod := range facts.Doubtful(daemons, nil) {
		if !slices.Contains(pods, pod) {
			pods = append(pods, pod)
		}
	}
	facts.Learn(client.Statuses(cmd.Context(), pods))
}

// explainAbsence says on standard error on which nodes no daemon runs, and why, and adds it to the
// rows. Whole says that the rows are those of the whole cluster.
func (p *plugin) explainAbsence(
	cmd *cobra.Command, client *cluster.Client, facts view.Facts, rows []view.Node, whole bool,
) map[string]string {
	daemons := facts.Daemons(client.IsDaemon)
	var names []string
	for _, row := range rows {
		names = append(names, row.Name)
	}
	absent := facts.Absent(names, daemons, client.IsDaemon, now().Time)
	for i := range rows {
		rows[i].DaemonAbsent = absent[rows[i].Name]
	}
	for _, sentence := range facts.Absences(absent, daemons, whole) {
		_ = say(cmd.ErrOrStderr(), sentence) // the table says that there is none
	}
	return absent
}

// since says since when the daemon of a node is ready.
func since(r view.Node) string {
	if r.Daemon != "" && r.Since.IsZero() {
		return "not ready"
	}
	return age(r.Since)
}

// sources says who tells something, and how old that is.
func sources(all []view.Source) string {
	var parts []string
	for _, s := range all {
		text := s.From
		if !s.At.IsZero() {
			text += " " + age(s.At)
		}
		parts = append(parts, text)
	}
	return dash(strings.Join(parts, ", "))
}

// resources says how many devices of each resource pods have, and how many there are.
func resources(r view.Node) string {
	var parts []string
	for _, one := range r.Resources {
		text := fmt.Sprintf("%s %d/%d", one.Name, one.Allocated, one.All)
		if one.Departing > 0 {
			text += fmt.Sprintf(" (%d departing)", one.Departing)
		}
		parts = append(parts, text)
	}
	return dash(strings.Join(parts, ", "))
}

// condition says what the condition of a node is, and when it was written last.
func condition(r view.Node) string {
	if r.ConditionHeard.IsZero() {
		return dash(r.Condition)
	}
	return dash(r.Condition) + " " + age(r.ConditionHeard)
}

func (p *plugin) newList() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list [NODE...]",
		Short: "Show each GPU and MIG device, and the pods that hold it",
		Long: "list prints a line for each GPU and MIG device: its state, the containers that hold it, by a resource, a claim or a share, and\n" +
			"utilisation and memory where the daemon serves metrics of GPUs.\n\n" +
			"Each node's daemon is asked by pods/exec, at most 20 at once. With --ask never, what ResourceSlices, ResourceClaims and Pods\n" +
			"have is shown. A node whose GPUs are not known has a row with the reason.",
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
	p.learn(cmd, client, &facts, daemons)
	nodes := facts.Rows(daemons, nil, len(names) > 0)
	var pods []*corev1.Pod
	for _, row := range nodes {
		if pod := daemons[row.Name]; pod != nil && p.ask != "never" {
			pods = append(pods, pod)
		}
	}
	p.explainAbsence(cmd, client, facts, nodes, len(names) == 0)
	answers := p.asked(cmd, client, pods)
	rows := facts.GPUs(daemons, answers, nodes)
	for i, text := range client.Metrics(cmd.Context(), pods) {
		view.AddMetrics(rows, pods[i].Spec.NodeName, text)
	}
	err = p.print(cmd.OutOrStdout(), map[string]any{"gpus": rows}, func(w io.Writer) {
		fmt.Fprint(w, "NODE\tGPU\tMODEL\tSTATE\tHELD BY\tUTIL\tMEMORY\tSOURCE")
		if p.format == "wide" {
			fmt.Fprint(w, "\tUUID\tSINCE\tREASON\tCURE")
		}
		fmt.Fprintln(w)
		for _, r := range rows {
			fmt.Fprint(w, strings.Join([]string{
				r.Node, dash(r.Index), dash(r.Model), cell(r.State), cell(held(r)), percent(r.Utilization), memory(r),
				sources([]view.Source{r.Source}),
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
	_, err := io.WriteString(out, aligned(terminal.Printable(text.String(), terminal.Caret)))
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
