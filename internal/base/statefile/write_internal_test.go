package statefile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// A file whose content may not be on the disk does not replace the old file, and is removed.
func TestContentThatIsNotOnTheDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	if err := os.WriteFile(path, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("input/output error")
	if err := write(path, []byte("after"), 0o600, func(*os.File) error { return broken }, nil); !errors.Is(err,
		broken) {
		t.Errorf("the error is %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("%d files in the folder, %v", len(entries), err)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != "before" {
		t.Errorf("the file has %q, %v", content, err)
	}
}
