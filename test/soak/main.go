// Command soak runs the daemon for a long time on simulated nodes with stand-in kubelets, has
// things happen to it at random, and holds it at every moment to what must be true then. It prints
// what was violated, what the daemon's process needed and how that grew, and exits with 1 if
// anything is not as it must be.
//
// On some nodes one process of the daemon lives from the beginning to the end, on others it is
// restarted, killed and replaced.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// options are what the command line says.
type options struct {
	daemon  string
	during  time.Duration
	seed    uint64
	out     string
	only    string
	slack   time.Duration
	verbose bool
}

// plans are the nodes.
var plans = []plan{
	{"enduring-1.37", standin.V137, true},
	{"enduring-1.36", standin.V136, true},
	{"restarted-1.37", standin.V137, false},
	{"restarted-1.36", standin.V136, false},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	var o options
	slack := 1
	flag.StringVar(&o.daemon, "daemon", "bin/gpu-device-plugin", "the daemon's binary")
	flag.DurationVar(&o.during, "time", 10*time.Minute, "how long")
	flag.Uint64Var(&o.seed, "seed", 0, "of what happens; 0 for another each time")
	flag.StringVar(&o.out, "out", "", "folder for the drawing and for the daemons' logs at violations; empty for none")
	flag.StringVar(&o.only, "only", "", "run only nodes whose name contains this: "+names())
	flag.IntVar(&slack, "slack", 1, "multiplies every deadline, for a machine that is busy")
	flag.BoolVar(&o.verbose, "v", false, "print what happens")
	flag.Parse()
	o.slack = time.Duration(slack)
	o.seed = cmp.Or(o.seed, uint64(time.Now().UnixNano()%1_000_000))
	if err := run(ctx, o); err != nil {
		fmt.Fprintf(os.Stderr, "Error: %v\n", err)
		os.Exit(1) //nolint:gocritic // stop has nothing to do any more
	}
}

func names() string {
	var all []string
	for _, p := range plans {
		all = append(all, p.name)
	}
	return strings.Join(all, ", ")
}

// run runs all nodes at a time, and prints the summary.
func run(ctx context.Context, o options) error {
	fmt.Printf("soak: %v, seed %d\n", o.during, o.seed)
	if o.out != "" {
		if err := os.MkdirAll(o.out, 0o750); err != nil {
			return err
		}
	}
	var stages []*stage
	var group sync.WaitGroup
	failures := make([]error, len(plans))
	for i, p := range plans {
		if !strings.Contains(p.name, o.only) {
			continue
		}
		s, err := newStage(o, p, o.seed+uint64(i))
		if err != nil {
			return err
		}
		stages = append(stages, s)
		group.Go(func() { failures[i] = s.run(ctx, o.seed+uint64(i)) })
	}
	group.Wait()
	bad := report(stages, o)
	if err := errors.Join(failures...); err != nil {
		return err
	}
	if bad > 0 {
		return fmt.Errorf("%d violations; seed %d", bad, o.seed)
	}
	return nil
}

// report prints the summary and returns how many things are not as they must be.
func report(stages []*stage, o options) int {
	bad := 0
	var curves []curve
	for _, s := range stages {
		lines, wrong := growth(s.equal)
		if !s.enduring {
			lines, wrong = nil, nil // each process lives for a short time
		} else {
			curves = append(curves, curve{s.name, s.samples})
		}
		for _, w := range wrong {
			s.violate("%s", w)
		}
		bad += len(s.violations)
		fmt.Printf("\n%s: %d violations\n", s.name, len(s.violations))
		for _, v := range s.violations {
			text, _, _ := strings.Cut(v.text, "\n")
			fmt.Printf("  after %.2f s: %s\n", v.at.Seconds(), text)
		}
		for _, line := range lines {
			fmt.Printf("  %s\n", line)
		}
		var counts []string
		for _, what := range slices.Sorted(maps.Keys(s.counts)) {
			counts = append(counts, fmt.Sprintf("%s %d", what, s.counts[what]))
		}
		fmt.Printf("  %s\n", strings.Join(counts, ", "))
	}
	if o.out != "" && len(curves) > 0 {
		path := filepath.Join(o.out, "soak.svg")
		if err := os.WriteFile(path, []byte(drawing(curves, o.during)), 0o600); err != nil {
			fmt.Println(err)
		}
		fmt.Printf("\ndrawing: %s\n", path)
	}
	return bad
}

