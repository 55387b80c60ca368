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

// A Program is the input of a main.
type Program struct {
	// Name is the program's name, Short a description in a few words, and Long a description in
	// sentences.
	Name, Short, Long string
	// Cluster is the program's connection to the API server; nil for none.
	Cluster Cluster

	nvidia bool // started under the name of one of NVIDIA's programs
}

// Cluster is a program's connection to the API server.
type Cluster interface {
	// Its tasks for the daemon keep the result of Choose up to date.
	daemon.Cluster
	// Commands returns the program's commands that use the API server.
	Commands() []*cobra.Command
	// Choose returns the source of the configuration file if a label of the node chooses
	// the file; nil otherwise. It may ask the API server for a short time. It uses only
	// settings of c that have no key in the file.
	Choose(ctx context.Context, c config.Startup) *feed.Feed[config.Chosen]
	// LabelOnce writes labels like gpu-feature-discovery.
	LabelOnce(ctx context.Context, c config.Startup, labels map[string]string) error
}

// DevicePlugin is the program without a client of the API server.
func DevicePlugin() Program {
	return Program{
		Name:  "gpu-device-plugin",
		Short: "Kubernetes device plugin for NVIDIA GPUs",
		Long: "gpu-device-plugin is a Kubernetes device plugin for NVIDIA GPUs. It runs on every GPU node,\n" +
			"registers the GPUs with the kubelet, and reports their health. Without a command it runs as a\n" +
			"daemon. The commands check a configuration file, show what a node would offer, and control a\n" +
			"running daemon.",
	}
}

// NodeAgent is the program with a client of the API server.
func NodeAgent(c Cluster) Program {
	return Program{
		Name:  "gpu-node-agent",
		Short: "Kubernetes device plugin for NVIDIA GPUs that also talks to the API server",
		Long: "gpu-node-agent is gpu-device-plugin with a client of the API server. It accepts the same commands,\n" +
			"flags, environment and configuration file. It can also write labels, Events, a condition and a\n" +
			"taint of its node, and use the configuration file named by a label of the node. All of these are\n" +
			"off by default. The kubelet is served in the same way when the API server does not answer.",
		Cluster: c,
	}
}

// kind returns the program of the configuration.
func (p Program) kind() config.Program {
	if p.Cluster == nil {
		return config.DevicePlugin
	}
	return config.NodeAgent
}

// endTimeout is how long the process may take to end after a signal. Then the process
// exits in any state: a daemon loses nothing, and its supervisor waits for the exit. A
// process that waits for its successor has longer.
const endTimeout = 1800 * time.Millisecond

// Limits for the last message, because the output may be stuck.
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

// begin gives the process endTimeout to end, or longer after calls of extend. Then it calls late,
// once.
func (e *ending) begin(late func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if until := time.Now().Add(endTimeout); until.After(e.until) {
		e.until = until
	}
	e.timer = time.AfterFunc(time.Until(e.until), late)
}

// extend gives the process the duration d from now on, unless it has been ended.
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

// extendEnd returns the function that extends the time of the process of ctx to end.
func extendEnd(ctx context.Context) func(time.Duration) {
	if e, is := ctx.Value(endingKey{}).(*ending); is {
		return e.extend
	}
	return func(time.Duration) {}
}

// untilStatus runs execute until a signal ends it, and returns the exit status of the process.
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

// complain writes to standard error, and waits for it at most for limit.
func complain(limit time.Duration, format string, args ...any) {
	end := make(chan struct{})
	go func() {
		defer close(end)
		fmt.Fprintf(os.Stderr, format, args...)
	}()
	select {
	case <-end:
	case <-time.After(limit):
	}
}
