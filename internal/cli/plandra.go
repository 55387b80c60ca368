package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// printSlices prints the ResourceSlices of a node whose GPUs are seen for the first time. What they leave out goes to standard error,
// because a ResourceSlice has no place for it.
func printSlices(cmd *cobra.Command, o *output, snapshot inventory.Snapshot, node string) error {
	if node == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("find the name of the node: %w; set --node-name", err)
		}
		node = host
	}
	pool := dra.New(snapshot, node, dra.Numbers{}.With(snapshot.GPUs), dra.All(snapshot.GPUs))
	for _, l := range pool.LeftOut {
		fmt.Fprintf(cmd.ErrOrStderr(), "left out: %s\n", l)
	}
	return o.print(cmd.OutOrStdout(), pool.List(), func(w io.Writer) { slicesTable(w, pool) })
}

func slicesTable(w io.Writer, pool dra.Pool) {
	for i, slice := range pool.Slices {
		fmt.Fprintf(w, "pool %s, slice %d of %d: %d devices\n", pool.Name, i+1, len(pool.Slices), len(slice.Devices))
		if len(slice.Devices) == 0 {
			continue
		}
		fmt.Fprintln(w, "  DEVICE\tPROFILE\tPRODUCT\tGROUP OF 2\tOF 4\tOF 8\tTAINT")
		for _, d := range slice.Devices {
			value := func(attribute string) string { return orDash(d.Attributes[attribute].Value) }
			var taints []string
			for _, t := range d.Taints {
				taints = append(taints, strings.TrimSuffix(t.Key+"="+t.Value, "=")+":"+t.Effect)
			}
			fmt.Fprintf(w, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n", d.Name, value("profile"), value("productName"),
				value(dra.Domain+"/linkGroup2"), value(dra.Domain+"/linkGroup4"), value(dra.Domain+"/linkGroup8"),
				orDash(strings.Join(taints, ",")))
		}
	}
}
