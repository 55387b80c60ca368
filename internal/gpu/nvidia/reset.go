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
	// ResetTimeout is the longest duration of a reset of GPUs.
	ResetTimeout = 2 * time.Minute
	// maxResetOutput limits the output of nvidia-smi in the error of a reset, in bytes. The output
	// lists the GPUs that must be reset together.
	maxResetOutput = 1000
	// maxOutput limits the captured output of nvidia-smi, in bytes.
	maxOutput = 64 << 10
	// resetDone is in the output of nvidia-smi for each GPU that was reset.
	resetDone = "successfully reset"
)

// ErrResetHangs is wrapped by the error of a reset whose program does not end even after a kill.
var ErrResetHangs = errors.New("nvidia-smi hangs in the driver and cannot be stopped: restart the node")

// Resets resets GPUs, one request at a time. Create Resets with NewResets.
type Resets struct {
	run     func(ctx context.Context, addresses []string) error
	timeout time.Duration
	running atomic.Bool
}

// NewResets returns Resets that use run. run resets the GPUs with the given PCI addresses, and must
// end with ctx. timeout limits run.
func NewResets(timeout time.Duration, run func(ctx context.Context, addresses []string) error) *Resets {
	return &Resets{run: run, timeout: timeout}
}

// Reset resets the GPUs with the given PCI addresses together. It returns within a few seconds
// after the end of ctx, with an error that wraps context.Canceled, or after the timeout, with
// context.DeadlineExceeded. For a reset that does not end, the error wraps ErrResetHangs, and ended
// is called at the end of the reset.
func (r *Resets) Reset(ctx context.Context, addresses []string, ended func()) error {
	if !r.running.CompareAndSwap(false, true) {
		return errors.New("an earlier reset has not ended")
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	var left atomic.Bool // set by the earlier of the two
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

// SMIReset resets GPUs with nvidia-smi below a driver root, a path of this process: NVML has no
// call for a reset. The program instead, if set, runs with the same arguments in place of
// nvidia-smi. The program ends with this process.
func SMIReset(driverRoot string, searchPath []string, instead ...string) func(ctx context.Context,
	addresses []string) error {
	return func(ctx context.Context, addresses []string) error {
		runtime.LockOSThread() // the kernel kills the program with the thread that started it
		defer runtime.UnlockOSThread()
		c := smi(ctx, driverRoot, searchPath, "--gpu-reset", "-i", strings.Join(addresses, ","))
		if len(instead) > 0 {
			c.Path, c.Args, c.Err, c.Env = instead[0], append(instead, c.Args[1:]...), nil, nil
			c.Args[0] = "gpu-device-plugin" // the program behaves differently under another name
		}
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		output, err := runBounded(c)
		said := printable(output, maxResetOutput)
		switch {
		case err != nil:
			return fmt.Errorf("nvidia-smi: %w: %s", err, cmp.Or(said, "it printed nothing"))
		case !strings.Contains(string(output), resetDone):
			return fmt.Errorf("nvidia-smi did not report a reset of the GPU: %s", cmp.Or(said, "it printed nothing"))
		}
		return nil
	}
}

// runBounded runs a program and returns the beginning of its output.
func runBounded(c *exec.Cmd) ([]byte, error) {
	head := statefile.NewHead(maxOutput)
	c.Stdout, c.Stderr = head, head
	err := c.Run()
	return head.Bytes(), err
}

// printable returns text on one line without terminal control characters, cut at a number of bytes.
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
