package statefile_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

// The umask belongs to the whole process, so the test is not parallel.
func TestListen(t *testing.T) {
	for umask, want := range map[int]os.FileMode{0: 0o600, 0o022: 0o600, 0o077: 0o600} {
		path := filepath.Join(t.TempDir(), "a%2F.sock")
		before := syscall.Umask(umask)
		listener, err := statefile.Listen(t.Context(), path)
		syscall.Umask(before)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != want|os.ModeSocket {
			t.Errorf("umask %o: the socket is %v, %v", umask, info.Mode(), err)
		}
		if _, err := statefile.Listen(t.Context(), path); err == nil {
			t.Error("a second listener at the same path")
		}
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(path); err == nil {
			t.Error("the socket is there after Close")
		}
	}
	folder := loopback.Folder(t)
	for extra, ok := range map[int]bool{0: true, 1: false} {
		listener, err := statefile.Listen(t.Context(), filepath.Join(folder,
			strings.Repeat("s", statefile.MaxSocketPath-1-len(folder)+extra)))
		if (err == nil) != ok {
			t.Errorf("a path of %d bytes: %v", statefile.MaxSocketPath+extra, err)
		}
		if err == nil {
			_ = listener.Close()
		}
	}
}
