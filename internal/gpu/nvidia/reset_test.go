package nvidia_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

// TestSMIReset: the program is told which GPUs, and an error has what it says, without what a
// terminal would follow.
// Not parallel: a process that is forked meanwhile would keep the program open for writing.
func TestSMIReset(t *testing.T) {
	for name, test := range map[string]struct{ script, want string }{
		"works": {
			`[ "$*" = "--gpu-reset -i 0000:1b:00.0,0000:43:00.0" ] && ` +
				`echo "GPU 0000:1b:00.0 was successfully reset."`, ""},
		"refused": {
			`printf 'The following GPUs could not be reset:\n  GPU 0000:1B:00.0: In use\033[2J by another ` +
				`client\n' >&2; exit 255`,
			"nvidia-smi: exit status 255: The following GPUs could not be reset: GPU 0000:1B:00.0: In use[2J by " +
				"another client",
		},
		"no reset": {
			`echo "Resetting GPU 00000000:1B:00.0 is not supported."`,
			"did not report a reset of the GPU: Resetting GPU",
		},
		"many warnings": {`yes word | head -n 1000; echo "GPU 0000:1b:00.0 was successfully reset."`, ""},
		"no word":       {"exit 3", "nvidia-smi: exit status 3: it printed nothing"},
		"garbage":       {`head -c 100000 /dev/zero | tr '\0' '\377'; exit 1`, "exit status 1: it printed nothing"},
		"very much":     {`yes word | head -c 50000000; exit 1`, "word word"},
	} {
		root := writeTree(t, map[string]string{"usr/bin/nvidia-smi": "#!/bin/sh\n" + test.script + "\n"})
		if err := os.Chmod(filepath.Join(root, "usr/bin/nvidia-smi"), 0o700); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := nvidia.SMIReset(root, nil)(t.Context(), []string{"0000:1b:00.0", "0000:43:00.0"})
		if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 20<<20 {
			t.Errorf("%s: it took %d bytes of memory", name, after.TotalAlloc-before.TotalAlloc)
		}
		if test.want == "" && err != nil || test.want != "" &&
			(err == nil || !strings.Contains(err.Error(), test.want) || len(err.Error()) > 1100) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}

// TestResetThatHangs: a program that runs too long is ended, also with those that it started, which
// keep its output open.
func TestResetThatHangs(t *testing.T) { // not parallel, as above
	script := "#!/bin/sh\nsleep 1000 &\necho $! > \"$PIDS\"; wait\n"
	root := writeTree(t, map[string]string{"usr/bin/nvidia-smi": script})
	if err := os.Chmod(filepath.Join(root, "usr/bin/nvidia-smi"), 0o700); err != nil {
		t.Fatal(err)
	}
	pids := filepath.Join(root, "pids")
	t.Setenv("PIDS", pids)
	r := nvidia.NewResets(100*time.Millisecond, nvidia.SMIReset(root, nil))
	err := r.Reset(t.Context(), []string{"0000:1b:00.0"}, func() { t.Error("it was given up") })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Reset() = %v", err)
	}
	if text, err := os.ReadFile(pids); err == nil {
		kill(t, strings.TrimSpace(string(text)))
	}
}

// TestResetThatCannotBeEnded keeps nobody waiting, and no second one is begun before it has ended.
func TestResetThatCannotBeEnded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		over, ended := make(chan struct{}), false
		r := nvidia.NewResets(nvidia.ResetTimeout, func(context.Context, []string) error { <-over; return nil })
		began := time.Now()
		if err := r.Reset(t.Context(), nil, func() { ended = true }); !errors.Is(err, nvidia.ErrResetHangs) {
			t.Errorf("Reset() = %v", err)
		}
		if took := time.Since(began); took > nvidia.ResetTimeout+3*time.Second {
			t.Errorf("it took %v", took)
		}
		if err := r.Reset(t.Context(), nil, nil); err == nil || errors.Is(err, nvidia.ErrResetHangs) || ended {
			t.Errorf("the second time: %v", err)
		}
		close(over)
		synctest.Wait()
		if err := r.Reset(t.Context(), nil, nil); err != nil || !ended {
			t.Errorf("after its end: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Reset(ctx, nil, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("when the daemon ends: %v", err)
		}
	})
}

// kill ends a process that a test has started.
func kill(t *testing.T, pid string) {
	t.Helper()
	n, err := strconv.Atoi(pid)
	if err == nil {
		err = syscall.Kill(n, syscall.SIGKILL)
	}
	if err != nil {
		t.Error(err)
	}
}
