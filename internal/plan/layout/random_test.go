package layout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// random returns a GPU with random instances that have a place, and a random layout for it.
func random(r *rand.Rand, device uint32) (layout.GPU, map[string]int) {
	profiles := profilesOf(device)
	var instances []string
	taken := map[int]bool{}
	for range r.IntN(8) {
		p := profiles[r.IntN(len(profiles))]
		start := p.Starts[r.IntN(len(p.Starts))]
		free := true
		for s := start; s < start+p.Size; s++ {
			free = free && !taken[s]
		}
		if !free {
			continue
		}
		for s := start; s < start+p.Size; s++ {
			taken[s] = true
		}
		text := fmt.Sprintf("%s@%d", p.Name, start)
		if _, all, _ := parse(p.Name); all == 3 && r.IntN(3) == 0 {
			text = "1c." + text
		}
		text += []string{"", "?", "!", "!"}[r.IntN(4)]
		instances = append(instances, text)
	}
	devices := map[string]int{}
	for range 1 + r.IntN(6) {
		name := profiles[r.IntN(len(profiles))].Name
		if _, all, _ := parse(name); all > 1 && r.IntN(5) == 0 {
			name = "1c." + name
		}
		devices[name]++
	}
	return gpu(device, instances...), devices
}

// TestRandomLayouts holds what must hold of every change, and that the solver finds the best one:
// that of the oracle.
func TestRandomLayouts(t *testing.T) {
	t.Parallel()
	ids := devices()
	possible := 0
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 12))
		g, wanted := random(r, ids[seed%uint64(len(ids))])
		c := layout.Plan(onAllGPUs(wanted), []layout.GPU{g}).GPUs[0]
		if diff := cmp.Diff(c, layout.Plan(onAllGPUs(maps.Clone(wanted)), []layout.GPU{g}).GPUs[0],
			cmpopts.IgnoreUnexported(layout.Part{})); diff != "" {
			t.Fatalf("seed %d: the same layout gives another change:\n%s", seed, diff)
		}
		problem := judge(g, wanted, c)
		if c.Reason == "" {
			possible++
		}
		if problem != "" {
			t.Fatalf("seed %d: %v has %v, wants %v: %s\n%s", seed, g.PCIDevice, g.Instances, wanted, problem,
				strings.Join(show(c), "\n"))
		}
	}
	if possible < 600 || possible > 2400 {
		t.Errorf("%d of 3000 layouts are possible: the test does not try both", possible)
	}
}

// FuzzPlan is TestRandomLayouts for any seed.
func FuzzPlan(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	ids := devices()
	f.Fuzz(func(t *testing.T, a, b uint64) {
		g, wanted := random(rand.New(rand.NewPCG(a, b)), ids[a%uint64(len(ids))])
		if problem := judge(g, wanted, layout.Plan(onAllGPUs(wanted), []layout.GPU{g}).GPUs[0]); problem != "" {
			t.Errorf("%v has %v, wants %v: %s", g.PCIDevice, g.Instances, wanted, problem)
		}
	})
}

// BenchmarkPlan plans 8 GPUs, each of which has something else than the layout wants.
func BenchmarkPlan(b *testing.B) {
	for name, devices := range map[string]map[string]int{
		"balanced":   {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
		"many kinds": {"1g.10gb": 2, "1g.10gb+me": 1, "1g.20gb": 1, "2g.20gb": 1},
		"impossible": {"1g.10gb": 7, "1g.10gb+me": 1, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1},
		"all kinds of another model": {
			"1g.24gb": 4, "1g.24gb+me": 1, "1g.24gb+gfx": 4, "1g.24gb-me": 4, "2g.48gb": 2, "2g.48gb+gfx": 2,
			"2g.48gb-me": 2,
			"4g.96gb":    1,
		},
	} {
		b.Run(name, func(b *testing.B) {
			var gpus []layout.GPU
			model := uint32(h100)
			if devices["1g.24gb"] > 0 {
				model = rtx
			}
			for i := range 8 {
				g, _ := random(rand.New(rand.NewPCG(uint64(i), 1)), model)
				g.Index, g.UUID = i, fmt.Sprint("GPU-", i)
				gpus = append(gpus, g)
			}
			for b.Loop() {
				layout.Plan(onAllGPUs(devices), gpus)
			}
		})
	}
}
