package statefile_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// names returns the names in a folder.
func names(t *testing.T, folder string) []string {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestWrite(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	path := filepath.Join(folder, "a.json")
	for _, content := range []string{"first", "the second", ""} {
		var checked string
		err := statefile.Write(path, []byte(content), 0o644, func(temporary string) error {
			text, err := os.ReadFile(temporary)
			checked = string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil || string(text) != content || checked != content {
			t.Errorf("the file has %q, the check saw %q, want %q: %v", text, checked, content, err)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o644 {
		t.Errorf("the file has mode %v: %v", info.Mode(), err)
	}
	if got := names(t, folder); !slices.Equal(got, []string{"a.json"}) {
		t.Errorf("the folder has %q", got)
	}
}

func TestWriteThatFailsLeavesTheOldFileAndNoOther(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	tests := map[string]struct {
		name  string
		check func(string) error
		want  error
	}{
		"the check refuses":        {name: "a", check: func(string) error { return refused }, want: refused},
		"a folder is in the place": {name: "folder", want: syscall.EEXIST},
		"no such folder":           {name: "none/a", want: fs.ErrNotExist},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			if err := errors.Join(os.WriteFile(filepath.Join(folder, "a"), []byte("old"), 0o600),
				os.Mkdir(filepath.Join(folder, "folder"), 0o700)); err != nil {
				t.Fatal(err)
			}
			err := statefile.Write(filepath.Join(folder, test.name), []byte("new"), 0o600, test.check)
			if !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.name) {
				t.Errorf("Write() = %v, want %v and the file's name", err, test.want)
			}
			if got := names(t, folder); !slices.Equal(got, []string{"a", "folder"}) {
				t.Errorf("the folder has %q", got)
			}
			if text, err := os.ReadFile(filepath.Join(folder, "a")); err != nil || string(text) != "old" {
				t.Errorf("the old file has %q: %v", text, err)
			}
		})
	}
}

// Two daemons write the same file during a rolling update.
func TestWritersAtTheSameTimeLeaveOneWholeFile(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	path := filepath.Join(folder, "a")
	contents := [][]byte{bytes.Repeat([]byte("a"), 100_000), bytes.Repeat([]byte("b"), 100_000)}
	var writers sync.WaitGroup
	for _, content := range contents {
		writers.Go(func() {
			for range 50 {
				if err := statefile.Write(path, content, 0o600, nil); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	text, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(text, contents[0]) && !bytes.Equal(text, contents[1]) {
		t.Errorf("the file has %d bytes of both: %v", len(text), err)
	}
	if got := names(t, folder); !slices.Equal(got, []string{"a"}) {
		t.Errorf("the folder has %q", got)
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing
		if err := statefile.Remove(path); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the file is there: %v", err)
		}
	}
	full := t.TempDir()
	if err := os.Mkdir(filepath.Join(full, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := statefile.Remove(full); err == nil {
		t.Error("a folder that is not empty is removed")
	}
}
