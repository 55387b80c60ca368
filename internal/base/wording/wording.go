// Package wording has the parts of sentences that messages share.
package wording

import (
	"fmt"
	"slices"
	"strings"
)

// maxListed is how many names List shows.
const maxListed = 5

// List joins names for a message, sorted. Of more than five, it shows the first five and the number of
// the others.
func List(names []string) string {
	names = slices.Sorted(slices.Values(names))
	if len(names) > maxListed {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:maxListed], ", "), len(names)-maxListed)
	}
	return strings.Join(names, ", ")
}

// Count returns a number of things as text: "1 GPU", "2 GPUs", "2 NVSwitches", "2 processes".
func Count(n int, what string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(what, "ch"), strings.HasSuffix(what, "s"):
		what += "es"
	default:
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}
