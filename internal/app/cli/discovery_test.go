package cli_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
)

// discovered returns the labels of NVIDIA's feature discovery for a node from a file of expected
// sets, without the timestamp.
func discovered(t *testing.T, set string) []string {
	t.Helper()
	text, err := os.ReadFile("../../plan/labels/testdata/sets/" + set + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	theirs, _, _ := strings.Cut(string(text), "# These are not of NVIDIA's")
	return slices.DeleteFunc(strings.Split(strings.TrimSpace(theirs), "\n"), func(line string) bool {
		return strings.HasPrefix(line, "#") || strings.HasPrefix(line, "nvidia.com/gfd.timestamp=")
	})
}

func machineFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "product_name")
	if err := os.WriteFile(file, []byte("DGXH100 (rev. 2)\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestDiscoveryOnce: output and files equal those of NVIDIA's program, for its flags and
// environment.
func TestDiscoveryOnce(t *testing.T) {
	machine := machineFile(t)
	compare := func(what, text, set string) {
		t.Helper()
		if diff := cmp.Diff(discovered(t, set), strings.Split(strings.TrimSpace(text), "\n")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	args := []string{"gpu-feature-discovery", "-oneshot", "-no-timestamp", "--machine-type-file=" + machine}
	text, err := run(t, append(args, "--output-file=", "--simulate=h100-mig-1g", "-mig-strategy=single")...)
	if err != nil {
		t.Fatal(err)
	}
	compare("standard output", text, "h100-mig-1g-single")

	file := filepath.Join(t.TempDir(), "gfd")
	t.Setenv("GFD_MIG_STRATEGY", "mixed")
	t.Setenv("MIG_STRATEGY", "none")
	t.Setenv("GFD_OUTPUT_FILE", file)
	if text, err = run(t, append(args, "--simulate=a100-mig-mixed")...); err != nil || text != "" {
		t.Fatalf("%q: %v", text, err)
	}
	written, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	compare("file", string(written), "a100-mig-mixed-mixed")

	if text, err = run(t, append(args, "--output=", "--driver-root-ctr-path=/nowhere",
		"--fail-on-init-error=false")...); err != nil ||
		text != "nvidia.com/gpu.machine=DGXH100-rev.-2\nnvidia.com/vgpu.present=false" {
		t.Errorf("without a driver: %q, %v", text, err)
	}
	if _, err = run(t, append(args, "--output=", "--driver-root-ctr-path=/nowhere")...); err == nil {
		t.Error("without a driver, it does not fail")
	}
	if _, err = run(t, append(args, "--use-node-feature-api")...); err == nil ||
		!strings.Contains(err.Error(), "run gpu-node-agent instead") {
		t.Errorf("with the API server: %v", err)
	}
}

// TestDiscovery: the file has an expiry, and stays at the end.
func TestDiscovery(t *testing.T) {
	file := filepath.Join(t.TempDir(), "gfd")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- cli.DevicePlugin().Execute(ctx, "gpu-device-plugin", []string{
			"gpu-feature-discovery", "--simulate=t4", "--no-timestamp", "--output=" + file, "--machine-type-file=" +
				machineFile(t),
		}, os.Stdout)
	}()
	for {
		if _, err := os.Stat(file); err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("no file was written")
		}
		time.Sleep(10 * time.Millisecond)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	first, rest, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	if diff := cmp.Diff(discovered(t, "t4-none"), strings.Split(rest, "\n")); diff != "" ||
		!strings.HasPrefix(first, "# +expiry-time=") {
		t.Errorf("first line %q (-want +got):\n%s", first, diff)
	}
}
