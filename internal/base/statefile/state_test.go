package statefile_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

type state struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
}

// TestState: the owner alone can read a written state.
func TestState(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "made", "state.json")
	var got state
	if found, err := statefile.ReadState(path, 100, 1, &got); found || err != nil {
		t.Errorf("without a file: %v, %v", found, err)
	}
	if err := statefile.WriteState(path, func() {}); err == nil || !strings.Contains(err.Error(), "unsupported type") {
		t.Errorf("a state that is no JSON: %v", err)
	}
	want := state{1, "a"}
	if err := statefile.WriteState(path, want); err != nil {
		t.Fatal(err)
	}
	if found, err := statefile.ReadState(path, 100, 1, &got); !found || err != nil {
		t.Errorf("found %v, %v", found, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for name, mode := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): 0o700 | os.ModeDir} {
		if info, err := os.Stat(name); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v, want %v", name, info.Mode(), err, mode)
		}
	}
}

// TestStateThatCannotBeRead is set aside, and the error says why.
func TestStateThatCannotBeRead(t *testing.T) {
	t.Parallel()
	for text, why := range map[string]string{
		`{"version": 2}`:            "it has version 2, and this program writes 1",
		`{}`:                        "it has version 0",
		`{"version": 1, "name": 3}`: "cannot unmarshal number",
		`{"version": 1, "na`:        "unexpected end",
		`{"version": 1}` + string(make([]byte, 100)): "larger than 100 bytes",
	} {
		path := filepath.Join(t.TempDir(), "state.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var got state
		if found, err := statefile.ReadState(path, 100, 1, &got); found || err == nil ||
			!strings.Contains(err.Error(), why) {
			t.Errorf("%s: found %v, %v, want %q", text, found, err, why)
		}
		if kept, err := os.ReadFile(path + statefile.Damaged); string(kept) != text {
			t.Errorf("%s: kept %q, %v", text, kept, err)
		}
		if found, err := statefile.ReadState(path, 100, 1, &got); found || err != nil {
			t.Errorf("%s, the second time: found %v, %v", text, found, err)
		}
	}
}

func TestLockFolder(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for range 2 {
		unlock, err := statefile.LockFolder(folder)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := statefile.LockFolder(folder); !errors.Is(err, statefile.ErrLocked) ||
			!strings.Contains(err.Error(), folder) {
			t.Errorf("the second LockFolder() = %v", err)
		}
		unlock()
	}
	file := filepath.Join(folder, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, filepath.Join(folder, "none")} {
		if _, err := statefile.LockFolder(path); err == nil || errors.Is(err, statefile.ErrLocked) {
			t.Errorf("LockFolder(%s) = %v", filepath.Base(path), err)
		}
	}
}
