package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
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
		var s reported
		if err := control.Call(cmd.Context(), *socket, callStatus, nil, &s); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), s, s.table)
	}
	return cmd
}

// reported is what a daemon says of itself and its node. Times are in UTC, as RFC 3339 writes them.
type reported struct {
	Version   string `json:"version"`
	Simulated string `json:"simulated,omitempty"` // the profile, on a simulated node
	Driver    string `json:"driver,omitempty"`
	Looked    string `json:"looked,omitempty"`  // when the node was last looked at with success
	Stale     string `json:"stale,omitempty"`   // why the last look failed
	Hanging   int    `json:"hanging,omitempty"` // how many calls into the driver do not return
	Quiet     bool   `json:"quiet,omitempty"`   // the driver was released until resume
	Node      string `json:"node,omitempty"`    // a reason that holds for all GPUs at once

	ConfigFile  string `json:"configFile,omitempty"`
	ConfigError string `json:"configError,omitempty"` // why the file as it is now is not in force

	GPUs      []reportedDevice   `json:"gpus"`
	LeftOut   []string           `json:"leftOut,omitempty"`   // which GPUs cannot be read, which devices are not offered, and why
	Unwatched []string           `json:"unwatched,omitempty"` // which GPUs give no events, and why: looks alone find their faults
	Resources []reportedResource `json:"resources"`
	Warnings  []string           `json:"warnings,omitempty"` // what else of the plan is not as one might expect
	MPS       []string           `json:"mps,omitempty"`      // why resources that are shared by MPS cannot be used
}

// reportedDevice is how one GPU or MIG device is.
type reportedDevice struct {
	Index  string   `json:"index"`
	UUID   string   `json:"uuid"`
	Model  string   `json:"model"`
	State  string   `json:"state"`
	Since  string   `json:"since,omitempty"`
	Reason string   `json:"reason,omitempty"`
	XID    uint64   `json:"xid,omitempty"`
	Cure   string   `json:"cure,omitempty"`
	Events []string `json:"events,omitempty"` // the last ones of each kind, with their counts
	// Signals is what was read last of a physical GPU.
	Signals *reportedSignals `json:"signals,omitempty"`
}

// reportedResource is how one resource is being served.
type reportedResource struct {
	Name    string `json:"name"`
	Devices int    `json:"devices"`
	Healthy int    `json:"healthy"`
	Server  string `json:"server"`
}

func (d *daemon) status(ctx context.Context) (reported, error) {
	seen, err := d.monitor.Status(ctx)
	if err != nil {
		return reported{}, err
	}
	s := reported{
		Version: version.String(), Simulated: d.config.Simulate, ConfigFile: d.config.File,
		Driver: seen.Snapshot.Driver.Version, Looked: stamp(seen.Looked), Stale: seen.Snapshot.Stale, Quiet: seen.Quiet, Node: seen.Node,
		Hanging: d.driver.Hanging(),
		GPUs:    deviceStatuses(seen), Resources: resourceStatuses(d.set.Status()),
	}
	if err := d.watcher.Faults().Value(); err != nil {
		s.ConfigError = err.Error()
	}
	for _, u := range seen.Unwatched {
		s.Unwatched = append(s.Unwatched, fmt.Sprintf("GPU %d: %s", u.Index, u.Reason))
	}
	offered := d.offered.Value()
	s.LeftOut, s.Warnings = leftOut(seen.Snapshot, offered), offered.OtherWarnings()
	s.MPS = slices.Sorted(maps.Values(d.mps.Unready().Value()))
	return s, nil
}

func deviceStatuses(seen monitor.Status) []reportedDevice {
	statuses := []reportedDevice{}
	for i, g := range seen.Snapshot.GPUs {
		known := seen.GPUs[i]
		whole := deviceStatus(fmt.Sprint(g.Index), g.UUID, g.Model, g.Health, known.Device)
		whole.Signals = signalStatus(known.Reading)
		statuses = append(statuses, whole)
		for _, m := range g.MIGDevices {
			var own health.Device
			if at := slices.IndexFunc(known.Instances, func(i health.Instance) bool { return i.UUID == m.UUID }); at >= 0 {
				own = known.Instances[at].Device
			}
			statuses = append(statuses, deviceStatus(fmt.Sprintf("%d:%d", g.Index, m.Index), m.UUID, "MIG "+m.Profile,
				inventory.Worst(g.Health, m.Health), own))
		}
	}
	return statuses
}

func deviceStatus(index, uuid, model string, h inventory.Health, d health.Device) reportedDevice {
	s := reportedDevice{
		Index: index, UUID: uuid, Model: model,
		State: h.State.String(), Since: stamp(h.Since), Reason: h.Reason, XID: h.XID, Cure: string(h.Cure),
	}
	for _, c := range d.Counts {
		what := c.Kind.String()
		if c.Kind == inventory.EventXID {
			what = fmt.Sprintf("XID %d", c.XID)
		}
		s.Events = append(s.Events, fmt.Sprintf("%s × %d, last %s", what, c.N, stamp(c.Last)))
	}
	return s
}

func resourceStatuses(served []plugin.Status) []reportedResource {
	statuses := make([]reportedResource, 0, len(served))
	for _, r := range served {
		statuses = append(statuses, reportedResource{Name: r.Resource, Devices: r.Devices, Healthy: r.Healthy, Server: string(r.Phase)})
	}
	return statuses
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

func (s reported) table(w io.Writer) {
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
		{"the last that succeeded", s.Looked},
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
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", g.Index, g.UUID, g.Model, g.State, orDash(g.Since), orDash(g.Cure),
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
