package nvidia_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/nvidia"
)

// TestTimeSlices runs the driver's own program, also behind a link, and says what it said when it failed.
func TestTimeSlices(t *testing.T) { // not parallel: a process that is forked meanwhile would keep the program open for writing
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o700); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\necho \"$*\" >> " + root + "/calls\n[ \"$3\" != GPU-bad ] || { echo 'Not   supported'; exit 3; }\n"
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
	if want := "set the time slice of GPU-bad by nvidia-smi: exit status 3: Not supported"; err == nil || err.Error() != want {
		t.Errorf("an error: %v, want %s", err, want)
	}
	text, err := os.ReadFile(filepath.Join(root, "calls"))
	if want := "compute-policy -i GPU-a --set-timeslice 2\ncompute-policy -i GPU-bad --set-timeslice 0\n"; err != nil || string(text) != want {
		t.Errorf("calls %q, %v", text, err)
	}
	if err := os.Remove(filepath.Join(root, "usr/bin/smi")); err != nil {
		t.Fatal(err)
	}
	if err := slices.Set(t.Context(), "GPU-a", 2); err == nil || !strings.Contains(err.Error(), "nvidia-smi") {
		t.Errorf("without the program: %v", err)
	}
}
