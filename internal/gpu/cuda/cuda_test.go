package cuda_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestMain is also the process that proves: the test binary is the program that is started again.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 4 && os.Args[1] == cuda.Command:
		if err := cuda.Prove(os.Args[2], os.Args[3]); err != nil {
			panic(err)
		}
	case len(os.Args) == 4 && os.Args[1] == "parent":
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test says so
		if p := cuda.Run(context.Background(), os.Args[2], os.Args[3]); p.Failure != nil {
			panic(p.Failure)
		}
	default:
		os.Exit(m.Run())
	}
}

const (
	gpu    = "GPU-01234567-89ab-cdef-0123-456789abcdef"
	mig    = "MIG-fedcba98-7654-3210-fedc-ba9876543210"
	oldMIG = "MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/1/0"
)

func TestDevicesThatWork(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{"new": nil, "old": {"-DOLD"}} {
		root := t.TempDir()
		library := standin.Install(t, root, flags...)
		for _, uuid := range []string{gpu, mig, oldMIG} {
			p := cuda.Run(t.Context(), root, uuid)
			if p.Failure != nil || p.Took <= 0 {
				t.Errorf("%s driver, %s: %+v, %v", name, uuid, p, p.Failure)
			}
			<-p.Ended
			if n := library.Count(t, uuid, "cuCtxSynchronize"); n != 1 {
				t.Errorf("%s driver, %s: it computed %d times", name, uuid, n)
			}
		}
	}
}

// TestErrors: each error is told by CUDA's name, with the function, and those that may pass are
// known.
func TestErrors(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	library := standin.Install(t, root)
	for _, test := range []struct {
		function, action string
		kind             cuda.FailureKind
		passing          bool
		want             []string
	}{
		{"cuInit", "100", cuda.Refused, true, []string{"cuInit: CUDA_ERROR_NO_DEVICE (100)", "/dev/nvidia-uvm"}},
		{"cuInit", "802", cuda.Refused, true, []string{"CUDA_ERROR_SYSTEM_NOT_READY (802)", "start Fabric Manager"}},
		{"cuInit", "803", cuda.Refused, false, []string{"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)",
			"finish the driver's upgrade"}},
		{"cuInit", "999", cuda.Refused, true, []string{"CUDA_ERROR_UNKNOWN (999)", "nvidia_uvm"}},
		{"cuDeviceGetCount", "304", cuda.Refused, true, []string{"CUDA_ERROR_OPERATING_SYSTEM (304)"}},
		{"cuDeviceGet", "101", cuda.Refused, true, []string{"CUDA_ERROR_INVALID_DEVICE (101)"}},
		{"cuDeviceGetUuid", "wrong", cuda.Refused, false, []string{"cuDeviceGetUuid: CUDA shows another device"}},
		{"cuDevicePrimaryCtxRetain", "46", cuda.Refused, true,
			[]string{"CUDA_ERROR_DEVICE_UNAVAILABLE (46)", "another process has the GPU"}},
		{"cuCtxSetCurrent", "2", cuda.Refused, true, []string{"CUDA_ERROR_OUT_OF_MEMORY (2)"}},
		{"cuModuleLoadDataEx", "218", cuda.Refused, false,
			[]string{"CUDA_ERROR_INVALID_PTX (218), ptxas: a line of the compiler"}},
		{"cuModuleGetFunction", "12345", cuda.Refused, false, []string{"cuModuleGetFunction: CUDA error 12345"}},
		{"cuMemAlloc", "214", cuda.Refused, false, []string{"cuMemAlloc: CUDA_ERROR_ECC_UNCORRECTABLE (214)"}},
		{"cuMemcpyHtoD", "700", cuda.Refused, false, []string{"CUDA_ERROR_ILLEGAL_ADDRESS (700)"}},
		{"cuLaunchKernel", "719", cuda.Refused, false, []string{"cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED (719)"}},
		{"cuCtxSynchronize", "214", cuda.Refused, false,
			[]string{"cuCtxSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE (214), uncorrectable ECC error encountered"}},
		{"cuMemcpyDtoH", "719", cuda.Refused, false, []string{"cuMemcpyDtoH: CUDA_ERROR_LAUNCH_FAILED (719)"}},
		{"cuMemFree", "719", cuda.Refused, false, []string{"cuMemFree: CUDA_ERROR_LAUNCH_FAILED (719)"}},
		{"cuMemcpyHtoD", "wrong", cuda.Wrong, false, []string{"the GPU computes wrongly: number 262143 of 262144"}},
		{"cuMemcpyHtoD", "crash", cuda.Crashed, false, []string{"CUDA crashes in cuMemcpyHtoD", "SIGSEGV"}},
		{"cuInit", "leak", cuda.TooLarge, false, []string{"more than 300 MB of memory in cuInit"}},
	} {
		library.Repair(t)
		library.Fail(t, gpu, test.function, test.action)
		p := cuda.Run(t.Context(), root, gpu)
		if p.Failure == nil || p.Failure.Kind != test.kind || p.Failure.IsTransient() != test.passing ||
			!p.Failure.WasTried() {
			t.Errorf("%s %s: %+v", test.function, test.action, p.Failure)
			continue
		}
		for _, want := range test.want {
			if !strings.Contains(p.Failure.Error(), want) {
				t.Errorf("%s %s: %v, want %q", test.function, test.action, p.Failure, want)
			}
		}
		if p := cuda.Run(t.Context(), root, mig); p.Failure != nil {
			t.Errorf("another device while %s is %s: %v", test.function, test.action, p.Failure)
		}
	}
}

