package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// controlProgram is the driver's program that is the control daemon, and also the one that commands it.
const controlProgram = "nvidia-cuda-mps-control"

const (
	pipeFolder = "pipe"
	logFolder  = "log"
)

// askTimeout bounds one command.
const askTimeout = 5 * time.Second

// aQuestion is a command that any control daemon answers and that changes nothing.
const aQuestion = "get_default_active_thread_percentage"

// errNoProgram is the error where the driver's program is missing.
var errNoProgram = errors.New(controlProgram + " is not on the PATH: NVIDIA's container runtime brings it to containers with " +
	"NVIDIA_DRIVER_CAPABILITIES=compute,utility")

// A control is the control daemon of a resource, as those know it who command it.
type control struct {
	dir string // of the resource's MPS state
}

func (c control) folder(name string) string { return filepath.Join(c.dir, name) }

// environment is that of the daemon and of those who command it.
func (c control) environment() []string {
	return append(os.Environ(),
		"CUDA_MPS_PIPE_DIRECTORY="+c.folder(pipeFolder),
		"CUDA_MPS_LOG_DIRECTORY="+c.folder(logFolder))
}

// ask gives the daemon a command and returns what it answers. An error means that there is no daemon, or that it has not
// answered within timeout; a command that it refuses is none.
func (c control) ask(ctx context.Context, command string, timeout time.Duration) (string, error) {
	if _, err := os.Stat(c.folder(pipeFolder)); err != nil {
		return "", fmt.Errorf("%w: run mps-control-daemon on this node, with the same directory of MPS state", err)
	}
	asking, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	program := exec.CommandContext(asking, controlProgram)
	program.Env, program.Stdin, program.WaitDelay = c.environment(), strings.NewReader(command+"\n"), time.Second
	output, err := program.CombinedOutput()
	answer := strings.TrimSpace(string(output))
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return "", errNoProgram
	case ctx.Err() != nil:
		return "", ctx.Err()
	case asking.Err() != nil:
		return "", fmt.Errorf("%s: no answer within %s", command, timeout)
	case err != nil:
		return "", fmt.Errorf("%s: %w: %q", command, err, answer)
	}
	return answer, nil
}
