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

// An ownProcess is what the daemon needs of the process that it runs in.
type ownProcess struct {
	signals <-chan os.Signal // to handle
	log     *logwriter.Writer
	json    bool
}

// untilItEnds runs a daemon until ctx ends or it fails. It passes the given signals to it. When the
// driver was replaced, or the DRA driver has another name on the node, it starts a new process of
// this program in the place of this one.
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
		log.Info("Restarting with the driver that is there now", "reason", err.Error())
		flush()
		return reexec()
	case errors.Is(err, dra.ErrOtherName) && ctx.Err() == nil:
		log.Info("Restarting with the name of the driver under which claims have devices", "reason", err.Error())
		flush()
		return reexec()
	case err == nil:
		log.Info("Stopped")
	case p.json: // the caller would write a line that is no JSON
		log.Error(err, "Failed")
		return ExitStatus(1)
	}
	return err
}

// logAs sets the format of all log lines from now on. Loggers that were taken before keep theirs.
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

// maxFlush is how long the end of a process waits for its last log lines to be read.
const maxFlush = 500 * time.Millisecond

// logInBackground makes logging never block from now on, also while nobody reads standard error. It
// returns the writer of the log.
func logInBackground() *logwriter.Writer {
	var settings flag.FlagSet
	klog.InitFlags(&settings)
	for name, value := range map[string]string{"logtostderr": "false", "stderrthreshold": "FATAL", "one_output": "true"} {
		if err := settings.Set(name, value); err != nil {
			panic(err) // klog has these settings
		}
	}
	// Without this the process would end when it writes to a standard error that the reader has
	// closed.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	w := logwriter.New(os.Stderr)
	klog.SetOutput(w)
	serve.LogGRPC(klog.Background())
	return w
}

// reexecuted is the environment variable with the number of times that the process has replaced
// itself.
const reexecuted = "GPU_DEVICE_PLUGIN_REEXECUTED"

// reexecutions returns how often this process has replaced itself by a new one.
func reexecutions() int {
	n, err := strconv.Atoi(os.Getenv(reexecuted))
	if err != nil {
		return 0 // it is the first
	}
	return n
}

// reexec replaces this process with a new one of this program, with the same arguments. A process
// cannot change the NVML library that it has loaded: only a new process can use a driver that was
// replaced.
func reexec() error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	// SIGHUP would end the new process until it receives signals; it reads the configuration at its
	// start.
	signal.Ignore(syscall.SIGHUP)
	if err := os.Setenv(reexecuted, strconv.Itoa(reexecutions()+1)); err != nil {
		return fmt.Errorf("count restarts of this program: %w", err)
	}
	if err := syscall.Exec(program, os.Args, os.Environ()); err != nil { //nolint:gosec // the same program, as it was started
		return fmt.Errorf("start this program again: %w", err)
	}
	return nil // not reached
}

// receive returns a channel of signals, and a function that ends that. SIGHUP ends a process that
// does not receive it, so receive is called before anything else, and ended last.
func receive(signals ...os.Signal) (received <-chan os.Signal, stop func()) {
	all := make(chan os.Signal, 4)
	signal.Notify(all, signals...)
	return all, func() { signal.Stop(all) }
}
