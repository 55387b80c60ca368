package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// endLeftover stops the daemon and the servers that an earlier process left behind, because their
// limits are not known.
func (d *daemon) endLeftover(ctx context.Context) error {
	if err := statefile.Remove(d.folder(startedMark)); err != nil {
		return fmt.Errorf("remove the mark of an earlier MPS control daemon: %w", err)
	}
	leftover := d.processes()
	if _, err := d.ask(ctx, probeCommand, askTimeout); err == nil {
		klog.FromContext(ctx).Info("Stopping an MPS control daemon that was left behind", "resource", d.group.Resource)
		_, err := d.ask(ctx, quitCommand(), quitTimeout)
		if err != nil && len(leftover) == 0 {
			return fmt.Errorf("stop the MPS control daemon that was left behind in %s: %w; stop its process", d.dir,
				err)
		}
		if err == nil && awaitEnd(ctx, leftover) == nil {
			return nil
		}
	}
	// A process that does not answer or quit would block the GPUs for the next daemon.
	for _, pid := range leftover {
		klog.FromContext(ctx).Info("Killing a process of MPS that was left behind", "resource", d.group.Resource,
			"pid", pid)
		_ = syscall.Kill(pid, syscall.SIGKILL) // the process may have exited
	}
	return awaitEnd(ctx, leftover)
}

// awaitEnd waits for the end of processes, as long as a daemon may take to quit.
func awaitEnd(ctx context.Context, pids []int) error {
	ctx, cancel := context.WithTimeout(ctx, quitTimeout)
	defer cancel()
	pace := time.NewTicker(startPace)
	for slices.ContainsFunc(pids, isRunning) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes of MPS that were left behind do not exit: %v: %w", pids, ctx.Err())
		case <-pace.C:
		}
	}
	return nil
}

// isRunning reports whether a process still has files and memory. A zombie, whose parent has not read
// the exit status, does not.
func isRunning(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, state, _ := strings.Cut(string(stat), ") ")
	return err == nil && !strings.HasPrefix(state, "Z")
}

// processes returns the control daemons of the directory and their servers, without the clients
// that send commands. In a separate PID namespace, only processes started by this process are
// visible.
func (c control) processes() []int {
	pipe, err := os.Stat(c.folder(pipeFolder))
	if err != nil {
		return nil // no daemon was started
	}
	var found []int
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		program, err := os.Readlink(filepath.Join(dir, "exe")) // unreadable for a process that has exited
		if err != nil || !strings.HasPrefix(filepath.Base(program), "nvidia-cuda-mps-") {
			continue
		}
		arguments, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if filepath.Base(program) == controlProgram && bytes.Count(arguments, []byte{0}) < 2 {
			continue
		}
		environment, _ := os.ReadFile(filepath.Join(dir, "environ"))
		for variable := range strings.SplitSeq(string(environment), "\x00") {
			path, is := strings.CutPrefix(variable, pipeVariable)
			if !is {
				continue
			}
			// The path may be another directory in the mount namespace of the process.
			info, err := os.Stat(filepath.Join(dir, "root", path))
			if pid, of := strconv.Atoi(filepath.Base(dir)); errors.Join(err, of) == nil && os.SameFile(pipe, info) {
				found = append(found, pid)
			}
		}
	}
	return found
}
