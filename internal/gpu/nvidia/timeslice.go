package nvidia

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
)

// smiTimeout is how long nvidia-smi may take. It takes a second without the persistence daemon.
const smiTimeout = 10 * time.Second

// smiWaitDelay is how long its output is waited for after it was killed.
const smiWaitDelay = time.Second

// maxSMIOutput is how much of what nvidia-smi prints is in an error, in bytes.
const maxSMIOutput = 200

// errHangs is the error of an nvidia-smi that does not even end when it is killed, as while the
// driver hangs.
var errHangs = errors.New("nvidia-smi hangs in the driver; nothing is set before it has ended")

// TimeSlices sets time slices of GPUs by the driver's own program: NVML has no call for it. Make it
// with NewTimeSlices.
type TimeSlices struct {
	run     func(ctx context.Context, uuid string, interval int) error
	running sync.Map // the UUIDs of GPUs for which the program runs
}

// NewTimeSlices returns TimeSlices that use the program below a driver root, a path of this
// process. The folders searchPath are looked through for its library before others.
func NewTimeSlices(driverRoot string, searchPath ...string) *TimeSlices {
	return &TimeSlices{run: func(ctx context.Context, uuid string, interval int) error {
		return setTimeSlice(ctx, driverRoot, searchPath, uuid, interval)
	}}
}

// Set sets how long a process has a GPU before the next one gets it: 0 is the driver's default,
// then short, medium and long. It returns some seconds after ctx has ended at the latest, and after
// 10 s, also if the program does not end.
func (t *TimeSlices) Set(ctx context.Context, uuid string, interval int) error {
	if _, hangs := t.running.LoadOrStore(uuid, true); hangs {
		return fmt.Errorf("set the time slice of %s: %w", uuid, errHangs)
	}
	ctx, cancel := context.WithTimeout(ctx, smiTimeout)
	ended, err := AwaitProgram(ctx, 2*smiWaitDelay, func() error {
		defer cancel()
		defer t.running.Delete(uuid)
		return t.run(ctx, uuid, interval)
	})
	if !ended {
		return fmt.Errorf("set the time slice of %s: %w", uuid, errHangs)
	}
	return err
}

// AwaitProgram runs a program that ctx ends, and waits for it until a time after the end of ctx: a
// program that hangs in the driver does not end when it is killed. It reports false if the program
// runs still.
func AwaitProgram(ctx context.Context, patience time.Duration, run func() error) (ended bool, err error) {
	end := make(chan error, 1)
	go func() { end <- run() }()
	select {
	case err := <-end:
		return true, err
	case <-ctx.Done():
	}
	select {
	case err := <-end:
		return true, err
	case <-time.After(patience):
		return false, nil
	}
}

// smi returns the driver's own program below a driver root, a path of this process, with arguments.
// Ctx ends it.
func smi(ctx context.Context, driverRoot string, searchPath []string, args ...string) *exec.Cmd {
	program := "nvidia-smi"
	for _, folder := range driverroot.ProgramFolders() {
		if found, err := driverroot.ResolveIn(driverRoot, path.Join(folder, program)); err == nil {
			program = found
			break
		}
	}
	c := exec.CommandContext(ctx, program, args...)
	c.WaitDelay = smiWaitDelay
	if library := locate(driverRoot, searchPath); library != "" {
		c.Env = append(os.Environ(), "LD_PRELOAD="+library) // its loader need not know the driver root
	}
	return c
}

// setTimeSlice runs the program, and waits until it has ended.
func setTimeSlice(ctx context.Context, driverRoot string, searchPath []string, uuid string, interval int) error {
	c := smi(ctx, driverRoot, searchPath, "compute-policy", "-i", uuid, "--set-timeslice", strconv.Itoa(interval))
	output, err := bounded(c)
	if err == nil {
		return nil
	}
	said := strings.Join(strings.Fields(string(output)), " ")
	return fmt.Errorf("set the time slice of %s by nvidia-smi: %w: %s", uuid, cmp.Or(timedOut(ctx), err),
		said[:min(len(said), maxSMIOutput)])
}

// timedOut returns an error if the time for nvidia-smi is over.
func timedOut(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("it did not end within %v", smiTimeout)
	}
	return nil
}
