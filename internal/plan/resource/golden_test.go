package resource_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

var update = flag.Bool("update", false, "rewrite the golden plans")

// TestGoldenPlans holds what every simulated machine offers under the configurations that NVIDIA's
// documentation shows and under those of our extensions: testdata/plans/NAME.yaml is the file, its
// first line the arguments, and NAME.txt the plans.
func TestGoldenPlans(t *testing.T) {
	t.Parallel()
	nodes := map[string]inventory.Snapshot{}
	for _, name := range simulator.Names() {
		nodes[name] = scan(t, name)
	}
	files, err := filepath.Glob("testdata/plans/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no configurations: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			options := load(t, file)
			var got strings.Builder
			for _, name := range simulator.Names() {
				fmt.Fprintf(&got, "%s\n%s", name, describe(resource.New(nodes[name], options)))
			}
			golden := strings.TrimSuffix(file, ".yaml") + ".txt"
			if *update {
				if err := os.WriteFile(golden, []byte(got.String()), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")); diff != "" {
				t.Errorf("plans (-want +got); if that is right: go test ./internal/plan/resource -run TestGolden -update\n%s", diff)
			}
		})
	}
}

// scan looks at a simulated node by the code that looks at real ones.
func scan(t *testing.T, name string) inventory.Snapshot {
	t.Helper()
	var snapshot inventory.Snapshot
	simulated.InVirtualTime(t, func(t testing.TB) {
		_, session := simulated.Open(t, name)
		var err error
		if snapshot, err = session.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	return simulated.Healthy(snapshot)
}

// load reads a configuration file, and arguments from the comment that is its first line.
func load(t *testing.T, file string) resource.Options {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(data), "\n")
	flags := pflag.NewFlagSet(file, pflag.ContinueOnError)
	config.AddFlags(flags)
	if err := flags.Parse(strings.Fields(strings.TrimPrefix(first, "#"))); err != nil {
		t.Fatal(err)
	}
	c, warnings, err := config.Sources{Flags: flags}.Resolve(file, data)
	if err != nil || len(warnings) > 0 {
		t.Fatalf("%v, warnings %v", err, warnings)
	}
	return c.Resource
}

// describe writes a plan: a line for each resource with its capacity, one for each device with its
// replicas, and what is left out.
func describe(p resource.Plan) string {
	var b strings.Builder
	for _, r := range p.Resources {
		devices := slices.Collect(r.All())
		fmt.Fprintf(&b, "  %s: %d\n", r.Name, len(devices))
		for i := 0; i < len(devices); {
			d, n := devices[i], 0
			for ; i < len(devices) && devices[i].UUID == d.UUID; i++ {
				n++
			}
			fmt.Fprintf(&b, "    %s %s minor %d NUMA %d", d.Index, d.UUID, d.Minor, d.NUMANode)
			if d.Sharing != resource.Unshared {
				fmt.Fprintf(&b, " %s × %d", d.Sharing, n)
			}
			if d.GICap > 0 {
				fmt.Fprintf(&b, " GI %d cap %d, CI %d cap %d", d.GI, d.GICap, d.CI, d.CICap)
			}
			b.WriteByte('\n')
		}
	}
	for _, l := range p.LeftOut {
		fmt.Fprintf(&b, "  left out: %s: %s\n", l.Index, l.Reason)
	}
	return b.String()
}
