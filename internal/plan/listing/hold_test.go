package listing_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestHoldsAboutPods: each device that a rule of this package withholds has a hold with its row.
func TestHoldsAboutPods(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		prepare func(c *node)
		row     resource.Row
		device  string
		says    string
	}{
		"in use in another form": {func(c *node) {
			c.plan(1)
			c.plan(2)
			c.holds("G0")
		}, resource.RowForm, "G0", "pod p holds it"},
		"before the taint": {func(c *node) {
			c.announce = true
			c.plan(4)
			c.plan(2)
			c.planWith(resource.Options{})
		}, resource.RowTaint, "G0", "is tainted before that"},
		"offered a moment ago": {func(c *node) {
			c.plan(1)
			c.plan(2)
			c.holds()
		}, resource.RowGrowth, "G1", "a moment ago"},
		"units of another GPU": {func(c *node) { c.planUnits(0) }, resource.RowUnits, "G1", "another GPU offers"},
		"units of as many containers as can use the GPU": {func(c *node) {
			c.planUnits(0)
			for i := range 48 {
				c.holders.Occupy(inUnits, []string{fmt.Sprint("G0::", 100+i)}, c.now)
			}
			c.planUnits(0)
		}, resource.RowUnits, "G0", "no more containers"},
		"units that left": {func(c *node) {
			c.gpus = c.gpus[:1]
			c.planUnits(0)
			for _, id := range []string{"G0::2", "G0::3"} {
				c.held[keyOf(inUnits, id)] = holders.Holder{Pod: "p"}
			}
			c.reads()
			c.planUnits(2)
			c.reads()
		}, resource.RowUnits, "G0", "that left the plan"},
	} {
		c := newNode(t, 2)
		tt.prepare(c)
		found := false
		for _, h := range c.Latest().Plan.Holds {
			found = found || h.Row == tt.row && h.UUID == tt.device && strings.Contains(h.Reason, tt.says) && !h.Waits
		}
		if !found {
			t.Errorf("%s: holds %+v", name, c.Latest().Plan.Holds)
		}
	}
}

// TestWhenADecisionIsDue: GPUs grow after half a second, and a change waits for the taint for 30 s.
func TestWhenADecisionIsDue(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.announce = true
	c.plan(4)
	began := c.now
	c.plan(1)
	if d := c.Latest(); d.Pending == 0 || !d.Again.Equal(began.Add(30*time.Second)) {
		t.Errorf("change %d waits until %v", d.Pending, d.Again)
	}
	c.State = c.Approve(c.Latest().Pending+1, c.holders, c.now)
	if c.Latest().Pending == 0 {
		t.Error("another change is approved")
	}
	c.State = c.Approve(c.Latest().Pending, c.holders, c.now)
	if c.Latest().Pending != 0 {
		t.Error("the change still waits")
	}
	c.announce = false
	c.plan(2)
	c.holds()
	if d := c.Latest(); !d.Again.Equal(c.now.Add(growsAfter)) {
		t.Errorf("the next decision is due at %v", d.Again)
	}
}
