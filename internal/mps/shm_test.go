package mps_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

func TestMountSHM(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir := filepath.Join(root, "shm")
	var fs unix.Statfs_t
	want := int64(syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC)
	err := mps.MountSHM(root)
	mounted := err == nil
	defer func() {
		if mounted {
			for range 2 { // the second time nothing is mounted
				if err := mps.UnmountSHM(root); err != nil {
					t.Error(err)
				}
			}
			if unix.Statfs(dir, &fs) != nil || fs.Flags&want == want {
				t.Error("it is mounted still")
			}
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("the folder that containers are given: %v, %v", info, err)
		}
	}()
	if errors.Is(err, mps.ErrNotMounted) {
		if !strings.Contains(err.Error(), "run this container privileged") {
			t.Errorf("without the privilege: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	var machine unix.Sysinfo_t
	if err := errors.Join(unix.Statfs(dir, &fs), unix.Sysinfo(&machine)); err != nil {
		t.Fatal(err)
	}
	half := uint64(machine.Totalram) * uint64(machine.Unit) / 2
	if size := fs.Blocks * uint64(fs.Bsize); fs.Type != unix.TMPFS_MAGIC || size < half ||
		size > half+uint64(fs.Bsize) {
		t.Errorf("a file system of type %#x with %d bytes, want tmpfs with %d", fs.Type, size, half)
	}
	if fs.Flags&want != want {
		t.Errorf("mounted with flags %#x, want %#x", fs.Flags, want)
	}
	if err := mps.MountSHM(root); !errors.Is(err, mps.ErrNotMounted) ||
		!strings.Contains(err.Error(), "is mounted already") {
		t.Errorf("a second time: %v", err)
	}
}
