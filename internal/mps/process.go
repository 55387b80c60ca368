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

// A startedDaemon is a running control daemon with the servers of this daemon.
type startedDaemon struct {
	*exec.Cmd
	ended   chan struct{} // closed when the daemon has ended
	exitErr error         // why; not to be read before
}

// start starts the control daemon of a group in the foreground, in a separate process group: a
// signal of the terminal to this process does not reach the daemon, and one signal reaches the
// daemon and all servers.
func start(ctx context.Context, c control, g Group, options ...string) (*startedDaemon, error) {
	arguments := append([]string{"-f"}, options...)
	program := exec.Command(controlProgram, arguments...) //nolint:noctx // told to quit before it is killed
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
		p.exitErr = program.Wait()
		if p.exitErr == nil {
			p.exitErr = errors.New("exit status 0")
		}
		close(p.ended)
	}()
	return p, nil
}

// kill kills the daemon and the running servers. A server that outlives the daemon would block the
// GPUs for the next daemon.
func (p *startedDaemon) kill() {
	_ = syscall.Kill(-p.Process.Pid, syscall.SIGKILL) // they may all have ended
	<-p.ended
}

const (
	// maxLine limits the length of a logged line, in bytes.
	maxLine = 4 << 10
	// maxLines is the maximum number of logged lines a second; further lines are counted.
	maxLines = 100
)

// A logger logs the output of a control daemon and of the servers, line by line.
type logger struct {
	log          klog.Logger
	partial      []byte    // an incomplete line
	second       time.Time // when the count of lines began
	lines        int
	droppedLines int
}

// routine matches the lines that a control daemon and its servers print every few seconds, after
// the time and the process ID.
var routine = regexp.MustCompile(`(^|\] )(` + strings.Join([]string{
	// Connections, commands, and answers that are a number, an amount of memory, or empty.
	`Accepting connection\.\.\.`, `NEW UI`, `UI closed`, `Cmd:.*`, `[0-9.]+[KMG]?`,
	`No default pinned memory limit set for the device!`,
	// Clients that come or go, in the words of NVIDIA's servers.
	`User did not send valid credentials`, `NEW CLIENT .*`, `Received new client request .*`,
	`Creating worker thread for client .*`,
	`Client \{.*\} (connected|exiting\..*)`, `Device .* is associated`, `Status of client .* is ACTIVE`,
	`Server failed to recevie command with status 806, .*`, `Client process \d+ disconnected`,
}, "|") + `)$`)

func (l *logger) Write(text []byte) (int, error) {
	l.partial = append(l.partial, text...)
	for {
		line, partial, whole := bytes.Cut(l.partial, []byte("\n"))
		switch {
		case len(line) > maxLine:
			line, partial = l.partial[:maxLine], l.partial[maxLine:]
		case !whole:
			return len(text), nil
		}
		l.partial = partial
		l.print(strings.TrimSpace(string(line)))
	}
}

// mayLog reports whether another line may be logged.
func (l *logger) mayLog() bool {
	if now := time.Now(); now.Sub(l.second) >= time.Second {
		if l.droppedLines > 0 {
			l.log.Info("MPS output was not logged in full", "dropped", l.droppedLines)
		}
		l.second, l.lines, l.droppedLines = now, 0, 0
	}
	if l.lines++; l.lines > maxLines {
		l.droppedLines++
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
