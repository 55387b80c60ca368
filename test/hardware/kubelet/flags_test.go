package kubelet_test

import (
	_ "embed"
	"flag"
	"path/filepath"
	"testing"
)

var (
	daemon   = flag.String("daemon", "", "path of gpu-device-plugin")
	client   = flag.String("client", "", "path of the program of the folder client, built with the C library of this machine or an older one")
	programs = flag.String("programs", "", "folder in whose folders are containerd, ctr and kubelet, as make e2e fills it")
	source   = flag.String("source", "../../..", "folder of the repository")
)

//go:embed testdata/computemode.c
var computeMode string

// needGPU leaves a test out where there is nothing to try.
func needGPU(t *testing.T) {
	t.Helper()
	if *daemon == "" || *client == "" || *programs == "" {
		t.Skip("make hardware runs it, on a machine with an NVIDIA GPU")
	}
	if gpus, _ := filepath.Glob("/proc/driver/nvidia/gpus/*"); len(gpus) == 0 {
		t.Skip("this machine has no NVIDIA GPU that its driver uses")
	}
}
