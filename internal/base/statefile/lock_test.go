package statefile_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// TestLock: a lock has one owner, shares have several, and the owner can be queried without taking
// the lock.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if statefile.IsLocked(path) {
		t.Error("a file that is not there is locked")
	}
	alone, err := statefile.TakeLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if alone.Others() || !statefile.IsLocked(path) {
		t.Errorf("others have it: %v, it is locked: %v; want false and true", alone.Others(), statefile.IsLocked(path))
	}
	for name, take := range map[string]func(string) (*statefile.Lock,
		error){"the lock": statefile.TakeLock, "a share": statefile.TakeShare} {
		if _, err := take(path); !errors.Is(err, statefile.ErrLocked) {
			t.Errorf("%s of a lock that is taken: %v; want ErrLocked", name, err)
		}
	}
	alone.Close()
	if statefile.IsLocked(path) {
		t.Error("it is locked after it was given back")
	}

	one, err := statefile.TakeShare(path)
	if err != nil {
		t.Fatal(err)
	}
	if one.Others() {
		t.Error("others have a share before there is another")
	}
	two, err := statefile.TakeShare(path)
	if err != nil {
		t.Fatal(err)
	}
	if !one.Others() || !two.Others() || !statefile.IsLocked(path) {
		t.Error("two shares do not see each other")
	}
	if _, err := statefile.TakeLock(path); !errors.Is(err, statefile.ErrLocked) {
		t.Errorf("the lock beside shares of it: %v; want ErrLocked", err)
	}
	two.Close()
	if one.Others() {
		t.Error("others have a share after it was given back")
	}
	one.Close()

	if _, err := statefile.TakeShare(filepath.Join(path, "below a file")); err == nil ||
		errors.Is(err, statefile.ErrLocked) || errors.Is(err, os.ErrNotExist) {
		t.Errorf("a share of the lock of a file that cannot be made: %v", err)
	}
}
