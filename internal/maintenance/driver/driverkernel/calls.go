package driverkernel

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// SystemCalls are the Calls of a real node.
type SystemCalls struct {
	// Root is where the node's root file system is.
	Root string
}

// Load implements Calls.
func (SystemCalls) Load(module *os.File, parameters string) error {
	return unix.FinitModule(int(module.Fd()), parameters, 0)
}

// Unload implements Calls.
func (SystemCalls) Unload(name string) error { return unix.DeleteModule(name, unix.O_NONBLOCK) }

// MakeNode implements Calls.
func (SystemCalls) MakeNode(path string, mode uint32, device uint64) error {
	if err := unix.Mknod(path, unix.S_IFCHR|mode, int(device)); err != nil {
		return err
	}
	return os.Chmod(path, os.FileMode(mode))
}

// runTimeout limits the time of a program.
const runTimeout = 90 * time.Second

// Run implements Calls. It looks for the program in the folders of programs below the root, and runs
// it with this root.
func (c SystemCalls) Run(ctx context.Context, program string, arguments ...string) error {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	for _, folder := range []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		file := filepath.Join(folder, program)
		if _, err := os.Lstat(filepath.Join(c.Root, file)); err != nil {
			continue
		}
		cmd := exec.CommandContext(ctx, file, arguments...)
		cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
		cmd.WaitDelay = time.Second
		if filepath.Clean(c.Root) != "/" {
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: c.Root}
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			text := strings.Join(strings.Fields(string(out)), " ")
			return fmt.Errorf("%s %s: %w: %.300s", program, strings.Join(arguments, " "), err, text)
		}
		return nil
	}
	return fmt.Errorf("the node has no program %s", program)
}
