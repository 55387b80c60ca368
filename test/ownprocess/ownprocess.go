// Package ownprocess is for tests of what holds for a whole process, as the limits of the kernel
// do: in the process of all tests it would hold for the others too, and for the testing package,
// which writes files of its own.
package ownprocess

import (
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
)

// variable has the name of the test that a process was started for.
const variable = "TEST_OWN_PROCESS"

// Is reports whether this process was started for the test t, which then does its work. Otherwise Is
// runs t in such a process, and t has nothing left to do. Everything but a pass there fails t.
func Is(t *testing.T) bool {
	t.Helper()
	if os.Getenv(variable) == t.Name() {
		return true
	}
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$")
	c.Env = append(os.Environ(), variable+"="+t.Name())
	switch out, err := c.CombinedOutput(); {
	case err != nil:
		t.Errorf("%v: %s", err, out)
	case !strings.Contains(string(out), "--- PASS: "+t.Name()+" "):
		t.Errorf("the process of this test did not run it: %s", out)
	}
	return false
}

// LimitFiles has the kernel refuse to write more bytes than these into a file, as on a full disk. Zero
// stands for no limit. It is for a process of the test's own.
func LimitFiles(t *testing.T, bytes uint64) {
	t.Helper()
	signal.Ignore(syscall.SIGXFSZ) // a write fails, and the process goes on
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Cur = bytes; bytes == 0 {
		limit.Cur = limit.Max
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
}
