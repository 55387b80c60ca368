package mps_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

func TestWhatAKilledProcessLeavesBehind(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, dir := range []string{"/pipe", "/log"} {
		if err := os.MkdirAll(n.path(one+dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	left := exec.CommandContext(t.Context(), control, "-f")
	left.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+n.path(one+"/pipe"),
		"CUDA_MPS_LOG_DIRECTORY="+n.path(one+"/log"))
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	n.until("a daemon that is left", func() bool { return n.has(one + "/pipe/nvidia-cuda-mps-control.pid") })
	for _, mark := range []string{".exclusive", one + "/.started"} {
		if err := os.WriteFile(n.path(mark), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.modes["GPU-a"] = inventory.ComputeExclusiveProcess
	end := n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	if err := left.Wait(); err != nil {
		t.Errorf("the daemon that was left ended with %v", err)
	}
	if n.pid(one) == left.Process.Pid {
		t.Error("the daemon that was left is used")
	}
	end()
	n.checkModes("afterwards", map[string]inventory.ComputeMode{})
}

// TestGPUOfKilledProcess: the next process restores the mode, even if that process stops
// before it could start the daemon.
func TestGPUOfKilledProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if err := os.MkdirAll(filepath.Dir(n.path(one)), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{one: "no folder", ".exclusive": "GPU-a\nGPU-b\n"} {
		if err := os.WriteFile(n.path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.modes["GPU-a"], n.modes["GPU-b"] = inventory.ComputeExclusiveProcess, inventory.ComputeExclusiveProcess
	end := n.supervise(group(one, gpu("a", 80, 2)), group(two, gpu("b", 80, 2)))
	n.until("the other daemon", func() bool { return n.has(two + "/.started") })
	end()
	n.checkModes("afterwards", map[string]inventory.ComputeMode{})
	if n.has(".exclusive") {
		t.Error("the mark is there after the end")
	}
}

// TestUnwantedGPUsOfKilledProcess: the modes are restored as soon as the wanted groups
// are known. A lost GPU does not delay the other GPUs, and stays in the mark.
func TestUnwantedGPUsOfKilledProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if err := os.MkdirAll(n.path("claims/uid-3-0"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		".exclusive":                   "GPU-a\nGPU-b\nGPU-c\nGPU-d\nGPU-lost\n",
		"claims/" + oneClaim + ".json": `{"devices":[{"uuid":"GPU-b"}],"exclusive":true}`,
		"claims/uid-3-0.ending":        `{"devices":[{"uuid":"GPU-d"}],"exclusive":true}`,
	} {
		if err := os.WriteFile(n.path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, uuid := range []string{"GPU-a", "GPU-b", "GPU-c", "GPU-d"} {
		n.modes[uuid] = inventory.ComputeExclusiveProcess
	}
	n.fail = map[string]error{"GPU-lost": errors.New("GPU is lost")}
	end := n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	n.until("the daemon of the claim", func() bool {
		return mps.NewClaimDaemons(n.root).Problems(oneClaim)[oneClaim] == ""
	})
	n.until("what is left of the other claim is removed", func() bool { return !n.has("claims/uid-3-0.ending") })
	n.checkModes("while daemons run", map[string]inventory.ComputeMode{
		"GPU-a": inventory.ComputeExclusiveProcess, "GPU-b": inventory.ComputeExclusiveProcess,
	})
	if diff := cmp.Diff([]string{"GPU-a", "GPU-b", "GPU-lost"}, n.marked()); diff != "" {
		t.Errorf("the mark while daemons run (-want +got):\n%s", diff)
	}
	end()
	if diff := cmp.Diff([]string{"GPU-lost"}, n.marked()); diff != "" {
		t.Errorf("the mark after the end (-want +got):\n%s", diff)
	}
	n.fail = nil
	n.supervise()
	n.until("the GPU that was lost is set back", func() bool { return len(n.marked()) == 0 })
}

// TestAServerThatIsLeftWithoutItsDaemon is killed before the next daemon starts.
func TestAServerThatIsLeftWithoutItsDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if err := os.MkdirAll(n.path(one+"/pipe"), 0o755); err != nil {
		t.Fatal(err)
	}
	path, err := exec.LookPath(control)
	if err != nil {
		t.Fatal(err)
	}
	server := n.path("nvidia-cuda-mps-server")
	if err := os.Link(path, server); err != nil {
		t.Fatal(err)
	}
	left := exec.CommandContext(t.Context(), server)
	left.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+n.path(one+"/pipe"))
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	n.until("the environment of the server, which comes a little after its start", func() bool {
		environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", left.Process.Pid))
		return err == nil && strings.Contains(string(environment), n.path(one+"/pipe"))
	})
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	if alive(left.Process.Pid) {
		t.Error("the server that was left is there still")
	}
	_ = left.Process.Kill()
	_ = left.Wait() // killed
}
