package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// printSlices prints the ResourceSlices of the configured node. Omitted devices are printed to
// standard error, because a ResourceSlice has no place for them.
func printSlices(cmd *cobra.Command, o *output, c config.Config) error {
	if c.NodeName == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("find the name of the node: %w; set --node-name", err)
		}
		c.NodeName = host
	}
	var pool dra.Pool
	err := withSession(cmd.Context(), c, func(ctx context.Context, session *nvidia.Session) (err error) {
		pool, err = poolOnce(ctx, c, session)
		return err
	})
	if err != nil {
		return err
	}
	for _, l := range pool.LeftOut {
		fmt.Fprintf(cmd.ErrOrStderr(), "left out: %s\n", l)
	}
	list := pool.List()
	return o.print(cmd.OutOrStdout(), &list, func(w io.Writer) { slicesTable(w, pool) })
}

// poolOnce returns the present pool of a node, with the numbers of its GPUs and the MIG
// devices of its claims from the daemon's state directory. A simulated node has no such
// state.
func poolOnce(ctx context.Context, c config.Config, session *nvidia.Session) (dra.Pool, error) {
	snapshot, err := scan(ctx, c, session)
	if err != nil {
		return dra.Pool{}, err
	}
	o := claims.Options{
		Hardware:   claims.Hardware{Driver: divisionReader{session: session}},
		Inputs:     claims.Inputs{Configs: feed.New(c)},
		Files:      claims.Files{CDIDir: c.CDIDir, BootID: daemon.BootID(nil)},
		DriverName: c.DRADriver,
	}
	numbers := dra.Numbers{}
	if c.Simulate == "" && c.StateDir != "" {
		o.StateDir = c.StateDir
		if numbers, err = pool.KnownNumbers(c.StateDir); err != nil {
			return dra.Pool{}, err
		}
	}
	divisions, err := claims.New(o).Divisions(ctx, snapshot)
	if err != nil {
		return dra.Pool{}, err
	}
	owners := dra.All(snapshot.GPUs)
	if c.DRA.Mode != config.DRAOff {
		for _, g := range snapshot.GPUs {
			if !c.GivenByDRA(g) {
				owners[g.UUID] = dra.OwnedByPlugin
			}
		}
	}
	pool := dra.New(snapshot, c.NodeName, numbers.With(snapshot.GPUs), owners, divisions).SharedBy(c.DRA.ShareBy,
		c.DRA.Shares)
	pool.Driver = c.DRADriver
	return pool, nil
}

// divisionReader reads the division of GPUs, and implements nothing else of a claims.Divider.
type divisionReader struct {
	claims.Divider
	session *nvidia.Session
}

func (d divisionReader) Partitions(ctx context.Context, uuid string) (inventory.Partitions, error) {
	return d.session.Partitions(ctx, uuid)
}

func slicesTable(w io.Writer, pool dra.Pool) {
	for i, slice := range pool.Slices {
		content := wording.Count(len(slice.Devices), "device")
		if slice.SharedCounters != nil {
			content = "counters of " + wording.Count(len(slice.SharedCounters), "GPU")
		}
		fmt.Fprintf(w, "pool %s, slice %d of %d: %s\n", pool.Name, i+1, len(pool.Slices), content)
		for _, set := range slice.SharedCounters {
			fmt.Fprintf(w, "  %s: %s\n", set.Name, countersText(set.Counters))
		}
		if len(slice.Devices) > 0 {
			columns := "GROUP OF 2\tOF 4\tOF 8\t"
			if slice.Counted() {
				columns = "TAKES\t"
			}
			if slice.Shared() {
				columns += "SHARES\t"
			}
			fmt.Fprintf(w, "  DEVICE\tPROFILE\tPRODUCT\t%sTAINT\n", columns)
		}
		for _, d := range slice.Devices {
			value := func(attribute string) string { return cmp.Or(d.Attributes[attribute].Value, "-") }
			fmt.Fprintf(w, "  %s\t%s\t%s\t", d.Name, value("profile"), value("productName"))
			for _, use := range d.ConsumesCounters {
				fmt.Fprintf(w, "%s\t", countersText(use.Counters))
			}
			if !slice.Counted() {
				fmt.Fprintf(w, "%s\t%s\t%s\t", value(dra.Domain+"/linkGroup2"), value(dra.Domain+"/linkGroup4"),
					value(dra.Domain+"/linkGroup8"))
			}
			if slice.Shared() {
				fmt.Fprintf(w, "%s\t", sharesText(d))
			}
			var taints []string
			for _, t := range d.Taints {
				taints = append(taints, strings.TrimSuffix(t.Key+"="+t.Value, "=")+":"+t.Effect)
			}
			fmt.Fprintln(w, cmp.Or(strings.Join(taints, ","), "-"))
		}
	}
}

// sharesText returns the greatest number of claims of a device, and the smallest part of its memory
// for a claim.
func sharesText(d dra.Device) string {
	switch {
	case d.SharedBy == dra.ByCount:
		shares := d.Capacity[dra.SharesCapacity]
		return shares.String()
	case d.SharedBy != "":
		return string(d.SharedBy)
	case d.SmallestShare <= 0:
		return "-"
	}
	return fmt.Sprintf("%d x %d MiB", d.Capacity[dra.MemoryCapacity]/d.SmallestShare, d.SmallestShare>>20)
}

// countersText writes counters in one line, with values other than 1.
func countersText(counters map[string]dra.Capacity) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counters)) {
		if parts = append(parts, name); counters[name] != 1 {
			parts[len(parts)-1] += "=" + counters[name].String()
		}
	}
	return strings.Join(parts, " ")
}
