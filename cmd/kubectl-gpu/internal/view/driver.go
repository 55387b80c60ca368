package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

// A DriverChange is the progress of a node that changes its driver, as its daemon says.
type DriverChange struct {
	Node string `json:"node"`
	driverchange.Status
}

// DriverOff is the word for a node on which no driver is wanted.
const DriverOff = "off"

// NewDriverChanges returns the progress of the nodes by the answers of their daemons, the worst first.
func NewDriverChanges(answers map[string]Answer) []DriverChange {
	all := []DriverChange{}
	for node, a := range answers {
		c := DriverChange{Node: node}
		switch {
		case a.Err != nil:
			continue
		case a.Status.DriverChange != nil:
			c.Status = *a.Status.DriverChange
		default:
			c.Loaded = a.Status.Driver
		}
		if c.State == driverchange.Off {
			c.State = DriverOff
		}
		all = append(all, c)
	}
	badness := func(s driverchange.State) int {
		if s == DriverOff {
			return len(driverchange.States)
		}
		return slices.Index(driverchange.States, s) // -1 for a state of a newer daemon
	}
	slices.SortFunc(all, func(a, b DriverChange) int {
		return cmp.Or(badness(a.State)-badness(b.State), cmp.Compare(a.Node, b.Node))
	})
	return all
}

// DriverTotals returns a sentence with the number of nodes by state.
func DriverTotals(all []DriverChange) string {
	var counts []string
	for rest := all; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(c DriverChange) bool { return c.State != rest[0].State })
		if n < 0 {
			n = len(rest)
		}
		counts = append(counts, fmt.Sprintf("%d %s", n, rest[0].State))
		rest = rest[n:]
	}
	return fmt.Sprintf("Nodes: %d: %s.", len(all), strings.Join(counts, ", "))
}

// barWidth is the width of a progress bar without its frame.
const barWidth = 10

// Bar returns the progress of a change as a bar with its percentage; empty if no change is under way.
func (c DriverChange) Bar() string {
	if c.Percent <= 0 || c.Percent > 100 {
		return ""
	}
	done := c.Percent * barWidth / 100
	return fmt.Sprintf("[%s%s] %d%%", strings.Repeat("#", done), strings.Repeat(".", barWidth-done), c.Percent)
}
