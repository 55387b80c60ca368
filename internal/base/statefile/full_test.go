package statefile_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// fullFolder has the test's process write into the folder of this name, with files of no more than
// 1,000 bytes, instead of running tests.
const fullFolder = "TEST_FULL_FOLDER"

func TestMain(m *testing.M) {
	if folder := os.Getenv(fullFolder); folder != "" {
		if err := writeTooMuch(filepath.Join(folder, "a")); err != nil {
			_, _ = fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func writeTooMuch(path string) error {
	signal.Ignore(syscall.SIGXFSZ)
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 1000, Max: 1000}); err != nil {
		return err
	}
	for range 10 {
		err := statefile.Write(path, bytes.Repeat([]byte("n"), 2000), 0o600, nil)
		if want := "write " + path + ": write: file too large"; !errors.Is(err, syscall.EFBIG) || err.Error() != want {
			return fmt.Errorf("write of 2,000 bytes: %w, want each time: %s", err, want)
		}
	}
	return nil
}

// The kernel writes a part of the content and then refuses the rest, as on a full disk.
func TestWriteOnAFullDiskLeavesTheOldFileAndNoOther(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "a"), []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), os.Args[0])
	c.Env = append(os.Environ(), fullFolder+"="+folder)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := names(t, folder); !slices.Equal(got, []string{"a"}) {
		t.Errorf("the folder has %q", got)
	}
	if text, err := os.ReadFile(filepath.Join(folder, "a")); err != nil || string(text) != "old" {
		t.Errorf("the old file has %q: %v", text, err)
	}
}
