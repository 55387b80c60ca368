package statefile_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

func TestRead(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	path := func(name string) string { return filepath.Join(folder, name) }
	if err := errors.Join(
		os.WriteFile(path("short"), []byte("12345678"), 0o600),
		os.WriteFile(path("long"), []byte("123456789"), 0o600),
		os.Symlink("short", path("link")),
		os.Symlink(os.DevNull, path("null")),
		os.Mkdir(path("folder"), 0o700),
		syscall.Mkfifo(path("fifo"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	socket, err := net.Listen("unix", path("socket"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	for name, want := range map[string]struct{ text, err string }{
		"short":   {text: "12345678"},
		"link":    {text: "12345678"},
		"null":    {},
		"long":    {err: "is larger than 8 bytes"},
		"missing": {err: "no such file"},
		"folder":  {err: "is a folder, not a regular file"},
		"fifo":    {err: "is a FIFO, not a regular file"},
		"socket":  {err: "no such device"}, // the kernel refuses to open the file
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := make(chan string, 1)
			go func() {
				data, err := statefile.Read(path(name), 8)
				if (err == nil) != (want.err == "") || err != nil && !strings.Contains(err.Error(), want.err) {
					t.Errorf("Read() = %v, want %q", err, want.err)
				}
				got <- string(data)
			}()
			select {
			case text := <-got:
				if text != want.text {
					t.Errorf("Read() = %q, want %q", text, want.text)
				}
			case <-time.After(time.Minute):
				t.Fatal("Read() blocks")
			}
		})
	}
	if _, err := statefile.Read("/dev/zero", 8); err == nil || !strings.Contains(err.Error(), "is a device") {
		t.Errorf("Read(/dev/zero) = %v", err)
	}
	if _, err := statefile.Read("/proc/self/mem", 8); !errors.Is(err, syscall.EIO) { // nothing is at address 0
		t.Errorf("Read(/proc/self/mem) = %v, want the error of the read", err)
	}
	if _, err := statefile.Read(path("missing"), 8); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Read() = %v, want fs.ErrNotExist", err)
	}
}

// A large file is refused before reading: the daemon may have little memory.
func TestReadOfALargeFileTakesNoMemory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "large")
	const limit = 16 << 20
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 4*limit)); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := statefile.Read(path, limit); err == nil || !strings.Contains(err.Error(), "is larger than") {
		t.Errorf("Read() = %v", err)
	}
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took > limit/16 {
		t.Errorf("Read() took %d bytes", took)
	}
}
