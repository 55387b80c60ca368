package real_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// sharedByMPS shares two of the simulated GPUs by four clients each.
const sharedByMPS = `
sharing:
  mps:
    resources:
    - {name: nvidia.com/gpu, rename: nvidia.com/gpu.shared, devices: [0, 1], replicas: 4}
`

// A supervised is a folder in which mps-control-daemon runs a control daemon of NVIDIA's, for
// simulated GPUs.
type supervised struct {
	mps             // its control daemon
	dir, bin string // of all MPS state and the log; of the programs
}

// supervise makes such a folder for a control daemon.
func supervise(t *testing.T, ours, control string) supervised {
	t.Helper()
	dir := loopback.Folder(t)
	s := supervised{mps{program: control, dir: filepath.Join(dir, "mps/nvidia.com/gpu.shared")}, dir,
		filepath.Join(dir, "bin")}
	for _, folder := range []string{s.bin, filepath.Join(dir, "mps")} {
		if err := os.Mkdir(folder, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	server := filepath.Join(filepath.Dir(control), "../sbin/nvidia-cuda-mps-server") // the stand-in has none
	for from, to := range map[string]string{control: "nvidia-cuda-mps-control", server: "nvidia-cuda-mps-server",
		ours: "gpu-device-plugin"} {
		if err := os.Symlink(from, filepath.Join(s.bin, to)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(sharedByMPS), 0o600); err != nil {
		t.Fatal(err)
	}
	return s
}

// begin starts mps-control-daemon. It is killed at the end of the test, and with it what it left.
func (s supervised) begin(t *testing.T) *exec.Cmd {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(filepath.Join(s.bin, "gpu-device-plugin"), "mps-control-daemon", "--simulate", "dgx-h100",
		"--config-file", filepath.Join(s.dir, "config.yaml"), "--mps-root", "/run/nvidia/mps", "--mps-root-ctr-path", filepath.Join(s.dir, "mps"))
	c.Env, c.Stdout, c.Stderr = []string{"PATH=" + s.bin}, log, log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
		for _, pid := range s.daemons() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if text, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("the log of mps-control-daemon:\n%s", text)
		}
	})
	return c
}

// daemons returns the control daemons of the folder that run.
func (s supervised) daemons() []int {
	var found []int
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, process := range all {
		arguments, _ := os.ReadFile(filepath.Join(process, "cmdline"))
		environment, _ := os.ReadFile(filepath.Join(process, "environ"))
		pid, err := strconv.Atoi(filepath.Base(process))
		if err == nil && bytes.Contains(arguments, []byte("nvidia-cuda-mps-control\x00-f")) &&
			slices.Contains(strings.Split(string(environment), "\x00"),
				"CUDA_MPS_PIPE_DIRECTORY="+filepath.Join(s.mps.dir, "pipe")) {
			found = append(found, pid)
		}
	}
	return found
}

// serves waits until a control daemon other than those of before has the limits, and alone; it
// returns its process ID.
func (s supervised) serves(t *testing.T, before ...int) (pid int) {
	t.Helper()
	poll.Until(t, "clients are served", func() bool {
		_, err := os.Stat(filepath.Join(s.mps.dir, ".started"))
		now := s.daemons()
		if err != nil || len(now) != 1 || slices.Contains(before, now[0]) {
			return false
		}
		pid = now[0]
		return true
	})
	for command, want := range map[string]string{
		"get_default_active_thread_percentage": "25.0", "get_default_device_pinned_mem_limit 0": "19G", "get_default_device_pinned_mem_limit 1": "19G",
	} {
		if got, err := s.ask(t, command); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", command, got, err, want)
		}
	}
	return pid
}

// TestSupervisor: mps-control-daemon runs NVIDIA's control daemon of each branch, and the stand-in.
// It has the limits; one that is killed is replaced; what a killed mps-control-daemon leaves is
// ended by the next one; at the end nothing is left.
func TestSupervisor(t *testing.T) {
	t.Parallel()
	programs := controlDaemons(t)
	ours := filepath.Join(t.TempDir(), "gpu-device-plugin")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", ours,
		"../../cmd/gpu-device-plugin").CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	for name, control := range programs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := supervise(t, ours, control)
			first := s.begin(t)
			pid := s.serves(t)
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			next := s.serves(t, pid)
			if err := first.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = first.Wait()
			// Once in 16 runs /proc did not have the process at the first look.
			poll.Until(t, "a killed mps-control-daemon leaves its control daemon",
				func() bool { return slices.Equal(s.daemons(), []int{next}) })
			last := s.begin(t)
			s.serves(t, next)
			if err := last.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := last.Wait(); err != nil {
				t.Errorf("mps-control-daemon: %v", err)
			}
			left := s.daemons()
			if len(left) > 0 {
				t.Errorf("processes %v are left", left)
			}
			found("MPS", name, "mps-control-daemon replaces a killed control daemon, and ends what a killed one of its own left; %d processes are left at the end",
				len(left))
			for _, name := range []string{".started", "../../.ready"} {
				if _, err := os.Stat(filepath.Join(s.mps.dir, name)); err == nil {
					t.Errorf("%s is left: clients would be let in", name)
				}
			}
			if out, err := s.ask(t, "get_server_list"); err == nil {
				t.Errorf("after the end something answers: %q", out)
			}
		})
	}
}
