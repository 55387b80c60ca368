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

// errIncomplete is the error of a command with partial output, for scripts.
var errIncomplete = errors.New("the output is incomplete: see the errors above")

// printNodes prints a row for each node.
func (p *plugin) printNodes(cmd *cobra.Command, names []string) error {
	client, facts, err := p.read(cmd, names)
	if err != nil {
		return err
	}
	if len(names) > 0 && slices.Contains(facts.UnknownNodes, names[0]) {
		if near := cmd.SuggestionsFor(names[0]); len(near) > 0 || len(facts.Nodes) == 0 {
			return unknownWord(names[0], near)
		}
	}
	daemons := facts.Daemons(client.IsDaemon)
	p.learnResources(cmd, client, &facts, daemons)
	rows := facts.Rows(daemons, nil, len(names) > 0)
	var pods []*corev1.Pod
	for _, row := range rows {
		if pod := daemons[row.Name]; pod != nil && (p.ask == "always" || p.ask == "auto" && row.IsIncomplete()) {
			pods = append(pods, pod)
		}
	}
	answers := p.statuses(cmd, client, pods)
	rows = facts.Rows(daemons, answers, len(names) > 0)
	absent := p.explainAbsence(cmd, client, facts, rows, len(names) == 0)
	for _, row := range rows {
		for _, stale := range row.Stale {
			// the table has the daemon's value
			_ = printLine(cmd.ErrOrStderr(), fmt.Sprintf("Node %s: %s: the label is stale.", row.Name, stale))
		}
		if !row.NotReadySince.IsZero() {
			_ = printLine(cmd.ErrOrStderr(), fmt.Sprintf("Node %s has not been ready for %s: its data is out of date.",
				row.Name, age(row.NotReadySince)))
		}
	}
	view.SortNodes(rows)
	totals, several := view.Totals(rows), len(rows) > 1
	if p.unhealthy {
		rows = slices.DeleteFunc(rows, func(r view.Node) bool { return r.Badness() == 0 })
	}
	err = p.print(cmd.OutOrStdout(), map[string]any{"nodes": p.forMachines(rows)}, func(w io.Writer) {
		if several {
			fmt.Fprintln(w, totals)
		}
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
				dash(layout), dash(r.DriverVersion), version, since(r), sources(r.FactSources())}, "\t"))
			if p.format == "wide" {
				fmt.Fprintf(w, "\t%s\t%s\t%s\t%s\t%s", number(r.GPUs), resources(r), condition(r), dash(r.Daemon),
					dash(view.Condensed(r.Message)))
			}
			fmt.Fprintln(w)
		}
	})
	return errors.Join(err, incomplete(facts, answers))
}

// forMachines returns the rows with models without spaces, as in the label nvidia.com/gpu.product, if
// the output is JSON or YAML.
func (p *plugin) forMachines(rows []view.Node) []view.Node {
	if p.format == "json" || p.format == "yaml" {
		for i := range rows {
			rows[i].Model = strings.ReplaceAll(rows[i].Model, " ", "-")
		}
	}
	return rows
}

// unknownWord returns the error for a first word that is neither a command nor a node;
// near are the commands with a similar spelling.
func unknownWord(word string, near []string) error {
	problem := fmt.Sprintf("%q is neither a command nor a node", word)
	if len(near) > 0 {
		problem += `, did you mean "` + strings.Join(near, `" or "`) + `"?`
	}
	return errors.New(problem + "; kubectl gpu --help lists the commands")
}

// learnResources asks daemons for their resources, if the name of a resource does not show
// whether the resource is for GPUs: one daemon for each such resource. Daemons without a
// response are not reported, because they may be unrelated.
func (p *plugin) learnResources(cmd *cobra.Command, client *cluster.Client, facts *view.Facts,
	daemons map[string]*corev1.Pod) {
	if p.ask == "never" {
		return
	}
	var pods []*corev1.Pod
	for _, pod := range facts.UnclearResources(daemons, nil) {
		if !slices.Contains(pods, pod) {
			pods = append(pods, pod)
		}
	}
	facts.Learn(client.Statuses(cmd.Context(), pods))
}

// explainAbsence prints on standard error the nodes without a running daemon, with the
// reasons, and adds the reasons to the rows. whole says that the rows cover the whole
// cluster.
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
	for _, sentence := range facts.AbsenceSentences(absent, daemons, whole) {
		_ = printLine(cmd.ErrOrStderr(), sentence) // the table also says that no daemon runs
	}
	return absent
}

