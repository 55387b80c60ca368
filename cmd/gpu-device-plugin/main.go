// Command gpu-device-plugin offers the NVIDIA GPUs of a Kubernetes node to its kubelet.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cli"
)

// endTimeout is how long after a signal the process may take to end. Then it ends whatever is stuck: nothing of a daemon is lost by
// that, and whoever stops it waits for its end.
const endTimeout = 1800 * time.Millisecond

// How long the last message may take: what is stuck may be the output.
const (
	errorTimeout = time.Second
	forceTimeout = 50 * time.Millisecond
)

func main() {
	os.Exit(run(cli.Execute))
}

// run returns the exit status of the program, which is execute with its arguments and output.
func run(execute func(context.Context, []string, io.Writer) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	late := make(chan struct{})
	context.AfterFunc(ctx, func() {
		stop() // a second signal kills
		time.AfterFunc(endTimeout, func() { close(late) })
	})
	ended := make(chan error, 1)
	go func() { ended <- execute(ctx, os.Args[1:], os.Stdout) }()
	select {
	case err := <-ended:
		var status cli.ExitStatus
		switch {
		case errors.As(err, &status):
			return int(status)
		case err != nil:
			complain(errorTimeout, "Error: %v\n", err)
			return 1
		}
	case <-late:
		complain(forceTimeout, "Ended by force: something was still running %v after the signal\n", endTimeout)
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
