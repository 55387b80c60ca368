package cli

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// reexec puts a new process of this program, with the same arguments, in the place of this one. A process is bound to
// the NVML that it loaded: only another one can talk to a driver that was replaced.
func reexec() error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	// The new process would end by it until it hears it, and reads everything anew anyway.
	signal.Ignore(syscall.SIGHUP)
	if err := syscall.Exec(program, os.Args, os.Environ()); err != nil { //nolint:gosec // the same program, as it was started
		return fmt.Errorf("run this program anew: %w", err)
	}
	return nil // not reached
}
