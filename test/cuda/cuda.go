// Package cuda has a stand-in for the driver's libcuda, which fails as a test wants it.
package cuda

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

//go:embed testdata/libcuda.c
var source string

// A Library is a stand-in that is installed below a driver root.
type Library struct {
	folder string
	faults []string
}

// Install compiles the stand-in into a driver root. Flags are for the compiler: -DOLD for a driver
// before CUDA 11.4, -DLACKS for a library without cuCtxSynchronize.
func Install(t testing.TB, root string, flags ...string) *Library {
	t.Helper()
	if err := Build(t.Context(), root, flags...); err != nil {
		t.Fatal(err)
	}
	return &Library{folder: folder(root)}
}

func folder(root string) string { return filepath.Join(root, "usr", "lib64") }

// Build is Install for a program that is no test.
func Build(ctx context.Context, root string, flags ...string) error {
	if err := os.MkdirAll(folder(root), 0o755); err != nil {
		return err
	}
	flags = append(flags, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-O1", "-Wl,-soname,libcuda.so.1",
		"-o", filepath.Join(folder(root), "libcuda.so.1"), "-xc", "-")
	c := exec.CommandContext(ctx, "gcc", flags...)
	c.Stdin = strings.NewReader(source)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("gcc and the C library's headers are needed to compile a library: install them (%w)\n%s", err, out)
	}
	return nil
}

// Fail has a function fail for a device, by UUID: by an error of CUDA, or "wrong", "hang", "crash"
// or "leak".
func (l *Library) Fail(t testing.TB, uuid, function, action string) {
	t.Helper()
	l.faults = append(l.faults, uuid+" "+function+" "+action+"\n")
	l.write(t)
}

// Repair makes every call succeed again.
func (l *Library) Repair(t testing.TB) {
	t.Helper()
	l.faults = nil
	l.write(t)
}

// write replaces the file at once, because processes may read it.
func (l *Library) write(t testing.TB) {
	t.Helper()
	path := filepath.Join(l.folder, "faults")
	if err := errors.Join(os.WriteFile(path+".new", []byte(strings.Join(l.faults, "")), 0o600),
		os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

// A Call is a call of a function, about a device, by a process.
type Call struct {
	UUID, Function string
	PID            int
}

// Calls returns all calls so far.
func (l *Library) Calls(t testing.TB) []Call {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(l.folder, "calls"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	var calls []Call
	for line := range strings.Lines(string(text)) {
		var c Call
		if _, err := fmt.Sscan(line, &c.UUID, &c.Function, &c.PID); err == nil {
			calls = append(calls, c)
		}
	}
	return calls
}

// Count returns how often a function was called for a device.
func (l *Library) Count(t testing.TB, uuid, function string) int {
	t.Helper()
	n := 0
	for _, c := range l.Calls(t) {
		if c.UUID == uuid && c.Function == function {
			n++
		}
	}
	return n
}
