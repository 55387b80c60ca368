package statefile_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// TestFilesOfKilledProcesses: the first write in a folder, and each Sweep, removes leftovers of
// killed processes, and nothing else.
func TestFilesOfKilledProcesses(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	left := statefile.TemporaryName(filepath.Join(folder, "faults.json"), "1")
	others := []string{".another.5.tmp", ".hidden", "a", "gpu-device-plugin.tmp"}
	for _, name := range append(slices.Clone(others), filepath.Base(left)) {
		if err := os.WriteFile(filepath.Join(folder, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := statefile.Replace(filepath.Join(folder, "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := names(t, folder); !slices.Equal(got, others) {
		t.Errorf("after the first write the folder has %q, want %q", got, others)
	}
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := statefile.Sweep(folder); err != nil {
		t.Error(err)
	}
	if got := names(t, folder); !slices.Equal(got, others) {
		t.Errorf("after a sweep the folder has %q, want %q", got, others)
	}
	if err := statefile.Sweep(filepath.Join(folder, "none")); err != nil {
		t.Error(err)
	}
}

// TestSweepBesideWrites: a file being written stays, so each write succeeds.
func TestSweepBesideWrites(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	var writers sync.WaitGroup
	for i := range 4 {
		writers.Go(func() {
			for range 200 {
				err := statefile.Write(filepath.Join(folder, fmt.Sprint(i)), []byte("content"), 0o600,
					func(string) error { return statefile.Sweep(folder) })
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	if got := names(t, folder); !slices.Equal(got, []string{"0", "1", "2", "3"}) {
		t.Errorf("the folder has %q", got)
	}
}
