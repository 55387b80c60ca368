package faults

import (
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
)

var daemon = flag.String("daemon", "", "the daemon's binary")

// TestFaults is the matrix: a subtest for each fault, and below it one for each time at which it
// strikes. Nodes mostly wait, so many of them are played at a time (-parallel).
func TestFaults(t *testing.T) {
	if *daemon == "" {
		t.Skip("make faults plays them: it takes minutes, and needs the daemon's binary (-daemon)")
	}
	var plays []*play
	t.Cleanup(func() { printTable(os.Stdout, plays) })
	for _, f := range slices.Concat(xidFaults, readingFaults, busFaults, driverFaults, instanceFaults, operatorFaults,
		surroundingFaults) {
		for _, p := range f.plays(*daemon) {
			plays = append(plays, p)
			t.Run(f.name+"/"+p.when, func(t *testing.T) {
				t.Parallel()
				p.run(t.Context())
				for _, s := range p.steps {
					t.Logf("%s: kubelet sees %s, after %s", s.did, s.seen, s.after)
				}
				if p.err != nil {
					t.Error(p.err)
				}
			})
		}
	}
}

// printTable prints a row for each play that was played: the fault and the repair; what else
// belongs to it follows below.
func printTable(w io.Writer, plays []*play) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "FAULT\tSTRIKES\tKUBELET SEES\tAFTER\tTHEN\tKUBELET SEES\tAFTER\t")
	rows, wrong := 0, 0
	for _, p := range plays {
		if !p.played {
			continue // -run left it out
		}
		rows++
		verdict := "right"
		if p.err != nil {
			verdict = "WRONG"
			wrong++
		}
		first := []string{p.fault.name, p.when, "", ""}
		steps := p.steps
		if len(steps) > 0 {
			first[2], first[3] = steps[0].seen, steps[0].after
			steps = steps[1:]
		}
		for i := 0; i == 0 || i < len(steps); i++ {
			then := []string{"", "", ""}
			if i < len(steps) {
				then = []string{steps[i].did, steps[i].seen, steps[i].after}
			}
			fmt.Fprintln(table, strings.Join(slices.Concat(first, then, []string{verdict}), "\t"))
			first, verdict = []string{"", "", "", ""}, ""
		}
	}
	_ = table.Flush() // to standard output
	fmt.Fprintf(w, "\n%d rows, %d of them wrong.\n", rows, wrong)
}
