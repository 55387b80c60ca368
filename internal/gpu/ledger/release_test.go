package ledger_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

func TestRelease(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if r, err := ledger.ReadRelease(dir, "1"); r != nil || err != nil {
		t.Errorf("without a folder: %+v, %v", r, err)
	}
	if err := ledger.RemoveRelease(dir); err != nil {
		t.Errorf("nothing to remove: %v", err)
	}
	want := ledger.Release{Version: 1, Since: began, Allocate: true, Boot: "1"}
	if err := ledger.WriteRelease(dir, ledger.Release{Since: began, Allocate: true, Boot: "1"}); err != nil {
		t.Fatal(err)
	}
	wantMode(t, dir, 0o700|os.ModeDir)
	wantMode(t, filepath.Join(dir, "quiesce.json"), 0o600)
	for _, boot := range []string{"1", ""} {
		if r, err := ledger.ReadRelease(dir, boot); err != nil || r == nil || *r != want {
			t.Errorf("in boot %q: %+v, %v", boot, r, err)
		}
	}
	for range 2 { // the second time it is gone
		if r, err := ledger.ReadRelease(dir, "2"); r != nil || err != nil {
			t.Errorf("after a restart of the node: %+v, %v", r, err)
		}
	}
	want.Boot = ""
	if err := ledger.WriteRelease(dir, want); err != nil {
		t.Fatal(err)
	}
	if r, err := ledger.ReadRelease(dir, "2"); err != nil || r == nil {
		t.Errorf("written where no boot ID was known: %+v, %v", r, err)
	}
	if err := ledger.RemoveRelease(dir); err != nil {
		t.Error(err)
	}
	if r, err := ledger.ReadRelease(dir, ""); r != nil || err != nil {
		t.Errorf("after it was removed: %+v, %v", r, err)
	}
	for _, text := range []string{"", "{", `{"version": 2}`, `{"since": "2026-01-02T03:04:05Z"}`} {
		if err := os.WriteFile(filepath.Join(dir, "quiesce.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if r, err := ledger.ReadRelease(dir, ""); r != nil || err == nil ||
			!strings.Contains(err.Error(), "quiesce.json.damaged") {
			t.Errorf("%q: %+v, %v", text, r, err)
		}
		compare(t, "what is set aside", text, read(t, dir, "quiesce.json.damaged"))
		if _, err := os.Stat(filepath.Join(dir, "quiesce.json")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q is still there: %v", text, err)
		}
	}
	blocked := filepath.Join(dir, "quiesce.json.damaged")
	if err := ledger.WriteRelease(blocked, want); err == nil {
		t.Error("no error for a folder that cannot be written")
	}
	if err := ledger.RemoveRelease(blocked); err == nil {
		t.Error("no error for a folder that cannot be read")
	}
}
