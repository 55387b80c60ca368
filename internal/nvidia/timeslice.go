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
	"time"
)

// smiTimeout is how long nvidia-smi may take. It takes a second without the persistence daemon.
const smiTimeout = 10 * time.Second

// maxSMIOutput is how much of what nvidia-smi prints is in an error, in bytes.
const maxSMIOutput = 200

// SetTimeSlice sets how long a process has a GPU before the next one gets it: 0 is the driver's default, then short, medium and long. NVML
// has no call for it, so that the driver's own program is run, from the driver root as this process sees it.
func SetTimeSlice(ctx context.Context, driverRoot, uuid string, interval int) error {
	program := "nvidia-smi"
	for _, folder := range []string{"usr/bin", "bin", "usr/local/nvidia/bin", "opt/bin"} {
		if found, err := resolveIn(driverRoot, path.Join(folder, program)); err == nil {
			program = found
			break
		}
	}
	ctx, cancel := context.WithTimeout(ctx, smiTimeout)
	defer cancel()
	c := exec.CommandContext(ctx, program, "compute-policy", "-i", uuid, "--set-timeslice", strconv.Itoa(interval))
	c.WaitDelay = time.Second
	if library, _ := locate(driverRoot); library != "" {
		c.Env = append(os.Environ(), "LD_PRELOAD="+library) // its loader need not know the driver root
	}
	output, err := c.CombinedOutput()
	if err == nil {
		return nil
	}
	said := strings.Join(strings.Fields(string(output)), " ")
	return fmt.Errorf("set the time slice of %s by nvidia-smi: %w: %s", uuid, cmp.Or(timedOut(ctx), err), said[:min(len(said), maxSMIOutput)])
}

// timedOut returns an error if the time for nvidia-smi is over.
func timedOut(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("it did not end within %v", smiTimeout)
	}
	return nil
}
