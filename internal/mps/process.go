package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// A startedDaemon is a control daemon that was started, with the servers that it starts.
type startedDaemon struct {
	*exec.Cmd
	ended chan struct{} // closed when the daemon has ended
	exit  error         // why; not to be read before
}

// start starts the control daemon of a group. It stays in the foreground, in a process group of its
// own: a signal that a terminal sends us is not for it, and its servers can be ended with it.
func start(ctx context.Context, c control, g Group, options ...string) (*startedDaemon, error) {
	program := exec.Command(controlProgram, append([]string{"-f"}, options...)...) //nolint:noctx // it is asked to quit before it is killed
	program.Env = append(c.environment(), "CUDA_VISIBLE_DEVICES="+strings.Join(g.uuids(), ","))
	program.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	output := &logger{log: klog.FromContext(ctx).WithValues("resource", g.Resource)}
	program.Stdout, program.Stderr, program.WaitDelay = output, output, time.Second
	switch err := program.Start(); {
	case errors.Is(err, exec.ErrNotFound):
		return nil, errNoProgram
	case err != nil:
		return nil, fmt.Errorf("start the MPS control daemon: %w", err)
	}
	p := &startedDaemon{Cmd: program, ended: make(chan struct{})}
	go func() {
		p.exit = program.Wait()
		if p.exit == nil {
			p.exit = errors.New("exit status 0")
		}
		close(p.ended)
	}()
	return p, nil
}

// kill ends the daemon and its servers, if there are any still. A server that outlives its daemon
// would keep the GPUs from the servers of the next one.
func (p *startedDaemon) kill() {
	_ = syscall.Kill(-p.Process.Pid, syscall.SIGKILL) // they may all have ended
	<-p.ended
}

const (
	// maxLine bounds what is logged as one line, in bytes.
	maxLine = 4 << 10
	// maxLines is how many lines are logged a second; the others are counted.
	maxLines = 100
)

// A logger logs what a control daemon and its servers print, line by line.
type logger struct {
	log     klog.Logger
	rest    []byte    // a line that has only begun
	second  time.Time // when the count of lines began
	lines   int
	dropped int
}

// routine matches what a control daemon and its servers print, after the time and the process ID,
// for what comes every few seconds.
var routine = regexp.MustCompile(`(^|\] )(` + strings.Join([]string{
	// A connection, a command, and its answer if that is a number, an amount of memory, or that there
	// is none.
	`Accepting connection\.\.\.`, `NEW UI`, `UI closed`, `Cmd:.*`, `[0-9.]+[KMG]?`, `No default pinned memory limit set for the device!`,
	// A client that comes or goes, with the words of NVIDIA's servers.
	`User did not send valid credentials`, `NEW CLIENT .*`, `Received new client request .*`, `Creating worker thread for client .*`,
	`Client \{.*\} (connected|exiting\..*)`, `Device .* is associated`, `Status of client .* is ACTIVE`,
	`Server failed to recevie command with status 806, .*`, `Client process \d+ disconnected`,
}, "|") + `)$`)

func (l *logger) Write(text []byte) (int, error) {
	l.rest = append(l.rest, text...)
	for {
		line, rest, whole := bytes.Cut(l.rest, []byte("\n"))
		switch {
		case len(line) > maxLine:
			line, rest = l.rest[:maxLine], l.rest[maxLine:]
		case !whole:
			return len(text), nil
		}
		l.rest = rest
		l.print(strings.TrimSpace(string(line)))
	}
}

// mayLog reports whether another line may be logged.
func (l *logger) mayLog() bool {
	if now := time.Now(); now.Sub(l.second) >= time.Second {
		if l.dropped > 0 {
			l.log.Info("MPS output was not logged in full", "dropped", l.dropped)
		}
		l.second, l.lines, l.dropped = now, 0, 0
	}
	if l.lines++; l.lines > maxLines {
		l.dropped++
		return false
	}
	return true
}

func (l *logger) print(line string) {
	isRoutine := routine.MatchString(line)
	switch {
	case isRoutine && !l.log.V(6).Enabled(), !l.mayLog(), line == "":
	case isRoutine:
		l.log.V(6).Info("MPS routine output", "line", line)
	default:
		l.log.Info("MPS output", "line", line)
	}
}
