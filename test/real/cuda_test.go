package real_test

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
)

// ptxasFlag names the folder that the script ptxas has filled.
var ptxasFlag = flag.String("ptxas", "", "the folder with PTX assemblers, as test/real/ptxas prints it")

// TestMain is also the process in which libcuda is tried. It prints the findings after the tests.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == cuda.Command {
		if err := cuda.Prove(os.Args[2], os.Args[3]); err != nil {
			panic(err)
		}
		return
	}
	code := m.Run()
	printFindings()
	os.Exit(code)
}

// TestCUDAWithoutDevice: libcuda of each branch is loaded from a driver root, and says that there
// is no device.
func TestCUDAWithoutDevice(t *testing.T) {
	t.Parallel()
	roots, err := filepath.Glob(filepath.Join(part(t, "cuda"), "*"))
	if err != nil || len(roots) != 3 {
		t.Fatalf("driver roots %v, %v", roots, err)
	}
	for _, root := range append(roots, part(t, "run")) {
		p := cuda.Run(t.Context(), root, "GPU-01234567-89ab-cdef-0123-456789abcdef")
		if p.Failure == nil || p.Failure.Function != "cuInit" || p.Failure.Code != 100 ||
			p.Failure.Name != "CUDA_ERROR_NO_DEVICE" {
			t.Errorf("%s: %+v, want CUDA_ERROR_NO_DEVICE of cuInit", filepath.Base(root), p.Failure)
		}
		found("CUDA", filepath.Base(root), "%v in %v with %d MB", p.Failure, p.Took.Round(time.Millisecond),
			p.Memory/1_000_000)
	}
}

// TestKernelOnEveryArchitecture: each PTX assembler compiles the kernel for each architecture that
// it knows, and refuses a broken one.
func TestKernelOnEveryArchitecture(t *testing.T) {
	t.Parallel()
	if *ptxasFlag == "" {
		t.Skip("no PTX assemblers are here: make ptx fetches them")
	}
	assemblers, err := filepath.Glob(filepath.Join(*ptxasFlag, "*", "ptxas"))
	if err != nil || len(assemblers) == 0 {
		t.Fatalf("no PTX assemblers: %v", err)
	}
	folder := t.TempDir()
	kernel, broken := filepath.Join(folder, "kernel.ptx"), filepath.Join(folder, "broken.ptx")
	for path, text := range map[string]string{kernel: cuda.Kernel(),
		broken: strings.Replace(cuda.Kernel(), "fma.rn", "fma.xx", 1)} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, ptxas := range assemblers {
		help, err := exec.CommandContext(t.Context(), ptxas, "--help").Output()
		if err != nil {
			t.Fatal(err)
		}
		known := regexp.MustCompile(`sm_\d+a?`).FindAllString(string(help), -1)
		slices.Sort(known)
		known = slices.Compact(known)
		if len(known) < 10 {
			t.Errorf("%s knows %v", ptxas, known)
		}
		compile := func(arch, path string) (string, error) {
			out, err := exec.CommandContext(t.Context(), ptxas, "-arch", arch, "-o", os.DevNull, path).CombinedOutput()
			return string(out), err
		}
		for _, arch := range known {
			if out, err := compile(arch, kernel); err != nil {
				t.Errorf("%s for %s: %v: %s", ptxas, arch, err, out)
			}
		}
		if _, err := compile(known[0], broken); err == nil {
			t.Errorf("%s takes a kernel that is none", ptxas)
		}
		t.Logf("%s: %s", filepath.Base(filepath.Dir(ptxas)), strings.Join(known, " "))
	}
}
