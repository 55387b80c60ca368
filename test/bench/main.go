// Command bench measures the daemon's process, on a simulated node with a stand-in kubelet, and
// prints each figure beside what it has to reach. It judges nothing: machines are shared and noisy,
// and who reads the figures knows on which machine they were taken.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"syscall"
	"time"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const (
	gpu = "nvidia.com/gpu"
	// patience bounds every wait for something that must happen.
	patience = 30 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	daemon := flag.String("daemon", "bin/gpu-device-plugin", "the daemon's binary")
	only := flag.String("only", "", "measure what matches this regular expression alone")
	flag.StringVar(&besideBuild, "beside", "",
		"another build, for the row that compares starts; default: the same, without metrics")
	idle := flag.String("idle", "", "serve a plugin that answers nothing on this socket instead, for a measurement")
	flag.Parse()
	if *idle != "" {
		if err := serveIdle(ctx, *idle); err != nil {
			fmt.Fprintf(os.Stderr, "Error: %v\n", err)
			os.Exit(1)
		}
		return
	}
	if err := measure(ctx, *daemon, *only); err != nil {
		fmt.Fprintf(os.Stderr, "Error: %v\n", err)
		os.Exit(1)
	}
}

// A figure is something to measure.
type figure struct {
	name   string
	target string
	take   func(ctx context.Context, daemon string) (string, error)
}

func measure(ctx context.Context, daemon, only string) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("read -only: %w", err)
	}
	figures := slices.Concat(registrationFigures, callFigures, allocationFigures, unitFigures, resourceFigures,
		healthFigures, driverFigures,
		metricsFigures, footprintFigures, layoutFigures, clusterFigures, claimFigures)
	for _, f := range figures {
		if !wanted.MatchString(f.name) {
			continue
		}
		result, err := f.take(ctx, daemon)
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		fmt.Printf("%-52s %-58s (to reach: %s)\n", f.name, result, f.target)
	}
	return nil
}

// registered returns a node whose kubelet has the first list of the daemon. The caller closes it.
func registered(ctx context.Context, setup node.Setup) (*node.Node, error) {
	if setup.Profile == "" {
		setup.Profile = "dgx-h100"
	}
	if setup.Version == "" {
		setup.Version = standin.V137
	}
	n, err := node.Open(setup)
	if err != nil {
		return nil, err
	}
	if err = n.StartDaemon(); err == nil {
		_, err = next(ctx, n, 0, standin.Listed)
	}
	if err != nil {
		return nil, fmt.Errorf("%w; the daemon's log ends with:\n%s", err, closed(n))
	}
	return n, nil
}

// closed closes a node that is of no more use, and returns the end of its daemon's log.
func closed(n *node.Node) string {
	logged := n.Logged()
	if err := n.Close(); err != nil {
		logged += "\n" + err.Error()
	}
	return logged
}

// next waits for the first event of a kind about the GPUs after a mark.
func next(ctx context.Context, n *node.Node, mark int, kind standin.Kind) (standin.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return n.Next(ctx, mark, standin.Is(kind, gpu))
}

// nextList returns when kubelet received the first list after a mark.
func nextList(ctx context.Context, n *node.Node, mark int, within time.Duration) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	event, err := n.Next(ctx, mark, standin.Is(standin.Listed, gpu))
	return event.Time, err
}

// spread is the median and the worst of some durations.
func spread(durations []time.Duration) string {
	slices.Sort(durations)
	last := len(durations) - 1
	return fmt.Sprintf("median %s, p99 %s, worst %s", ms(durations[last/2]), ms(durations[last*99/100]),
		ms(durations[last]))
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d.Nanoseconds())/1e6) }
