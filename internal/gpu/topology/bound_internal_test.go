package topology

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestBoundOfASearchThatEnded: no set that was not looked at has a higher score. What is left of a
// point counts as one.
func TestBoundOfASearchThatEnded(t *testing.T) {
	t.Parallel()
	g := New([]inventory.GPU{{UUID: "a"}, {UUID: "b", Index: 1}})
	for name, tt := range map[string]struct {
		open  int64
		bound int64
		exact bool
	}{
		"all was looked at": {0, 0, true},
		"a part of a point": {1, 1, false},
		"five points":       {5 * unit, 5, false},
		"a little more":     {5*unit + 1, 6, false},
		"a little less":     {5*unit - 1, 5, false},
	} {
		s := &search{n: 1, best: []rankedSet{{value: 0, set: 1}}, open: tt.open}
		if c := g.choice(s, 0, Request{Available: SetOf(0), Size: 1}); c.Bound != tt.bound || c.Exact != tt.exact ||
			c.Set != SetOf(0) {
			t.Errorf("%s: %+v, want the bound %d", name, c, tt.bound)
		}
	}
}
