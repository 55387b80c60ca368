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

// smiTimeout is the time limit of nvidia-smi. Without the persistence daemon it takes a second.
const smiTimeout = 10 * time.Second

// smiWaitDelay limits the wait for the output of a killed nvidia-smi.
const smiWaitDelay = time.Second

// maxSMIOutput limits the output of nvidia-smi in an error, in bytes.
const maxSMIOutput = 200

// errHangs is the error while an earlier nvidia-smi does not end even after a kill, for example
// while the driver hangs.
var errHangs = errors.New("an earlier nvidia-smi hangs in the driver; time slices cannot be set until it ends")

// TimeSlices sets the time slices of GPUs with nvidia-smi, because NVML has no call for time
// slices. Create TimeSlices with NewTimeSlices.
type TimeSlices struct {
	run     func(ctx context.Context, uuid string, interval int) error
	running sync.Map // the UUIDs of GPUs with a running program
}

// NewTimeSlices returns TimeSlices with nvidia-smi below a driver root, a path of this process. The
// library of nvidia-smi is searched first in the directories searchPath.
func NewTimeSlices(driverRoot string, searchPath ...string) *TimeSlices {
	return &TimeSlices{run: func(ctx context.Context, uuid string, interval int) error {
		return setTimeSlice(ctx, driverRoot, searchPath, uuid, interval)
	}}
}

// Set sets the time slice of a GPU: 0 is the driver's default, followed by short, medium and long.
// It returns within some seconds after the end of ctx, and after 10 s at the latest, even if the
// program does not end.
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

// AwaitProgram runs a program that ends with ctx, and waits for the program until patience after
// the end of ctx: a program that hangs in the driver does not end after a kill. It returns false if
// the program is still running.
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

// smi returns nvidia-smi below a driver root, a path of this process, with arguments. The program
// ends with ctx.
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
		c.Env = append(os.Environ(), "LD_PRELOAD="+library) // the loader may not know the driver root
	}
	return c
}

// setTimeSlice runs nvidia-smi and waits for its end.
func setTimeSlice(ctx context.Context, driverRoot string, searchPath []string, uuid string, interval int) error {
	c := smi(ctx, driverRoot, searchPath, "compute-policy", "-i", uuid, "--set-timeslice", strconv.Itoa(interval))
	output, err := runBounded(c)
	if err == nil {
		return nil
	}
	said := strings.Join(strings.Fields(string(output)), " ")
	return fmt.Errorf("set the time slice of %s by nvidia-smi: %w: %s", uuid, cmp.Or(timedOut(ctx), err),
		said[:min(len(said), maxSMIOutput)])
}

// timedOut returns an error if nvidia-smi has no time left.
func timedOut(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("it did not end within %v", smiTimeout)
	}
	return nil
}
