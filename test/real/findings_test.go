package real_test

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
	"text/tabwriter"
)

// A finding is what a part of NVIDIA's did.
type finding struct{ part, of, says string }

var findings struct {
	sync.Mutex
	all []finding
}

// found notes a finding for the table at the end.
func found(part, of, format string, values ...any) {
	findings.Lock()
	defer findings.Unlock()
	findings.all = append(findings.all, finding{part, of, fmt.Sprintf(format, values...)})
}

// printFindings prints the table.
func printFindings() {
	slices.SortFunc(findings.all, func(a, b finding) int {
		return cmp.Or(cmp.Compare(a.part, b.part), cmp.Compare(a.of, b.of), cmp.Compare(a.says, b.says))
	})
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, f := range findings.all {
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.part, f.of, f.says)
	}
	_ = w.Flush() // the tests have told
}
