package nvidia

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	// ResetTimeout is how long a reset of GPUs may take.
	ResetTimeout = 2 * time.Minute
	// maxResetOutput is how much of what nvidia-smi prints about a reset is in an error, in bytes: it
	// lists the GPUs that go together.
	maxResetOutput = 1000
	// maxOutput is how much of the output of nvidia-smi is kept, in bytes.
	maxOutput = 64 << 10
	// resetDone is in what nvidia-smi prints for each GPU that it has reset.
	resetDone = "successfully reset"
)

// ErrResetHangs is wrapped by the error of a reset whose program does not even end when it is
// killed.
var ErrResetHangs = errors.New("nvidia-smi hangs in the driver and cannot be ended: restart the node")

// Resets reset GPUs, one request at a time. Make it with NewResets.
type Resets struct {
	run     func(ctx context.Context, addresses []string) error
	timeout time.Duration
	running atomic.Bool
}

// NewResets returns Resets by run, which resets the GPUs with some PCI addresses, and is to end
// when ctx does. It has so long a time.
func NewResets(timeout time.Duration, run func(ctx context.Context, addresses []string) error) *Resets {
	return &Resets{run: run, timeout: timeout}
}

// Reset resets the GPUs with some PCI addresses together. It returns a few seconds after ctx has
// ended, then with an error that wraps context.Canceled, and after the timeout, with
// context.DeadlineExceeded. If the reset does not end, the error wraps ErrResetHangs, and ended is
// called when it has.
func (r *Resets) Reset(ctx context.Context, addresses []string, ended func()) error {
	if !r.running.CompareAndSwap(false, true) {
		return errors.New("an earlier reset has not ended")
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	var left atomic.Bool // by the one of both that comes first
	done, err := AwaitProgram(ctx, 2*smiWaitDelay, func() error {
		defer cancel()
		err := r.run(ctx, addresses)
		if ctx.Err() != nil {
			err = fmt.Errorf("the reset was ended: %w: %w", ctx.Err(), err)
		}
		if r.running.Store(false); left.Swap(true) {
			ended()
		}
		return err
	})
	if !done && !left.Swap(true) {
		return ErrResetHangs
	}
	return err
}

// SMIReset resets GPUs by the driver's own program below a driver root, a path of this process:
// NVML has no call for it. With another program, that is run with the same arguments instead. The
// program ends with this process.
func SMIReset(driverRoot string, searchPath []string, instead ...string) func(ctx context.Context,
	addresses []string) error {
	return func(ctx context.Context, addresses []string) error {
		runtime.LockOSThread() // the kernel ends the program with the thread that started it
		defer runtime.UnlockOSThread()
		c := smi(ctx, driverRoot, searchPath, "--gpu-reset", "-i", strings.Join(addresses, ","))
		if len(instead) > 0 {
			c.Path, c.Args, c.Err, c.Env = instead[0], append(instead, c.Args[1:]...), nil, nil
			c.Args[0] = "gpu-device-plugin" // under another name the program is another command
		}
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		output, err := bounded(c)
		said := printable(output, maxResetOutput)
		switch {
		case err != nil:
			return fmt.Errorf("nvidia-smi: %w: %s", err, cmp.Or(said, "it printed nothing"))
		case !strings.Contains(string(output), resetDone):
			return fmt.Errorf("nvidia-smi does not say that the GPU was reset: %s", cmp.Or(said, "it printed nothing"))
		}
		return nil
	}
}

// bounded runs a program and returns the beginning of what it prints.
func bounded(c *exec.Cmd) ([]byte, error) {
	head := statefile.NewHead(maxOutput)
	c.Stdout, c.Stderr = head, head
	err := c.Run()
	return head.Bytes(), err
}

// printable returns text in one line, without what a terminal would follow, and not more of it than
// so many bytes.
func printable(text []byte, most int) string {
	clean := strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return ' '
		}
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, strings.ToValidUTF8(string(text[:min(len(text), 4*most)]), ""))
	clean = strings.Join(strings.Fields(clean), " ")
	return strings.ToValidUTF8(clean[:min(len(clean), most)], "")
}
