// Package layout decides the division of GPUs in multi-instance mode (MIG). It reads files of
// layouts, finds a placement for the instances of a layout, and returns the steps from the present
// division. Existing instances are kept if the layout has them. The package is policy: it changes
// nothing itself.
package layout

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// A size is the meaning of a MIG device's name, such as "1c.3g.40gb" or "1g.10gb+me".
type size struct {
	compute int    // slices of the compute instance
	slices  int    // compute slices of the GPU instance
	gib     int    // memory of the GPU instance
	suffix  string // attribute of the GPU instance: "", "+me", "+gfx", "+me.all", "-me"
}

var (
	sizePattern = regexp.MustCompile(
		`^(?:([1-9])c\.)?([1-9])g\.([1-9][0-9]{0,3})gb((?:[+-][a-z]+(?:\.[a-z]+)*(?:,[a-z]+(?:\.[a-z]+)*)*)?)$`)
	suffixes = []string{"", "+me", "+gfx", "+me.all", "-me"}
)

// parseSize parses the name of a MIG device.
func parseSize(name string) (size, error) {
	m := sizePattern.FindStringSubmatch(name)
	if m == nil {
		return size{}, fmt.Errorf("%q is not the name of a MIG profile: write it as in 1g.10gb, 1g.10gb+me or "+
			"1c.3g.40gb", name)
	}
	// The pattern matches only numbers here.
	number := func(text string) int { n, _ := strconv.Atoi(text); return n }
	s := size{slices: number(m[2]), gib: number(m[3]), suffix: m[4]}
	s.compute = cmp.Or(number(m[1]), s.slices)
	known := false
	for _, suffix := range suffixes {
		known = known || s.suffix == suffix
	}
	switch {
	case !known:
		return size{}, fmt.Errorf("%q has the attribute %s, which is not known: give one of %s, or none",
			name, s.suffix, strings.Join(suffixes[1:], ", "))
	case s.compute > s.slices:
		return size{}, fmt.Errorf("%q has more compute slices (%dc) than its GPU instance (%dg): give at most %dc",
			name, s.compute, s.slices, s.slices)
	}
	return s, nil
}

// instance returns the name of the GPU instance's profile.
func (s size) instance() string { return fmt.Sprintf("%dg.%dgb%s", s.slices, s.gib, s.suffix) }

// String returns the name in its shortest form.
func (s size) String() string { return deviceName(s.compute, s.slices, s.instance()) }

// deviceName returns the name of the MIG device with this number of compute slices in a GPU
// instance with this number of slices.
func deviceName(compute, slices int, instance string) string {
	if compute == slices {
		return instance
	}
	return fmt.Sprintf("%dc.%s", compute, instance)
}
