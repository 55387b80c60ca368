package kubelet_test

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/hardware"
)

// sharing is a GPU that is shared by MPS, with the programs that have it so.
type sharing struct {
	node    *node
	plugin  *process
	args    []string // of the plugin
	pipe    string   // where clients find the control daemon
	devices int      // offered while none is held
}

// startSharing starts a node, mps-control-daemon and the daemon with a configuration, and waits
// until a resource is offered. Compute modes stay as they are: a library in front of NVML says
// that they are set.
func startSharing(t *testing.T, configuration, resource string) sharing {
	t.Helper()
	if _, err := exec.LookPath("nvidia-cuda-mps-control"); err != nil {
		t.Skip("no nvidia-cuda-mps-control in PATH")
	}
	s := sharing{node: startNode(t)}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("version: v1\n"+configuration+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.args = []string{"--config-file", file, "--mps-root", mpsRoot, "--mps-root-ctr-path", mpsRoot}
	out, err := exec.CommandContext(t.Context(), *daemon, "mps-control-daemon", "mount-shm", "--mps-root-ctr-path",
		mpsRoot).CombinedOutput()
	if err != nil {
		t.Fatalf("mount-shm: %v: %s", err, out)
	}
	if err := unix.Mount(mpsRoot+"/shm", "/dev/shm", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	start(t, "mps-control-daemon", nil, *daemon,
		append([]string{"mps-control-daemon", "--driver-root-ctr-path", withoutModes(t)}, s.args...)...)
	s.plugin = startPlugin(t, resource, 0, s.args...)
	s.devices = healthy(t, resource)
	err = filepath.WalkDir(mpsRoot, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == "pipe" {
			s.pipe = path
		}
		return err
	})
	if err != nil || s.pipe == "" {
		t.Fatalf("no control daemon below %s: %v", mpsRoot, err)
	}
	return s
}

// withoutModes returns a driver root whose NVML keeps compute modes to itself.
func withoutModes(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	folder := filepath.Join(root, "usr/lib64")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(driverroot.Locate("/", "libnvidia-ml.so.1"))
	if err != nil {
		t.Fatal(err)
	}
	// Under a name of its own, for the loader takes two libraries of one name for the same.
	text = []byte(strings.ReplaceAll(string(text), "libnvidia-ml.so.1\x00", "libnvidia-mx.so.1\x00"))
	if err := os.WriteFile(filepath.Join(folder, "libnvidia-mx.so.1"), text, 0o755); err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(t.TempDir(), "computemode.c")
	if err := os.WriteFile(source, []byte(computeMode), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "gcc", "-shared", "-fPIC", "-o",
		filepath.Join(folder, "libnvidia-ml.so.1"),
		"-Wl,-soname,libnvidia-ml.so.1", "-Wl,-rpath,"+folder, "-Wl,--no-as-needed", source, "-L"+
			folder, "-l:libnvidia-mx.so.1",
		"-Wl,--allow-shlib-undefined").CombinedOutput()
	if err != nil {
		t.Fatalf("build the library in front of NVML: %v: %s", err, out)
	}
	return root
}

// said returns what a command of the daemon prints.
func (s sharing) said(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), *daemon, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %v", args, err)
	}
	return string(out)
}

// smi asks nvidia-smi for fields of the GPU.
func (s sharing) smi(t *testing.T, fields string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nvidia-smi", "--query-gpu="+fields,
		"--format=csv,noheader").CombinedOutput()
	if err != nil {
		t.Errorf("nvidia-smi: %v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// healthy returns how many healthy devices of a resource the daemon says that it offers.
func healthy(t *testing.T, resource string) int {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), *daemon, "status", "-o", "json").Output()
	if err != nil {
		return 0 // it does not answer yet
	}
	var status struct {
		Resources []struct {
			Name    string `json:"name"`
			Healthy int    `json:"healthy"`
			Server  string `json:"server"`
		} `json:"resources"`
	}
	if err := json.Unmarshal(out, &status); err != nil {
		t.Fatalf("status: %v: %s", err, out)
	}
	for _, r := range status.Resources {
		if r.Name == resource && r.Server == "serving" {
			return r.Healthy
		}
	}
	return 0
}

// client starts the client on the node; with limits it is a client of MPS that has what a container
// would have.
func (s sharing) client(t *testing.T, limits []string, command ...string) *process {
	t.Helper()
	var environment []string
	if limits != nil {
		environment = append([]string{"CUDA_MPS_PIPE_DIRECTORY=" + s.pipe}, limits...)
	}
	return start(t, "client", environment, *client, command...)
}

// whole returns what a process that is no client of MPS sees of the GPU.
func (s sharing) whole(t *testing.T) hardware.Answer {
	t.Helper()
	whole := s.client(t, nil, "info").last(t)
	if whole.Error != "" || whole.SMs == 0 || whole.Total == 0 {
		t.Fatalf("CUDA on the node: %+v", whole)
	}
	return whole
}

// last returns the last line that a client has printed, when it has ended.
func (p *process) last(t *testing.T) (a hardware.Answer) {
	t.Helper()
	<-p.ended
	lines := strings.Split(strings.TrimSpace(tail(p.log)), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &a); err != nil {
		t.Fatalf("the client prints %q: %v", lines, err)
	}
	return a
}

// first waits for the first line that a client prints.
func (p *process) first(t *testing.T) (a hardware.Answer) {
	t.Helper()
	until(t, "the client prints a line", func() bool {
		line, _, whole := strings.Cut(tail(p.log)+"\n", "\n")
		return whole && json.Unmarshal([]byte(line), &a) == nil
	})
	return a
}

func decimal(n int) string { return strconv.Itoa(n) }

func pinned(units int) string {
	return "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=" + decimal(units*128) + "M"
}
