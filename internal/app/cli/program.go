package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// A Program is what a main runs.
type Program struct {
	// Name is the program's name, Short what it is in a few words, and Long in sentences.
	Name, Short, Long string
	// Cluster is what the program has to do with the API server; nil for nothing.
	Cluster Cluster

	nvidia bool // it was started under the name of one of NVIDIA's
}

// Cluster is what a program has to do with the API server.
type Cluster interface {
	// The tasks that it adds to the daemon's keep what Choose returned up to date.
	daemon.Cluster
	// Commands returns the commands that the program has for it.
	Commands() []*cobra.Command
	// Choose returns which file is the configuration file if a label of the node chooses it; nil
	// otherwise. It may ask the API server, for a short time. It uses only settings of c that a file
	// cannot have.
	Choose(ctx context.Context, c config.Config) *feed.Feed[config.Chosen]
	// LabelOnce writes labels as gpu-feature-discovery does.
	LabelOnce(ctx context.Context, c config.Config, labels map[string]string) error
}

// DevicePlugin is the program that does not talk to the API server.
func DevicePlugin() Program {
	return Program{
		Name:  "gpu-device-plugin",
		Short: "Kubernetes device plugin for NVIDIA GPUs",
		Long: "gpu-device-plugin is a Kubernetes device plugin for NVIDIA GPUs. It finds the GPUs of the node, registers " +
			"them with\n" +
			"kubelet, and reports their health. Without a command it runs as a daemon. The commands check a configuration " +
			"file,\n" +
			"show what a node would offer, and control a running daemon.",
	}
}

// NodeAgent is the program that also talks to the API server.
func NodeAgent(c Cluster) Program {
	return Program{
		Name:  "gpu-node-agent",
		Short: "Kubernetes device plugin for NVIDIA GPUs that also talks to the API server",
		Long: "gpu-node-agent is gpu-device-plugin with a client of the API server. It takes the same commands, flags, " +
			"environment and\n" +
			"configuration file. On request it also writes labels, Events, a condition and a taint of its node, and " +
			"takes the\n" +
			"configuration file that a label of the node names. It asks for nothing of this by default. kubelet is served " +
			"the same\n" +
			"whether the API server answers or not.",
		Cluster: c,
	}
}

// kind returns which program the configuration is for.
func (p Program) kind() config.Program {
	if p.Cluster == nil {
		return config.DevicePlugin
	}
	return config.NodeAgent
}

// endTimeout is how long after a signal the process may take to end. Then it ends whatever is
// stuck: nothing of a daemon is lost by that, and whoever stops it waits for its end. A process
// that waits for its successor has longer.
const endTimeout = 1800 * time.Millisecond

// How long the last message may take: what is stuck may be the output.
const (
	errorTimeout = time.Second
	forceTimeout = 50 * time.Millisecond
)

// Main runs the program with the arguments of the process, and returns its exit status.
func (p Program) Main() int {
	return untilStatus(func(ctx context.Context) error {
		return p.Execute(ctx, os.Args[0], os.Args[1:], os.Stdout)
	})
}

// An ending limits how long the process may take to end after a signal.
type ending struct {
	mu    sync.Mutex  // guards all following fields
	timer *time.Timer // nil before the signal
	until time.Time
}

type endingKey struct{}

// begin gives the process endTimeout to end, or longer where extend was called. Then it calls late,
// once.
func (e *ending) begin(late func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if until := time.Now().Add(endTimeout); until.After(e.until) {
		e.until = until
	}
	e.timer = time.AfterFunc(time.Until(e.until), late)
}

// extend gives the process so much time from now on, if it has not been ended yet.
func (e *ending) extend(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	until := time.Now().Add(d)
	if !until.After(e.until) {
		return
	}
	e.until = until
	if e.timer != nil && e.timer.Stop() {
		e.timer.Reset(d)
	}
}

// extendEnd returns the function that gives the process of ctx more time to end.
func extendEnd(ctx context.Context) func(time.Duration) {
	if e, is := ctx.Value(endingKey{}).(*ending); is {
		return e.extend
	}
	return func(time.Duration) {}
}

// untilStatus returns the exit status of the process, which is execute until a signal ends it.
func untilStatus(execute func(context.Context) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	e := &ending{}
	var signaled time.Time
	late := make(chan struct{})
	context.AfterFunc(ctx, func() {
		stop() // a second signal kills
		signaled = time.Now()
		e.begin(func() { close(late) })
	})
	ended := make(chan error, 1)
	go func() { ended <- execute(context.WithValue(ctx, endingKey{}, e)) }()
	select {
	case err := <-ended:
		var status ExitStatus
		switch {
		case errors.As(err, &status):
			return int(status)
		case err != nil:
			complain(errorTimeout, "%s\n", terminal.Printable(fmt.Sprintf("Error: %v", err), terminal.Caret))
			return 1
		}
	case <-late:
		complain(forceTimeout, "Ended by force: something was still running %v after the signal\n",
			time.Since(signaled).Round(100*time.Millisecond))
	}
	return 0
}

// complain writes to the standard error, and does not wait for it longer than limit.
func complain(limit time.Duration, format string, args ...any) {
	written := make(chan struct{})
	go func() {
		defer close(written)
		fmt.Fprintf(os.Stderr, format, args...)
	}()
	select {
	case <-written:
	case <-time.After(limit):
	}
}
