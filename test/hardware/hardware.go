package hardware

import (
	"path/filepath"
	"testing"
)

// An Answer is a line that the client prints. Amounts of memory are in bytes.
type Answer struct {
	Device, UUID   string
	SMs            int
	Free, Total    int64
	Allocated      int64
	Refused, Error string
	Started        bool
	Launches       int
	Seconds, FMAs  float64
}

// NeedGPU leaves a test out where nothing was given to try, as outside make hardware, or where
// there is no GPU to try it on.
func NeedGPU(t testing.TB, given ...string) {
	t.Helper()
	for _, path := range given {
		if path == "" {
			t.Skip("make hardware runs it, on a machine with an NVIDIA GPU")
		}
	}
	if gpus, _ := filepath.Glob("/proc/driver/nvidia/gpus/*"); len(gpus) == 0 {
		t.Skip("this machine has no NVIDIA GPU that its driver uses")
	}
}