// run has things happen on a stage, until its time is over.
func (s *stage) run(ctx context.Context, seed uint64) (err error) {
	ctx, cancel := context.WithDeadline(ctx, s.began.Add(s.options.during))
	defer cancel()
	end := context.WithoutCancel(ctx)
	if err := replace(s.configFile(), s.setting.file("")); err != nil {
		return err
	}
	defer func() {
		for _, n := range s.running() {
			err = errors.Join(err, s.stopDaemon(n, syscall.SIGTERM))
		}
		err = errors.Join(err, s.Close())
	}()
	watching, stopWatching := context.WithCancel(end)
	var watchers sync.WaitGroup
	defer watchers.Wait()
	defer stopWatching()
	watchers.Go(func() { s.watch(watching) })
	first, err := s.startDaemon(end)
	if err != nil {
		return err
	}
	s.awaitReady(end, first)
	s.settle(soon)
	watchers.Go(func() { s.measure(watching, max(time.Second, s.options.during/720)) })

	var phases int
	for ctx.Err() == nil {
		left := time.Until(s.began.Add(s.options.during))
		during := min(s.between(40*time.Second, 150*time.Second), max(left-10*time.Second, left/2))
		if err := s.act(ctx, during, seed+uint64(phases)*1000); err != nil {
			return err
		}
		phases++
		if err := s.quiet(end); err != nil {
			return err
		}
	}
	s.count("phases", phases)
	return nil
}

// act has things happen for a while.
func (s *stage) act(ctx context.Context, during time.Duration, seed uint64) error {
	end := context.WithoutCancel(ctx) // what began is brought to its end
	ctx, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	var pods sync.WaitGroup
	pods.Go(func() { s.runPods(ctx, seed) })
	defer pods.Wait()
	total := 0
	all := slices.DeleteFunc(actions(), func(a action) bool { return a.ending && s.enduring })
	for _, a := range all {
		total += a.weight
	}
	for ctx.Err() == nil {
		at := s.random.IntN(total)
		for _, a := range all {
			if at -= a.weight; at < 0 {
				s.count("actions", 1)
				if err := a.do(s, end); err != nil {
					return fmt.Errorf("%s: %w", a.name, err)
				}
				break
			}
		}
		pause(ctx, time.Duration(s.random.ExpFloat64()*float64(1500*time.Millisecond)))
	}
	return nil
}

// quiet repairs everything, takes the plain configuration, waits until kubelet sees the node as it
// is, and measures the daemon.
func (s *stage) quiet(ctx context.Context) error {
	s.note("quiet")
	s.disturb(s.gpus...)
	defer s.settle(0, s.gpus...)
	if err := s.repairAll(ctx); err != nil {
		return err
	}
	for _, g := range s.gpus {
		if g.removed {
			if err := s.plug(ctx, g); err != nil {
				return err
			}
		}
		if len(g.layout) > 0 {
			if err := s.layOut(ctx, g, nil); err != nil {
				return err
			}
		}
	}
	if err := s.configure(ctx, s.all[0], ""); err != nil {
		return err
	}
	if err := s.lookAgain(ctx); err != nil {
		return err
	}
	began := time.Now()
	err := node.Poll(ctx, 4*time.Minute*s.options.slack, nil, func(context.Context) error { return s.differs() })
	if err != nil {
		s.violate("after everything was repaired, and no pod held anything: %v", err)
	}
	// A resource whose devices have gone keeps its server until the configuration of resources
	// changes.
	for _, c := range []setting{s.all[len(s.all)-1], s.all[0]} {
		if err := s.configure(ctx, c, ""); err != nil {
			return err
		}
		pause(ctx, 2*time.Second)
	}
	if err := node.Poll(ctx, time.Minute*s.options.slack, nil, func(context.Context) error {
		if sockets := s.pluginSockets(); len(sockets) != 1 {
			return fmt.Errorf("there are other plugin sockets than that of %s: %v", wholeGPU, sockets)
		}
		return nil
	}); err != nil {
		s.violate("after the configuration changed: %v", err)
	}
	s.settleNow()
	s.note("quiet after %s, %v", short(time.Since(began)), s.growing())
	pause(ctx, 3*time.Second)
	s.leftovers()
	if now, ok := s.sampleNow(); ok {
		s.mu.Lock()
		s.equal = append(s.equal, now)
		s.mu.Unlock()
	}
	return nil
}

// differs returns how the list that kubelet has differs from what is wanted; nil if it does not.
func (s *stage) differs() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	want, view := s.wantLocked(), s.viewLocked()
	for k, w := range want {
		if view[k] != w.healthy {
			return fmt.Errorf("%s is Healthy: %t, want %t", k, view[k], w.healthy)
		}
	}
	for k := range view {
		if _, planned := want[k]; !planned {
			return fmt.Errorf("%s is listed", k)
		}
	}
	return nil
}

// growing says how the process has grown until now.
func (s *stage) growing() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	lines, _ := growth(s.equal)
	return lines
}

// settleNow says that from now on kubelet must see everything as it is.
func (s *stage) settleNow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy, s.settled = false, time.Now()
	for _, g := range s.gpus {
		g.busy, g.settled = false, time.Now()
	}
}

// leftovers looks for files that nobody needs, after a while in which nothing happened.
func (s *stage) leftovers() {
	for _, folder := range []string{"state", "cdi"} {
		entries, err := os.ReadDir(s.Path(folder))
		if err != nil {
			s.violate("%v", err)
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), "tmp") || len(entries) > 8 {
				s.violate("%s has %v", folder, entries)
				break
			}
		}
	}
}
