package nvidia_test

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

// TestTimeSlices runs the driver's own program, also behind a link, and says what it said when it
// failed.
// Not parallel: a process that is forked meanwhile would keep the program open for writing.
func TestTimeSlices(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o700); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\necho \"$*\" >> " + root +
		"/calls\n[ \"$3\" != GPU-bad ] || { echo 'Not   supported'; exit 3; }\n"
	if err := os.WriteFile(filepath.Join(root, "usr/bin/smi"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/usr/bin/smi", filepath.Join(root, "usr/bin/nvidia-smi")); err != nil {
		t.Fatal(err)
	}
	slices := nvidia.NewTimeSlices(root)
	if err := slices.Set(t.Context(), "GPU-a", 2); err != nil {
		t.Fatal(err)
	}
	err := slices.Set(t.Context(), "GPU-bad", 0)
	if want := "set the time slice of GPU-bad by nvidia-smi: exit status 3: Not supported"; err == nil ||
		err.Error() != want {
		t.Errorf("an error: %v, want %s", err, want)
	}
	text, err := os.ReadFile(filepath.Join(root, "calls"))
	if want := "compute-policy -i GPU-a --set-timeslice 2\ncompute-policy -i GPU-bad --set-timeslice 0\n"; err != nil ||
		string(text) != want {
		t.Errorf("calls %q, %v", text, err)
	}
	if err := os.Remove(filepath.Join(root, "usr/bin/smi")); err != nil {
		t.Fatal(err)
	}
	if err := slices.Set(t.Context(), "GPU-a", 2); err == nil || !strings.Contains(err.Error(), "nvidia-smi") {
		t.Errorf("without the program: %v", err)
	}
}

// TestTimeSliceOfAnotherRoot: the program is given the library below the driver root, where there
// is one.
// Not parallel: a process that is forked meanwhile would keep the program open for writing.
func TestTimeSliceOfAnotherRoot(t *testing.T) {
	t.Setenv("LD_PRELOAD", "")
	const lib = "usr/lib64/libnvidia-ml.so.1"
	script := "#!/bin/sh\necho \"preloads $LD_PRELOAD, $SOME\"; printf '%0300d' 0; exit 3\n"
	t.Setenv("SOME", "and the rest")
	for _, tree := range []map[string]string{
		{"bin/nvidia-smi": script}, {"bin/nvidia-smi": script,
			lib: sharedObject(map[string]byte{"amd64": 62, "arm64": 183}[runtime.GOARCH])},
	} {
		root := writeTree(t, tree)
		if err := os.Chmod(filepath.Join(root, "bin/nvidia-smi"), 0o700); err != nil {
			t.Fatal(err)
		}
		preloads := ""
		if tree[lib] != "" {
			preloads = filepath.Join(root, lib)
		}
		err := nvidia.NewTimeSlices(root).Set(t.Context(), "GPU-a", 1)
		if err == nil || tree[lib] == "" && !strings.Contains(err.Error(), "preloads , and the rest") ||
			!strings.Contains(err.Error(), preloads) {
			t.Fatalf("with the library %q: %v", preloads, err)
		}
		if _, said, _ := strings.Cut(err.Error(), "exit status 3: "); len(said) != 200 {
			t.Errorf("%d bytes of what it said are in the error", len(said))
		}
	}
}

// TestTimeSliceOfAProgramThatIsSlow: the error says that its time was over, and not how it was
// ended.
func TestTimeSliceOfAProgramThatIsSlow(t *testing.T) {
	t.Parallel()
	slices := nvidia.NewTimeSlices(writeTree(t, map[string]string{"usr/bin/nvidia-smi": ""}))
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	if err := slices.Set(ctx, "GPU-a", 1); err == nil || !strings.Contains(err.Error(), "it did not end within 10s") {
		t.Errorf("after its time: %v", err)
	}
	if err := slices.Set(t.Context(), "GPU-a", 1); err == nil || strings.Contains(err.Error(), "it did not end") {
		t.Errorf("a program that cannot be run: %v", err)
	}
}
