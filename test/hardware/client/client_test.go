package main_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Without the driver's library the client says so in a line, and the reason is the loader's.
func TestWithoutTheDriver(t *testing.T) {
	client := filepath.Join(t.TempDir(), "client")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", client, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c := exec.CommandContext(t.Context(), client, "info")
	c.Env = []string{"LD_LIBRARY_PATH=" + t.TempDir()}
	out, err := c.Output()
	if err == nil {
		t.Skip("this machine has the driver's library")
	}
	if c.ProcessState.ExitCode() != 1 || !strings.HasPrefix(string(out), `{"error":"dlopen: libcuda.so.1: cannot open`) {
		t.Errorf("%v\n%s", err, out)
	}
}
