package topology_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

var (
	update  = flag.Bool("update", false, "write the figures of the simulated day into docs/dev/topology.md")
	measure = flag.Bool("measure", false, "measure the time of choices on this machine and write it into "+
		"docs/dev/topology.md")
)

const docs = "../../../docs/dev"

// dayMachines are the machines of the simulated day: the simulator's profiles of several whole
// GPUs, and machines that are broken, irregular or large. A profile whose GPUs are connected as
// those of another is left out.
func dayMachines(t *testing.T) []machine {
	var machines []machine
	for _, name := range slices.Sorted(slices.Values(simulator.Names())) {
		if slices.Contains([]string{"gb300-nvl72", "hgx-h20", "l40-x4", "p100-x4"}, name) {
			continue
		}
		m := scan(t, name)
		mig := slices.ContainsFunc(m.gpus, func(g inventory.GPU) bool { return g.MIG == inventory.MIGEnabled })
		if len(m.gpus) > 1 && !mig {
			machines = append(machines, m)
		}
	}
	return append(machines,
		machine{"dgx-1, a GPU lost", dgx1Lost()},
		machine{"dgx-1, a link down", dgx1LinkDown()},
		machine{"pcie-8", pcieOnly(8, 2)},
		machine{"bridges-8", bridges(8)},
		machine{"random-8", random(8, 1)},
		machine{"pcie-16", pcieOnly(16, 4)},
		machine{"two boards", boards(16)},
		machine{"two cubes", cubes(16)},
		machine{"random-16", random(16, 1)},
	)
}

// TestDay has 20,000 pods come and go on each machine, placed by each policy. This one must not
// lose to any other with the light mix; with the heavy one, which mends what the policies break, it
// may lose a little to the reference.
func TestDay(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	var labels []string
	plot := make([]series, len(policies))
	for _, part := range []struct {
		sizes    mix
		title    string
		mostLost float64
	}{
		{lightMix, "50, 25, 20 and 5 % of the pods want 1, 2, 4 and 8 GPUs", 0},
		{heavyMix, "30, 30, 30 and 10 % of the pods want 1, 2, 4 and 8 GPUs", 0.02},
	} {
		fmt.Fprintf(&text, "\n%s:\n\n| machine | %s | 4 GPUs at their best: %s |\n|---|---|---|---|---|---|\n",
			part.title, strings.Join(policies, " | "), strings.Join(policies[1:], " / "))
		for _, m := range dayMachines(t) {
			g := topology.New(m.gpus)
			healthy := usable(g, m.gpus)
			pods := newDay(20_000, healthy.Len(), part.sizes, 1)
			var results []result
			for i, place := range placers(g) {
				r := pods.live(g, healthy, place)
				results = append(results, r)
				if part.mostLost == 0 {
					plot[i].name = policies[i]
					plot[i].values = append(plot[i].values, r.mean)
				}
			}
			if part.mostLost == 0 {
				labels = append(labels, m.name)
			}
			ours := results[len(results)-1]
			fmt.Fprintf(&text, "| %s |", m.name)
			for i, r := range results {
				fmt.Fprintf(&text, " %.3f |", r.mean)
				if ours.mean < r.mean-part.mostLost {
					t.Errorf("%s; %s: %s is better: %.4f, ours %.4f", part.title, m.name, policies[i], r.mean,
						ours.mean)
				}
			}
			fmt.Fprintf(&text, " %.0f / %.0f / %.0f %% |\n", 100*results[1].fours, 100*results[2].fours, 100*ours.fours)
		}
	}
	picture := bars("Mean normalised score of a day's pods", labels, plot)
	if *update {
		replaceGenerated(t, "day", text.String())
		write(t, "topology-day.svg", picture)
		return
	}
	if !strings.Contains(read(t, "topology.md"), text.String()) || read(t, "topology-day.svg") != picture {
		t.Error("docs/dev/topology.md has other figures than these: run go test ./internal/gpu/topology -run TestDay " +
			"-update")
	}
}

// TestMeasure measures the time of a choice over the number of GPUs: the lower quartile of many
// calls, which other users of the machine disturb least, at the size that takes longest, everything
// available.
func TestMeasure(t *testing.T) {
	if !*measure {
		t.Skip("measures only with -measure")
	}
	families := []struct {
		name string
		make func(n int) []inventory.GPU
	}{
		{"uniform", uniform},
		{"pcie", func(n int) []inventory.GPU { return pcieOnly(n, 4) }},
		{"bridges", bridges},
		{"cubes", cubes},
		{"random", func(n int) []inventory.GPU { return random(n, 1) }},
	}
	var xs []int
	rows := make([]series, len(families))
	var text strings.Builder
	text.WriteString("\n| GPUs |")
	for i, f := range families {
		rows[i].name = f.name
		fmt.Fprintf(&text, " %s |", f.name)
	}
	text.WriteString("\n|---|" + strings.Repeat("---|", len(families)) + "\n")
	for n := 2; n <= 32; n += 2 {
		xs = append(xs, n)
		fmt.Fprintf(&text, "| %d |", n)
		for i, f := range families {
			worst, exact := slowest(topology.New(f.make(n)))
			rows[i].values = append(rows[i].values, float64(worst.Nanoseconds())/1000)
			fmt.Fprintf(&text, " %.1f%s |", float64(worst.Nanoseconds())/1000, map[bool]string{false: " *"}[exact])
		}
		text.WriteString("\n")
	}
	replaceGenerated(t, "time", text.String())
	write(t, "topology-time.svg", curves("Time of a choice in µs, at its slowest size", "GPUs", xs, rows))
}

// slowest returns the time of a choice at the size where it is longest, and whether it is exact at
// every size.
func slowest(g *topology.Graph) (worst time.Duration, exact bool) {
	exact = true
	for size := range g.Len() + 1 {
		request := topology.Request{Available: g.Everything(), Size: size}
		var times []time.Duration
		for range 51 {
			start := time.Now()
			choice, _ := g.Choose(request)
			times = append(times, time.Since(start))
			exact = exact && choice.Exact
		}
		slices.Sort(times)
		worst = max(worst, times[len(times)/4])
	}
	return worst, exact
}

// replaceGenerated writes text between the marks of a part of docs/dev/topology.md.
func replaceGenerated(t *testing.T, part, text string) {
	t.Helper()
	begin, end := "<!-- generated: "+part+" -->\n", "<!-- end: "+part+" -->"
	before, rest, found := strings.Cut(read(t, "topology.md"), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("docs/dev/topology.md has no marks of the part %q", part)
	}
	write(t, "topology.md", before+begin+text+"\n"+end+after)
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(docs, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(docs, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
