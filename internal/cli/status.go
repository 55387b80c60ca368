package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/version"
)

func newStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print the GPUs and resources of a running daemon",
		Long: "status prints the state of each GPU and MIG device, since when, the reason and the cure. It also prints the resources\n" +
			"that the daemon serves, and its warnings.",
		Args: cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	o := addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var s status.Status
		if err := control.Call(cmd.Context(), *socket, callStatus, nil, &s); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), s, func(w io.Writer) { printStatus(w, s) })
	}
	return cmd
}

func (d *daemon) status(ctx context.Context) (status.Status, error) {
	seen, err := d.monitor.Status(ctx)
	if err != nil {
		return status.Status{}, err
	}
	offered := d.offered.Value()
	s := status.Status{
		Version: version.String(), Simulated: d.config.Simulate, ConfigFile: d.config.File,
		Driver: seen.Snapshot.Driver.Version, Looked: status.Moment(seen.Looked), Stale: seen.Snapshot.Stale,
		Quiet: seen.Quiet, Node: seen.Node,
		GPUs: status.Devices(seen.Snapshot, seen.GPUs), LeftOut: status.LeftOut(seen.Snapshot, offered),
		Resources: resources(d.set.Status()), Warnings: offered.OtherWarnings(),
		Holds: holds(offered.Holds), ConfigGeneration: d.watcher.Generation(),
		Readiness: d.readiness.Answer().Value(),
		MPS:       slices.Sorted(maps.Values(d.mps.Unready().Value())),
	}
	if seen.Quiet {
		s.Quiesced = &status.Quiesced{Since: status.Moment(seen.Quiesced), Allocate: seen.Allocate}
	}
	if err := d.watcher.Errors().Value(); err != nil {
		s.ConfigError = err.Error()
	}
	for _, u := range seen.Unwatched {
		s.Unwatched = append(s.Unwatched, fmt.Sprintf("GPU %d: %s", u.Index, u.Reason))
	}
	addCalls(&s, d.driver.Calls())
	for _, r := range seen.Retries {
		s.Retries = append(s.Retries, status.Retry{Index: r.Index, Reason: r.Reason, Next: status.Moment(r.Next)})
	}
	return s, nil
}

// addCalls adds the calls into the driver that hang. While a wait for events is one of them, no GPU gives events.
func addCalls(s *status.Status, calls []inventory.Call) {
	s.Hanging = len(calls)
	for _, c := range calls {
		shown := status.Call{Function: c.Function, Since: status.Moment(c.Since)}
		if c.GPU != inventory.NoGPU {
			shown.GPU = &c.GPU
		}
		s.Calls = append(s.Calls, shown)
		if strings.HasSuffix(c.Function, "EventSetWait") {
			s.Unwatched = append(s.Unwatched, fmt.Sprintf("all GPUs: %s does not return", c.Function))
		}
	}
}

func resources(served []plugin.Status) []status.Resource {
	resources := make([]status.Resource, 0, len(served))
	for _, r := range served {
		shown := status.Resource{
			Name: r.Resource, Devices: r.Devices, Healthy: r.Healthy, Server: string(r.Phase), Agreed: r.Agreed, Problem: r.Problem,
		}
		for _, d := range r.Departing {
			shown.Departing = append(shown.Departing, status.Departing(d))
		}
		resources = append(resources, shown)
	}
	return resources
}

func holds(put []resource.Hold) []status.Hold {
	var holds []status.Hold
	for _, h := range put {
		holds = append(holds, status.Hold{Device: h.UUID, Resource: h.Resource, Reason: h.Reason, Listed: !h.Hidden})
	}
	return holds
}

// printStatus prints a status as a table.
func printStatus(w io.Writer, s status.Status) {
	fmt.Fprintf(w, "version %s, driver %s\n", s.Version, orDash(s.Driver))
	if s.Quiet {
		allocate := "GPUs are not given to new pods"
		if s.Quiesced != nil && s.Quiesced.Allocate {
			allocate = "GPUs are given to new pods"
		}
		fmt.Fprintf(w, "NVML is released (quiesce), and %s; the command resume opens it again\n", allocate)
	}
	for _, c := range s.Calls {
		call := c.Function
		if c.GPU != nil {
			call += fmt.Sprintf(" of GPU %d", *c.GPU)
		}
		fmt.Fprintf(w, "driver call that does not return: %s since %s\n", call, status.Stamp(c.Since))
	}
	for _, line := range []struct{ what, text string }{
		{"ready", readyNow(s.Readiness)},
		{"simulated node", s.Simulated},
		{"last scan failed", s.Stale},
		{"last successful scan", status.Stamp(s.Looked)},
		{"all GPUs", s.Node},
		{"configuration file", s.ConfigFile},
		{"configuration file not used", s.ConfigError},
	} {
		if line.text != "" {
			fmt.Fprintf(w, "%s: %s\n", line.what, line.text)
		}
	}
	fmt.Fprintln(w, "\nGPU\tUUID\tMODEL\tSTATE\tSINCE\tCURE\tREASON\tEVENTS")
	for _, g := range s.GPUs {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", g.Index, g.UUID, g.Model, g.State, orDash(status.Stamp(g.Since)), orDash(g.Cure),
			orDash(g.Reason), orDash(strings.Join(g.Events, "; ")))
	}
	for _, u := range s.Unwatched {
		fmt.Fprintf(w, "without events: %s\n", u)
	}
	for _, l := range s.LeftOut {
		fmt.Fprintf(w, "left out: %s\n", l)
	}
	for _, r := range s.Retries {
		fmt.Fprintf(w, "GPU %d is asked again at %s: %s\n", r.Index, orDash(status.Stamp(r.Next)), r.Reason)
	}
	printHolds(w, s.Holds)
	fmt.Fprintln(w, "\nRESOURCE\tDEVICES\tHEALTHY\tSERVER\tPROBLEM")
	for _, r := range s.Resources {
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\n", r.Name, r.Devices, r.Healthy, r.Server, orDash(r.Problem))
	}
	for _, r := range s.Resources {
		printDeparting(w, r)
	}
	for _, warning := range s.Warnings {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
	for _, reason := range s.MPS {
		fmt.Fprintf(w, "MPS: %s\n", reason)
	}
}

func readyNow(r status.Readiness) string {
	text := "no"
	if r.Ready {
		text = "yes"
	}
	if r.Reason != "" {
		text += ": " + r.Reason
	}
	return text
}

// printHolds prints the holds on devices that are listed. The others are left out, with the reason.
func printHolds(w io.Writer, holds []status.Hold) {
	for _, h := range holds {
		if h.Listed {
			fmt.Fprintf(w, "held: %s %s: %s\n", h.Resource, h.Device, h.Reason)
		}
	}
}

// maxDeparting is how many departing devices of a resource are printed: there may be a thousand replicas.
const maxDeparting = 20

func printDeparting(w io.Writer, r status.Resource) {
	for _, d := range r.Departing[:min(len(r.Departing), maxDeparting)] {
		fmt.Fprintf(w, "no longer offered: %s %s: %s; still listed: %s\n", r.Name, d.ID, d.Reason, d.Waiting)
	}
	if more := len(r.Departing) - maxDeparting; more > 0 {
		fmt.Fprintf(w, "no longer offered: %s: %d devices more, see -o json\n", r.Name, more)
	}
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