// TestHang: a process that hangs is ended, and another device is proven meanwhile.
func TestHang(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	library := standin.Install(t, root)
	library.Fail(t, gpu, "cuDevicePrimaryCtxRetain", "hang")
	hangs := make(chan cuda.Proof, 1)
	go func() { hangs <- cuda.Run(t.Context(), root, gpu) }()
	poll.Until(t, "the process hangs", func() bool { return library.Count(t, gpu, "cuDevicePrimaryCtxRetain") == 1 })
	if p := cuda.Run(t.Context(), root, mig); p.Failure != nil {
		t.Errorf("another device: %v", p.Failure)
	}
	p := <-hangs
	if p.Failure == nil || p.Failure.Kind != cuda.Hangs || !p.Failure.IsTransient() ||
		!strings.Contains(p.Failure.Error(), "cuDevicePrimaryCtxRetain does not return within 10s") {
		t.Errorf("the device that hangs: %+v, %v", p, p.Failure)
	}
	<-p.Ended
}

// TestGivenUp: what is given up is no fault of the device.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	library := standin.Install(t, root)
	library.Fail(t, gpu, "cuInit", "hang")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hangs := make(chan cuda.Proof, 1)
	go func() { hangs <- cuda.Run(ctx, root, gpu) }()
	poll.Until(t, "the process hangs", func() bool { return library.Count(t, gpu, "cuInit") == 1 })
	cancel()
	if p := <-hangs; p.Failure == nil || p.Failure.WasTried() || !p.Failure.IsTransient() {
		t.Errorf("given up: %+v", p.Failure)
	}
}

// TestTheProcessEndsWithItsParent, which is killed.
func TestTheProcessEndsWithItsParent(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	library := standin.Install(t, root)
	library.Fail(t, gpu, "cuInit", "hang")
	parent, err := os.StartProcess(os.Args[0], []string{os.Args[0], "parent", root, gpu},
		&os.ProcAttr{Env: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "the process hangs", func() bool { return library.Count(t, gpu, "cuInit") == 1 })
	if err := parent.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = parent.Wait()
	pid := library.Calls(t)[0].PID
	poll.Until(t, "it has ended", func() bool { return ended(pid) })
}

// ended reports whether a process has ended; what nobody waited for is a zombie.
func ended(pid int) bool {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil && syscall.Kill(pid, 0) != nil || strings.Contains(string(text), ") Z ")
}

// TestDiskOfTheProgramThatHangs: the folder of this program does not answer any more. Go has all of
// a process wait, with the next garbage collection, for the start of another one, so that the
// daemon would hang.
func TestDiskOfTheProgramThatHangs(t *testing.T) {
	t.Parallel()
	root, folder := t.TempDir(), t.TempDir()
	standin.Install(t, root)
	text, err := os.ReadFile("/proc/self/exe")
	program := filepath.Join(folder, "program")
	if err == nil {
		err = os.WriteFile(program, text, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("without /dev/fuse this test cannot have a disk hang: %v", err)
	}
	t.Cleanup(func() { _ = fuse.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	parent := exec.CommandContext(ctx, program, "parent", root, gpu)
	parent.Stderr = t.Output()
	begin, err := parent.StdinPipe()
	if err == nil {
		err = parent.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = begin.Close() })
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())
	if err := unix.Mount("none", folder, "fuse", 0, options); err != nil {
		t.Skipf("only root may mount a file system, which this test needs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
	_ = begin.Close()
	if err := parent.Wait(); err != nil {
		t.Errorf("the process that has CUDA proven: %v", err)
	}
}

// TestLibraries that cannot be used are no fault of the device.
func TestLibraries(t *testing.T) {
	t.Parallel()
	lacking := t.TempDir()
	standin.Install(t, lacking, "-DLACKS")
	for name, test := range map[string]struct{ root, want string }{
		"none":                 {t.TempDir(), "mount the driver's libraries"},
		"one without function": {lacking, "libcuda.so.1 lacks cuCtxSynchronize"},
	} {
		p := cuda.Run(t.Context(), test.root, gpu)
		if p.Failure == nil || p.Failure.WasTried() || !p.Failure.IsTransient() ||
			!strings.Contains(p.Failure.Error(), test.want) {
			t.Errorf("%s: %v", name, p.Failure)
		}
	}
}

// TestBounds: without a driver a proof takes far less memory than it may.
func TestBounds(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	standin.Install(t, root)
	p := cuda.Run(t.Context(), root, gpu)
	if p.Failure != nil || p.Memory > 60_000_000 {
		t.Errorf("%+v", p)
	}
}
