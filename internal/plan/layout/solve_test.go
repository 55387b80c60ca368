package layout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// TestPack: compute instances of given sizes are put into as few GPU instances as they fit into.
func TestPack(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		instance string
		sizes    []int
		want     string // of each instance: start:size
	}{
		"one each":                   {"3g.40gb", []int{3, 3}, "0:3 | 0:3"},
		"parts of one":               {"3g.40gb", []int{1, 1, 1}, "0:1 1:1 2:1"},
		"small ones fill up":         {"3g.40gb", []int{2, 1, 2, 1}, "0:2 2:1 | 0:2 2:1"},
		"a large one and parts":      {"3g.40gb", []int{1, 3, 1}, "0:1 1:1 | 0:3"},
		"the large one goes up":      {"7g.80gb", []int{3, 2, 2}, "0:2 2:2 4:3"},
		"all sizes":                  {"7g.80gb", []int{1, 2, 4}, "0:4 4:2 6:1"},
		"three twos and a one":       {"7g.80gb", []int{2, 2, 2, 1}, "0:2 2:2 4:2 6:1"},
		"no room for one more":       {"7g.80gb", []int{2, 2, 2, 2}, ""},
		"no place though room":       {"7g.80gb", []int{3, 3, 2}, ""},
		"more than may be":           {"4g.40gb", []int{1, 1, 1, 1, 1}, ""},
		"more instances than needed": {"3g.40gb", []int{2, 2}, "0:2 | 0:2"},
		"a size that is not there":   {"4g.40gb", []int{3}, ""},
	} {
		devices := map[string]int{}
		for _, size := range tt.sizes {
			if _, all, _ := parse(tt.instance); size == all {
				devices[tt.instance]++
			} else {
				devices[fmt.Sprintf("%dc.%s", size, tt.instance)]++
			}
		}
		var got []string
		for _, i := range layout.Plan(onAllGPUs(devices), []layout.GPU{gpu(h100)}).GPUs[0].After.Instances {
			var one []string
			for _, c := range i.Computes {
				one = append(one, fmt.Sprintf("%d:%d", c.Start, c.Slices))
			}
			got = append(got, strings.Join(one, " "))
		}
		slices.Sort(got)
		if all := strings.Join(got, " | "); all != tt.want {
			t.Errorf("%s: got %q, want %q", name, all, tt.want)
		}
	}
}

// TestPackEnds: compute instances that do not fit into many GPU instances are refused soon. A
// driver that tells so many is wrong.
func TestPackEnds(t *testing.T) {
	t.Parallel()
	wrong := func(count int) layout.GPU {
		g := gpu(h100)
		g.Profiles = []inventory.MIGProfile{
			{Name: "7g.80gb", Count: count, Size: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}},
			{Name: "7g.81gb", Count: 1, Size: 8, Starts: []int{0}}, // the GPU has eight memory slices
		}
		return g
	}
	if c := layout.Plan(onAllGPUs(map[string]int{"1c.7g.80gb": 43}),
		[]layout.GPU{wrong(7)}).GPUs[0]; len(c.After.Instances) != 7 {
		t.Errorf("43 of one slice are packed into %d GPU instances of seven: %s", len(c.After.Instances), c.Reason)
	}
	if c := layout.Plan(onAllGPUs(map[string]int{"2c.7g.80gb": 16}), []layout.GPU{wrong(5)}); c.Possible() {
		t.Error("16 of two slices, of which three fit into each of five GPU instances, are possible")
	}
}

// TestMostThatFits compares what is said to fit of too much with the best of all ways: most memory
// slices, and of those most instances.
func TestMostThatFits(t *testing.T) {
	t.Parallel()
	ids := devices()
	compared := 0
	for seed := range uint64(1200) {
		r := rand.New(rand.NewPCG(seed, 5))
		device := ids[seed%uint64(len(ids))]
		profiles := profilesOf(device)
		var all []inventory.MIGProfile
		wanted := map[string]int{}
		for range 1 + r.IntN(5) {
			p := profiles[r.IntN(len(profiles))]
			all = append(all, p)
			wanted[p.Name]++
		}
		reason := layout.Plan(onAllGPUs(wanted), []layout.GPU{gpu(device)}).GPUs[0].Reason
		_, text, found := strings.Cut(reason, "of them, ")
		if !found {
			continue // all of it fits, or more of a profile than the GPU can have
		}
		compared++
		want, got := (&oracle{}).most(all), [2]int{}
		for some := range strings.SplitSeq(strings.TrimSuffix(text, " would fit"), ", ") {
			var n int
			var name string
			if _, err := fmt.Sscanf(some, "%d of %s", &n, &name); err != nil || n > wanted[name] {
				t.Fatalf("seed %d: %q: %v", seed, reason, err)
			}
			p := profiles[slices.Index(names(profiles), name)]
			got[0] += n * p.Size
			got[1] += n
		}
		if got != want {
			t.Fatalf("seed %d: of %v: %s: %v slices and instances, want %v", seed, names(all), reason, got, want)
		}
	}
	if compared < 200 {
		t.Errorf("%d layouts were compared", compared)
	}
}

// covered counts the memory slices of what was put down.
func (o *oracle) covered() int {
	n := 0
	for _, p := range o.put {
		n += p.profile.Size
	}
	return n
}

// most returns how many memory slices, and then how many instances, of some can be put beside those
// that were put down.
func (o *oracle) most(some []inventory.MIGProfile) [2]int {
	if len(some) == 0 {
		return [2]int{o.covered(), len(o.put)}
	}
	best := o.most(some[1:])
	for _, start := range some[0].Starts {
		next := target{profile: some[0], start: start}
		put := []string{next.profile.Name}
		for _, p := range o.put {
			put = append(put, p.profile.Name)
		}
		if o.collides(next) || !media(put) {
			continue
		}
		o.put = append(o.put, next)
		if got := o.most(some[1:]); slices.Compare(got[:], best[:]) > 0 {
			best = got
		}
		o.put = o.put[:len(o.put)-1]
	}
	return best
}
