package statefile_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
)

// The kernel writes a part of the content and then refuses the rest, as on a full disk.
func TestWriteOnAFullDiskLeavesTheOldFileAndNoOther(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	path, check := oldFile(t)
	ownprocess.LimitFiles(t, 1000)
	for range 10 {
		err := statefile.Write(path, bytes.Repeat([]byte("n"), 2000), 0o600, nil)
		if want := "write " + path + ": write: file too large"; !errors.Is(err, syscall.EFBIG) || err.Error() != want {
			t.Fatalf("write of 2,000 bytes: %v, want each time: %s", err, want)
		}
	}
	check()
}

// A file whose content may not be on the disk does not replace the old file, and is removed.
func TestContentThatIsNotOnTheDisk(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	path, check := oldFile(t)
	ownprocess.Refuse(t, syscall.SYS_FSYNC, syscall.EIO)
	if err := statefile.Write(path, []byte("new"), 0o600, nil); !errors.Is(err, syscall.EIO) {
		t.Errorf("Write() = %v", err)
	}
	check()
}

// oldFile returns the path of a file, and a check that the file is as before and alone in its folder.
func oldFile(t *testing.T) (path string, check func()) {
	t.Helper()
	folder := t.TempDir()
	path = filepath.Join(folder, "a")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, func() {
		t.Helper()
		if got := names(t, folder); !slices.Equal(got, []string{"a"}) {
			t.Errorf("the folder has %q", got)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != "old" {
			t.Errorf("the old file has %q: %v", text, err)
		}
	}
}
