package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/logwriter"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// An ownProcess is the process of the daemon.
type ownProcess struct {
	signals <-chan os.Signal // signals to handle
	log     *logwriter.Writer
	json    bool
}

// untilItEnds runs a daemon until ctx ends or the daemon fails, and passes the given
// signals to the daemon. If the driver was replaced, or the DRA driver needs another name,
// a new process of this program replaces this process.
func untilItEnds(ctx context.Context, run func(context.Context, *ownProcess) error, signals ...os.Signal) error {
	p := &ownProcess{log: logInBackground()}
	flush := func() { p.log.FlushWithin(maxFlush) }
	defer flush()
	received, stop := receive(signals...)
	defer stop()
	p.signals = received
	err := run(ctx, p)
	log := klog.FromContext(ctx)
	switch {
	case errors.Is(err, inventory.ErrDriverReplaced) && ctx.Err() == nil:
		log.Info("Restarting with the replaced driver", "reason", err.Error())
		flush()
		return reexec()
	case errors.Is(err, dra.ErrOtherName) && ctx.Err() == nil:
		log.Info("Restarting with the name of the driver under which claims have devices", "reason", err.Error())
		flush()
		return reexec()
	case err == nil:
		log.Info("Stopped")
	case p.json: // the caller would write plain text
		log.Error(err, "Failed")
		return ExitStatus(1)
	}
	return err
}

// logAs sets the format of all log lines from now on. Existing loggers keep theirs.
func (p *ownProcess) logAs(format config.LoggingFormat) {
	switch wanted := format == config.LogJSON; {
	case wanted == p.json:
	case wanted:
		klog.SetLoggerWithOptions(p.log.JSON(), klog.ContextualLogger(true))
		p.json = true
	default:
		klog.ClearLogger()
		p.json = false
	}
}

// maxFlush is how long the end of a process waits for a reader of its last log lines.
const maxFlush = 500 * time.Millisecond

// logInBackground makes logging never block from now on, even while nobody reads standard error. It
// returns the writer of the log.
func logInBackground() *logwriter.Writer {
	var settings flag.FlagSet
	klog.InitFlags(&settings)
	for name, value := range map[string]string{"logtostderr": "false", "stderrthreshold": "FATAL",
		"one_output": "true"} {
		if err := settings.Set(name, value); err != nil {
			panic(err) // klog has these settings
		}
	}
	// Otherwise a write to a standard error without reader would end the process.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	w := logwriter.New(os.Stderr)
	klog.SetOutput(w)
	serve.LogGRPC(klog.Background())
	return w
}

// reexecuted is the environment variable with the number of replacements of the process.
const reexecuted = "GPU_DEVICE_PLUGIN_REEXECUTED"

// reexecutions returns the number of self-replacements of this process.
func reexecutions() int {
	n, err := strconv.Atoi(os.Getenv(reexecuted))
	if err != nil {
		return 0 // the first process
	}
	return n
}

// reexec replaces this process with a new process of this program, with the same arguments. A
// process cannot change its loaded NVML library: only a new process can use a replaced driver.
func reexec() error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	// SIGHUP would end the new process until it receives signals, and the new process
	// reads the configuration at its start anyway.
	signal.Ignore(syscall.SIGHUP)
	if err := os.Setenv(reexecuted, strconv.Itoa(reexecutions()+1)); err != nil {
		return fmt.Errorf("count restarts of this program: %w", err)
	}
	//nolint:gosec // the same program with the same arguments
	if err := syscall.Exec(program, os.Args, os.Environ()); err != nil {
		return fmt.Errorf("start this program again: %w", err)
	}
	return nil // not reached
}

// receive returns a channel of signals, and a function to stop receiving. SIGHUP ends a
// process without a receiver, so receive comes before anything else, and stop last.
func receive(signals ...os.Signal) (received <-chan os.Signal, stop func()) {
	all := make(chan os.Signal, 4)
	signal.Notify(all, signals...)
	return all, func() { signal.Stop(all) }
}
