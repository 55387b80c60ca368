package layout

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

func TestPack(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		sizes         []int
		slices, limit int
		want          string // of each instance: start:size
	}{
		"one each":                   {[]int{3, 3}, 3, 2, "0:3 | 0:3"},
		"parts of one":               {[]int{1, 1, 1}, 3, 2, "0:1 1:1 2:1"},
		"small ones fill up":         {[]int{2, 1, 2, 1}, 3, 2, "0:2 2:1 | 0:2 2:1"},
		"a large one and parts":      {[]int{1, 3, 1}, 3, 2, "0:3 | 0:1 1:1"},
		"the large one goes up":      {[]int{3, 2, 2}, 7, 1, "0:2 2:2 4:3"},
		"all sizes":                  {[]int{1, 2, 4}, 7, 1, "0:4 4:2 6:1"},
		"three twos and a one":       {[]int{2, 2, 2, 1}, 7, 1, "0:2 2:2 4:2 6:1"},
		"no room for one more":       {[]int{2, 2, 2, 2}, 7, 1, ""},
		"no place though room":       {[]int{3, 3, 2}, 7, 1, ""},
		"more than may be":           {[]int{1, 1, 1, 1}, 3, 1, ""},
		"more instances than needed": {[]int{2, 2}, 3, 2, "0:2 | 0:2"},
		"a size that is not there":   {[]int{3}, 4, 1, ""},
	} {
		var got []string
		for _, computes := range pack(tt.sizes, tt.slices, tt.limit) {
			var one []string
			for _, c := range computes {
				one = append(one, fmt.Sprintf("%d:%d", c.Start, c.Slices))
			}
			got = append(got, strings.Join(one, " "))
		}
		if all := strings.Join(got, " | "); all != tt.want {
			t.Errorf("%s: got %q, want %q", name, all, tt.want)
		}
	}
}

// TestPackEnds: compute instances that do not fit into many GPU instances are refused soon. A driver that tells so many is wrong.
func TestPackEnds(t *testing.T) {
	t.Parallel()
	if got := pack(slices.Repeat([]int{1}, 43), 7, 7); len(got) != 7 {
		t.Errorf("43 of one slice are packed into %d GPU instances of seven", len(got))
	}
	if got := pack(slices.Repeat([]int{2}, 16), 7, 5); got != nil {
		t.Errorf("16 of two slices, of which three fit into a GPU instance: %v", got)
	}
}

// TestMostThatFits compares what fits of too much with the best of all ways: most memory slices, and of those most instances.
func TestMostThatFits(t *testing.T) {
	t.Parallel()
	devices := slices.Sorted(maps.Keys(models))
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 5))
		profiles := models[devices[seed%uint64(len(devices))]]
		var kinds []kind
		var all []inventory.MIGProfile
		for range 1 + r.IntN(5) {
			p := profiles[r.IntN(len(profiles))]
			all = append(all, p)
			at := slices.IndexFunc(kinds, func(k kind) bool { return k.profile.Name == p.Name })
			if at < 0 {
				kinds, at = append(kinds, kind{profile: p}), len(kinds)
			}
			kinds[at].count++
		}
		found, ok := solve(kinds, memorySlices(profiles), nil, true)
		var o oracle
		var put []string
		for _, s := range found {
			next := target{profile: kinds[s.kind].profile, start: s.start}
			if kinds[s.kind].count--; kinds[s.kind].count < 0 || o.collides(next) || !slices.Contains(next.profile.Starts, s.start) {
				t.Fatalf("seed %d: %v of %v", seed, found, names(all))
			}
			o.put, put = append(o.put, next), append(put, next.profile.Name)
		}
		want, got := (&oracle{}).most(all), [2]int{o.covered(), len(found)}
		if !ok || got != want || !media(put) {
			t.Fatalf("seed %d: of %v fit %v with %v slices and instances, want %v", seed, names(all), put, got, want)
		}
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

// most returns how many memory slices, and then how many instances, of some can be put beside those that were put down.
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
