package nvidia_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

func TestReplacedLibrary(t *testing.T) {
	t.Parallel()
	if out, code := runStub(t, "replaced library"); code != 0 || !strings.Contains(out, "--- PASS: TestStubProcess") {
		t.Fatalf("the process exited with %d:\n%s", code, out)
	}
}

// TestLoadersLibrary: a library that only the loader finds serves until there is one below the
// driver root.
func TestLoadersLibrary(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	compileStub(t, folder)
	env := []string{"LD_LIBRARY_PATH=" + filepath.Dir(stubPath(folder))}
	if out, code := runStubWith(t, "loader's library", env); code != 0 ||
		!strings.Contains(out, "--- PASS: TestStubProcess") {
		t.Fatalf("the process exited with %d:\n%s", code, out)
	}
}

// replacedLibrary gives the driver another library while this process lives.
func replacedLibrary(t *testing.T, d *nvidia.Driver, root string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	open := func() error {
		s, err := d.Open(ctx)
		if err != nil {
			return err
		}
		return s.Close(ctx)
	}
	if err := open(); err != nil {
		t.Fatal(err)
	}
	scanReplacedLibrary(ctx, t, d, root)
	path := stubPath(root)
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	if err := open(); !errors.Is(err, inventory.ErrNoDriver) || !strings.Contains(err.Error(), "was removed") {
		t.Errorf("with the library removed: got error %v", err)
	}
	compileStub(t, root)
	if err := open(); !errors.Is(err, inventory.ErrDriverReplaced) {
		t.Errorf("with another library: got error %v", err)
	}
	if err := os.Rename(path+".old", path); err != nil {
		t.Fatal(err)
	}
	if err := open(); err != nil {
		t.Errorf("with the library back: got error %v", err)
	}
}

// scanReplacedLibrary gives the driver another library during a session, and takes it back.
func scanReplacedLibrary(ctx context.Context, t *testing.T, d *nvidia.Driver, root string) {
	s, err := d.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	scan := func(when string, want error) {
		if _, err := s.Scan(ctx); !errors.Is(err, want) {
			t.Errorf("Scan %s: got error %v, want %v", when, err, want)
		}
	}
	scan("with the library in its place", nil)
	path := stubPath(root)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	scan("with the library removed", nil)
	if err := os.WriteFile(path, []byte("\x7fELF, and the rest is to come"), 0o600); err != nil {
		t.Fatal(err)
	}
	scan("with half of another library", nil)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	compileStub(t, root)
	scan("with another library", nil) // the process is bound to its own
	if err := os.Rename(path+".old", path); err != nil {
		t.Fatal(err)
	}
	scan("with the library back", nil)
	if err := os.Chtimes(path, time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	scan("with another content in its place", nil)
	if err := os.Chtimes(path, time.Time{}, info.ModTime()); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// loadersLibrary begins without the library below the driver root.
func loadersLibrary(t *testing.T, d *nvidia.Driver, root string) {
	path := stubPath(root)
	if err := os.Rename(path, path+".new"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s, err := d.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Scan(t.Context()); err != nil {
			t.Error(err)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	s, err := d.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Scan(t.Context()); err != nil {
		t.Errorf("what comes below the driver root ends a session with the loader's library: %v", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = d.Open(t.Context())
	if !errors.Is(err, inventory.ErrDriverReplaced) || !strings.Contains(err.Error(),
		"the library was the loader's libnvidia-ml.so.1 and is now "+path+" of 20") {
		t.Errorf("got error %v", err)
	}
}
