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
		Long: "status prints in its first line how the daemon is. Then follow the state of each GPU and MIG device, for how long, the reason\n" +
			"and the cure, the resources that the daemon serves, and its warnings. Lines have at most 100 columns; -o wide prints whole\n" +
			"UUIDs and times, and lines of any length.\n\n" +
			"With --watch it prints the summary, and then each change in one line, until SIGINT. A terminal shows as much of a line as fits,\n" +
			"unless with -o wide. When the daemon ends, the command says so and waits for the next one. With -o json each change is one\n" +
			"JSON object in one line; the first ones are what is there at the start. Changes that follow each other within a tenth of a\n" +
			"second may be one change.",
		Example: "  gpu-device-plugin status -o wide\n  gpu-device-plugin status --watch -o json",
		Args:    cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	o := addOutputFlag(cmd, outputWide)
	watched := cmd.Flags().BoolP("watch", "w", false, "print changes until SIGINT")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		v := newView(cmd.OutOrStdout(), o.format == outputWide)
		if *watched {
			w, err := newWatcher(cmd.OutOrStdout(), o.format, v)
			if err != nil {
				return err
			}
			return w.follow(cmd.Context(), *socket)
		}
		var s status.Status
		if err := control.Call(cmd.Context(), *socket, callStatus, nil, &s); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), s, func(w io.Writer) { printStatus(w, s, v) })
	}
	return cmd
}

func (d *daemon) status(ctx context.Context) (status.Status, error) {
	seen, err := d.monitor.Status(ctx)
	if err != nil {
		return status.Status{}, err
	}
	offered := d.set.Offered().Value()
	s := status.Status{
		Version: version.String(), Simulated: d.config.Simulate, ConfigFile: d.watcher.Configs().Value().File,
		Driver: seen.Snapshot.Driver.Version, Looked: status.Moment(seen.Looked), Stale: seen.Snapshot.Stale,
		Quiet: !seen.Quiesced.IsZero(), Node: seen.Node,
		NotAsked: seen.NotAsked, GPUs: status.Devices(seen.Snapshot, seen.GPUs), LeftOut: status.LeftOut(seen.Snapshot, offered),
		Resources: resources(d.set.Status()), Warnings: offered.OtherWarnings(),
		DRA: d.allocation(), MIG: d.layout(), Holds: holds(offered.Holds), ConfigGeneration: d.watcher.Generation(),
		Readiness: d.readiness.Answer().Value(),
		MPS:       slices.Sorted(maps.Values(d.mps.Unready().Value())),
		CUDA:      seen.Snapshot.Driver.CUDA, Generation: seen.Snapshot.Generation, ConfigLoaded: status.Moment(d.watcher.Loaded()),
		Reexecutions: reexecutions(),
	}
	for i := range s.Resources {
		_, s.Resources[i].Planned = offered.Resource(s.Resources[i].Name)
	}
	if d.directory != nil {
		s.Kubelets = d.directory.Kubelets()
	}
	if err := d.unheard.Value(); err != nil {
		s.MetricsError = err.Error()
	}
	if err := d.unlabeled.Value(); err != nil {
		s.LabelsError = err.Error()
	}
	if d.cluster != nil {
		if err := d.cluster.Problem(); err != nil {
			s.APIServerError = err.Error()
		}
	}
	if !seen.Quiesced.IsZero() {
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
	s.Summary = status.Summarize(s)
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
