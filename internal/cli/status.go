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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/version"
)

func newStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print what a running daemon sees and serves",
		Long:  "status asks a running daemon for each GPU's state, since when, why, and what cures it, and for what it serves.",
		Args:  cobra.NoArgs,
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
		Quiet: seen.Quiet, Node: seen.Node, Hanging: d.driver.Hanging(),
		GPUs: status.Devices(seen.Snapshot, seen.GPUs), LeftOut: status.LeftOut(seen.Snapshot, offered),
		Resources: resources(d.set.Status()), Warnings: offered.OtherWarnings(),
		Readiness: d.readiness.Answer().Value(),
		MPS:       slices.Sorted(maps.Values(d.mps.Unready().Value())),
	}
	if err := d.watcher.Faults().Value(); err != nil {
		s.ConfigError = err.Error()
	}
	for _, u := range seen.Unwatched {
		s.Unwatched = append(s.Unwatched, fmt.Sprintf("GPU %d: %s", u.Index, u.Reason))
	}
	return s, nil
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

// printStatus prints a status as a table.
func printStatus(w io.Writer, s status.Status) {
	fmt.Fprintf(w, "version %s, driver %s\n", s.Version, orDash(s.Driver))
	if s.Quiet {
		fmt.Fprintln(w, "the driver was released: resume ends that")
	}
	if s.Hanging > 0 {
		fmt.Fprintf(w, "calls into the driver that do not return: %d\n", s.Hanging)
	}
	for _, line := range []struct{ what, text string }{
		{"simulated node", s.Simulated},
		{"the last look at the node failed", s.Stale},
		{"the last that succeeded", status.Stamp(s.Looked)},
		{"the whole node", s.Node},
		{"configuration file", s.ConfigFile},
		{"the configuration file is not in force", s.ConfigError},
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
	fmt.Fprintln(w, "\nRESOURCE\tDEVICES\tHEALTHY\tSERVER")
	for _, r := range s.Resources {
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\n", r.Name, r.Devices, r.Healthy, r.Server)
	}
	for _, warning := range s.Warnings {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
	for _, reason := range s.MPS {
		fmt.Fprintf(w, "not ready: %s\n", reason)
	}
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
