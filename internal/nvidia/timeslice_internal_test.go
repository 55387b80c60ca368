package nvidia

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestTimeSliceOfADriverThatHangs: a program that cannot even be killed keeps nobody waiting, and is run no second time for its GPU before it
// has ended. Other GPUs have nothing to do with it.
func TestTimeSliceOfADriverThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var runs atomic.Int32
		over := make(chan struct{})
		s := &TimeSlices{run: func(_ context.Context, uuid string, _ int) error {
			if runs.Add(1); uuid == "GPU-a" {
				<-over
			}
			return nil
		}}
		began := time.Now()
		if err := s.Set(t.Context(), "GPU-a", 1); !errors.Is(err, errHangs) {
			t.Errorf("Set() = %v", err)
		}
		if took := time.Since(began); took > smiTimeout+3*time.Second {
			t.Errorf("it took %v", took)
		}
		if err := s.Set(t.Context(), "GPU-a", 0); !errors.Is(err, errHangs) || runs.Load() != 1 {
			t.Errorf("the second time: %v; %d runs", err, runs.Load())
		}
		if err := s.Set(t.Context(), "GPU-b", 1); err != nil {
			t.Error(err)
		}
		close(over)
		synctest.Wait()
		if err := s.Set(t.Context(), "GPU-a", 0); err != nil || runs.Load() != 3 {
			t.Errorf("after its end: %v; %d runs", err, runs.Load())
		}
	})
}

// TestTimeSliceOfAnotherRoot: the program is given the library below the driver root, where there is one.
func TestTimeSliceOfAnotherRoot(t *testing.T) { // not parallel: a process that is forked meanwhile would keep the program open for writing
	t.Setenv("LD_PRELOAD", "")
	const lib = "usr/lib64/libnvidia-ml.so.1"
	script := "#!/bin/sh\necho \"preloads $LD_PRELOAD, $SOME\"; printf '%0300d' 0; exit 3\n"
	t.Setenv("SOME", "and the rest")
	for _, tree := range []map[string]string{
		{"bin/nvidia-smi": script}, {"bin/nvidia-smi": script, lib: sharedObject(map[string]byte{"amd64": 62, "arm64": 183}[runtime.GOARCH])},
	} {
		root := writeTree(t, tree)
		if err := os.Chmod(filepath.Join(root, "bin/nvidia-smi"), 0o700); err != nil {
			t.Fatal(err)
		}
		preloads := ""
		if tree[lib] != "" {
			preloads = filepath.Join(root, lib)
		}
		err := setTimeSlice(t.Context(), root, "GPU-a", 1)
		if err == nil || tree[lib] == "" && !strings.Contains(err.Error(), "preloads , and the rest") || !strings.Contains(err.Error(), preloads) {
			t.Errorf("with the library %q: %v", preloads, err)
		}
		if _, said, _ := strings.Cut(err.Error(), "exit status 3: "); len(said) != maxSMIOutput {
			t.Errorf("%d bytes of what it said are in the error", len(said))
		}
	}
}

// TestTimeSliceOfAProgramThatIsSlow: the error says that its time was over, and not how it was ended.
func TestTimeSliceOfAProgramThatIsSlow(t *testing.T) {
	t.Parallel()
	root := writeTree(t, map[string]string{"usr/bin/nvidia-smi": ""})
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	if err := setTimeSlice(ctx, root, "GPU-a", 1); err == nil || !strings.Contains(err.Error(), "it did not end within 10s") {
		t.Errorf("after its time: %v", err)
	}
	if err := setTimeSlice(t.Context(), root, "GPU-a", 1); err == nil || strings.Contains(err.Error(), "it did not end") {
		t.Errorf("a program that cannot be run: %v", err)
	}
}
