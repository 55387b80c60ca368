// Command faults injects every fault that a node can have into the daemon's process, on a simulated node with a stand-in
// kubelet, before the daemon starts and while it runs. It prints one row for each: what kubelet saw, after how long, and
// what came of the cure; and it fails if a row is not as it has to be.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sync/errgroup"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	daemon := flag.String("daemon", "bin/gpu-device-plugin", "the daemon's binary")
	only := flag.String("only", "", "play the faults that match this regular expression alone")
	parallel := flag.Int("parallel", 20, "how many nodes there are at a time; they mostly wait")
	flag.Parse()
	if err := run(ctx, *daemon, *only, *parallel); err != nil {
		fmt.Fprintf(os.Stderr, "Error: %v\n", err)
		os.Exit(1)
	}
}

// run plays the faults and prints the table. The error says how many rows are wrong.
func run(ctx context.Context, daemon, only string, parallel int) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("read -only: %w", err)
	}
	began := time.Now()
	var plays []*play
	for _, f := range slices.Concat(xidFaults, readingFaults, busFaults, driverFaults, instanceFaults, operatorFaults) {
		if wanted.MatchString(f.name) {
			plays = append(plays, f.plays(daemon)...)
		}
	}
	var nodes errgroup.Group
	nodes.SetLimit(parallel)
	for _, p := range plays {
		nodes.Go(func() error {
			p.run(ctx)
			return nil
		})
	}
	_ = nodes.Wait() // how a play ended is in it
	printTable(os.Stdout, plays)
	wrong := 0
	for _, p := range plays {
		if p.err != nil {
			wrong++
			fmt.Printf("\nWRONG: %s, %s: %v\n", p.fault.name, p.when, p.err)
		}
	}
	fmt.Printf("\n%d rows, %d of them wrong, in %s.\n", len(plays), wrong, time.Since(began).Round(time.Second))
	if wrong > 0 {
		return errors.New("the daemon does not do as it should")
	}
	return ctx.Err()
}

// printTable prints a row for each play: the strike and the cure; what else belongs to it follows below.
func printTable(w io.Writer, plays []*play) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	defer table.Flush()
	fmt.Fprintln(table, "FAULT\tSTRIKES\tKUBELET SEES\tAFTER\tTHEN\tKUBELET SEES\tAFTER\t")
	for _, p := range plays {
		verdict := "right"
		if p.err != nil {
			verdict = "WRONG"
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
}
