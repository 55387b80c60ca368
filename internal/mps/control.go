package mps

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// controlProgram is the driver's program for both the control daemon and the client that sends
// commands to the daemon.
const controlProgram = "nvidia-cuda-mps-control"

const (
	pipeFolder = "pipe"
	logFolder  = "log"
)

// askTimeout limits the time of one command.
const askTimeout = 5 * time.Second

// probeCommand is a command answered by every control daemon. It changes nothing.
const probeCommand = "get_default_active_thread_percentage"

// maxAnswer limits the output of a command, in bytes. Answers are short lines.
const maxAnswer = 64 << 10

// boundedBuffer keeps the output of a program, up to maxAnswer.
type boundedBuffer struct {
	full func() // called when there is more

	mu          sync.Mutex // guards all following fields
	buffer      []byte
	isTruncated bool
}

func (b *boundedBuffer) Write(text []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.buffer)+len(text) > maxAnswer {
		b.isTruncated = true
		b.full()
		return 0, io.ErrShortWrite
	}
	b.buffer = append(b.buffer, text...)
	return len(text), nil
}

// text returns the output, and whether the output is complete.
func (b *boundedBuffer) text() (text string, whole bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.TrimSpace(string(b.buffer)), !b.isTruncated
}

// errNoProgram is the error where the driver's program is missing.
var errNoProgram = errors.New(controlProgram +
	" is not on the PATH: NVIDIA's container runtime brings it to containers with " +
	"NVIDIA_DRIVER_CAPABILITIES=compute,utility")

// A control sends commands to the control daemon of a resource.
type control struct {
	dir string // of the resource's MPS state
}

func (c control) folder(name string) string { return filepath.Join(c.dir, name) }

// pipeVariable is the prefix of the environment variable with the pipe folder of a daemon.
const pipeVariable = "CUDA_MPS_PIPE_DIRECTORY="

// environment returns the environment of the daemon and of its clients.
func (c control) environment() []string {
	return append(os.Environ(),
		pipeVariable+c.folder(pipeFolder),
		"CUDA_MPS_LOG_DIRECTORY="+c.folder(logFolder))
}

const (
	// A daemon rejects commands for a moment when a client comes or goes. A command is therefore
	// tried maxAttempts times, with a pause in between.
	maxAttempts  = 5
	attemptPause = 50 * time.Millisecond
	// noDaemon is the message of the driver's program when no daemon runs.
	noDaemon = "Cannot find MPS control daemon process"
)

// ask sends a command to the daemon and returns the answer. The error says that there is no daemon
// or no answer within timeout, not that the daemon refuses the command.
func (c control) ask(ctx context.Context, command string, timeout time.Duration) (answer string, err error) {
	if _, err := os.Stat(c.folder(pipeFolder)); err != nil {
		return "", fmt.Errorf("%w: run mps-control-daemon on this node, with the same directory of MPS state", err)
	}
	asking, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for asked := 1; ; asked++ {
		answer, err = c.askOnce(asking, command)
		var refused *exec.ExitError
		switch {
		case ctx.Err() != nil:
			return "", ctx.Err()
		case asking.Err() != nil:
			return "", fmt.Errorf("%s: no answer within %s", firstLine(command), timeout)
		case !errors.As(err, &refused) || strings.Contains(err.Error(), noDaemon) || asked == maxAttempts:
			return answer, err
		}
		select {
		case <-asking.Done():
		case <-time.After(attemptPause):
		}
	}
}

// errFull is wrapped by the error of a folder whose disk is full.
var errFull = errors.New("the disk is full")

// full returns an error if the disk of any of the folders is full.
func full(folders ...string) error {
	for _, folder := range folders {
		var disk unix.Statfs_t // some file systems do not count blocks or files
		err := unix.Statfs(folder, &disk)
		if err == nil && (disk.Blocks > 0 && disk.Bfree == 0 || disk.Files > 0 && disk.Ffree == 0) {
			return fmt.Errorf("%w; make room in %s", errFull, folder)
		}
	}
	return nil
}

// firstLine returns the first of several commands, for use in a message.
func firstLine(command string) string {
	first, _, _ := strings.Cut(command, "\n")
	return first
}

func (c control) askOnce(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	program := exec.CommandContext(ctx, controlProgram)
	program.Env, program.Stdin, program.WaitDelay = c.environment(), strings.NewReader(command+"\n"), time.Second
	output := &boundedBuffer{full: cancel}
	program.Stdout, program.Stderr = output, output
	err := program.Run()
	answer, whole := output.text()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return "", errNoProgram
	case !whole:
		return "", fmt.Errorf("%s: the answer has more than %d bytes", firstLine(command), maxAnswer)
	case err != nil:
		return "", fmt.Errorf("%s: %w: %q", firstLine(command), err, answer)
	}
	return answer, nil
}