// since returns how long the daemon of a node has been ready.
func since(r view.Node) string {
	if r.Daemon != "" && r.Since.IsZero() {
		return "not ready"
	}
	return age(r.Since)
}

// sources returns the sources of facts, and their age.
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

// resources returns the allocated and total number of devices of each resource.
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

// condition returns the condition of a node, and the age of its last update.
func condition(r view.Node) string {
	if r.ConditionUpdated.IsZero() {
		return dash(r.Condition)
	}
	return dash(r.Condition) + " " + age(r.ConditionUpdated)
}

func (p *plugin) newList() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list [NODE...]",
		Short: "Show each GPU and MIG device, and the pods that hold it",
		Long: "list prints a row for each GPU and MIG device: its state, the containers that hold it by a resource,\n" +
			"a claim or a share, and its utilization and memory if the daemon serves GPU metrics.\n\n" +
			"list asks each node's daemon by pods/exec, 20 at a time. With --ask never, it uses ResourceSlices,\n" +
			"ResourceClaims and Pods instead. A node whose GPUs are unknown has a row with the reason.\n\n" +
			"GPUs that are not healthy come first. In a narrow terminal, their reason and remedy have a line of\n" +
			"their own, and the last columns are left out; -o wide prints all of them.",
		Example: "  kubectl gpu list node-1\n  kubectl gpu list --unhealthy",
		Args:    cobra.ArbitraryArgs, ValidArgsFunction: p.completeNodes(-1),
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
	p.learnResources(cmd, client, &facts, daemons)
	nodes := facts.Rows(daemons, nil, len(names) > 0)
	var pods []*corev1.Pod
	for _, row := range nodes {
		if pod := daemons[row.Name]; pod != nil && p.ask != "never" {
			pods = append(pods, pod)
		}
	}
	p.explainAbsence(cmd, client, facts, nodes, len(names) == 0)
	answers := p.statuses(cmd, client, pods)
	rows := facts.GPUs(daemons, answers, nodes)
	for i, text := range client.Metrics(cmd.Context(), pods) {
		view.AddMetrics(rows, pods[i].Spec.NodeName, text)
	}
	view.SortGPUs(rows)
	if p.unhealthy {
		rows = slices.DeleteFunc(rows, func(r view.GPU) bool { return r.Badness() == 0 })
	}
	if p.format == "json" || p.format == "yaml" {
		for i := range rows {
			rows[i].Model = strings.ReplaceAll(rows[i].Model, " ", "-")
		}
	}
	err = p.print(cmd.OutOrStdout(), map[string]any{"gpus": rows}, func(w io.Writer) {
		fmt.Fprint(w, "NODE\tGPU\tMODEL\tSTATE\tHELD BY\tUTIL\tMEMORY\tSOURCE")
		if p.format == "wide" {
			fmt.Fprint(w, "\tUUID\tSINCE")
		}
		fmt.Fprintln(w, "\tREMEDY\tREASON")
		for _, r := range rows {
			fmt.Fprint(w, strings.Join([]string{
				r.Node, dash(r.Index), dash(r.Model), toCell(r.State), toCell(holderNames(r)), percent(r.Utilization),
				memory(r),
				sources([]view.Source{r.Source}),
			}, "\t"))
			if p.format == "wide" {
				fmt.Fprintf(w, "\t%s\t%s", dash(r.UUID), age(r.Since))
			}
			fmt.Fprintf(w, "\t%s\t%s\n", dash(r.RemedyText()), dash(r.Reason))
		}
	})
	return errors.Join(err, incomplete(facts, answers))
}

// read reads the objects of the API server, and prints on standard error what could not be read.
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
		_ = printLine(cmd.ErrOrStderr(), sentence) // the exit status says so too
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
	columns := terminal.Columns(out)
	if p.format == "wide" {
		columns = 0
	}
	_, err := io.WriteString(out, fit(terminal.Printable(text.String(), terminal.Caret), columns))
	return err
}

// dash returns the text of a cell; "-" if it is empty.
func dash(text string) string {
	return cmp.Or(toCell(text), "-")
}

func number(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// age returns the time since t.
func age(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return duration.HumanDuration(now().Sub(t))
}

func holderNames(r view.GPU) string {
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
	return "unknown"
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
