package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const (
	whole  = "nvidia.com/gpu"
	shared = "nvidia.com/gpu.shared"
	// patience bounds every wait for something that must happen.
	patience = 2 * time.Minute
)

// configuration shares two of eight GPUs.
const configuration = `
sharing:
  mps:
    resources:
    - {name: nvidia.com/gpu, rename: nvidia.com/gpu.shared, devices: [0, 1], replicas: %d}
`

// A machine is a node whose driver has the stand-in for its program of MPS.
type machine struct {
	*node.Node
	t        *testing.T
	programs string
}

// newMachine returns a machine with a daemon that was started under a name.
func newMachine(t *testing.T, program string) *machine {
	t.Helper()
	m := &machine{t: t, programs: t.TempDir()}
	for name, source := range map[string]string{"nvidia-cuda-mps-control": ".",
		"gpu-device-plugin": "../../cmd/gpu-device-plugin"} {
		c := exec.CommandContext(t.Context(), "go", "build", "-race", "-o", filepath.Join(m.programs, name), source)
		if output, err := c.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v: %s", name, err, output)
		}
	}
	for _, name := range []string{"nvidia-device-plugin", "mps-control-daemon"} {
		if err := os.Symlink("gpu-device-plugin", filepath.Join(m.programs, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", m.programs)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // else every program with the race detector ends a second later
	n, err := node.Open(node.Setup{Daemon: filepath.Join(m.programs, program), Profile: "dgx-h100"})
	if err != nil {
		t.Fatal(err)
	}
	m.Node = n
	m.Args = []string{"--config-file", n.Path("config.yaml"), "--mps-root", "/run/nvidia/mps", "--mps-root-ctr-path",
		n.Path("mps")}
	t.Cleanup(func() {
		err := n.StopDaemon() // an error also says that the race detector has found something
		if err != nil || t.Failed() {
			t.Logf("the daemon's log ends with:\n%s", n.Logged())
		}
		if err := errors.Join(err, n.Close()); err != nil {
			t.Errorf("end the node: %v", err)
		}
	})
	if err := os.Mkdir(n.Path("mps"), 0o755); err != nil {
		t.Fatal(err)
	}
	m.share(4)
	if err := m.StartDaemon(); err != nil {
		t.Fatal(err)
	}
	return m
}

// share writes a configuration that shares two GPUs by so many.
func (m *machine) share(replicas int) {
	m.t.Helper()
	// Whole or not at all: both processes may be reading it, and an empty one is valid.
	unfinished := m.Path("config.yaml.new")
	err := os.WriteFile(unfinished, fmt.Appendf(nil, configuration, replicas), 0o600)
	if err = errors.Join(err, os.Rename(unfinished, m.Path("config.yaml"))); err != nil {
		m.t.Fatal(err)
	}
}

// shows waits until kubelet shows so many whole GPUs and replicas, and of these so many that can be
// given out.
func (m *machine) shows(gpus, replicas, allocatable int) {
	m.t.Helper()
	m.has(map[string]standin.Quantity{
		whole: {Capacity: gpus, Allocatable: gpus}, shared: {Capacity: replicas, Allocatable: allocatable},
	})
}

// has waits until kubelet shows resources and no others.
func (m *machine) has(want map[string]standin.Quantity) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	if err := m.WaitFor(ctx, func() bool { return maps.Equal(m.Resources(), want) }); err != nil {
		m.t.Fatalf("kubelet shows %v, want %v: %v", m.Resources(), want, err)
	}
}

// startMPS starts a command as mps-control-daemon, and returns what ends it.
func (m *machine) startMPS(command ...string) (end func()) {
	m.t.Helper()
	log, err := os.OpenFile(m.Path("mps.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		m.t.Fatal(err)
	}
	args := append(append(command, "--simulate", m.Profile), m.Args...)
	c := exec.Command(filepath.Join(m.programs, args[0]), args[1:]...)
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		m.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	over := false
	end = func() {
		m.t.Helper()
		if over {
			return
		}
		over = true
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			m.t.Error(err)
		}
		select {
		case err = <-ended:
		case <-time.After(patience):
			err = errors.Join(errors.New("it did not end"), c.Process.Kill())
		}
		if err != nil {
			text, _ := os.ReadFile(log.Name())
			m.t.Errorf("mps-control-daemon: %v; its log:\n%s", err, text)
		}
	}
	m.t.Cleanup(end)
	return end
}

// told waits until the control daemon of a resource was told something.
func (m *machine) told(resource, command string) {
	m.t.Helper()
	m.until("Cmd:"+command+"\n", func() ([]byte, error) {
		return os.ReadFile(m.Path("mps/" + resource + "/log/control.log"))
	})
}

// says waits until the daemon's status says something.
func (m *machine) says(sentence string) {
	m.t.Helper()
	m.until(sentence, func() ([]byte, error) {
		return exec.CommandContext(m.t.Context(), m.Setup.Daemon, "status", "-o", "wide", "--control-socket",
			m.ControlSocket()).CombinedOutput()
	})
}

// until reads until something is there to be read.
func (m *machine) until(what string, read func() ([]byte, error)) {
	m.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(patience); ; {
		text, err := read()
		if err == nil && strings.Contains(string(text), what) {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			m.t.Fatalf("nowhere is %q, but: %s (%v)", what, text, err)
		}
	}
}

// TestDevicePluginAndControlDaemon runs both processes on a node: the plugin waits for MPS, for
// what is shared alone.
func TestDevicePluginAndControlDaemon(t *testing.T) {
	m := newMachine(t, "gpu-device-plugin")
	m.shows(6, 8, 0)
	m.says("MPS: the MPS control daemon of nvidia.com/gpu.shared does not answer: ")

	end := m.startMPS("gpu-device-plugin", "mps-control-daemon")
	m.shows(6, 8, 8)
	m.told(shared, "set_default_active_thread_percentage 25")
	m.told(shared, "set_default_device_pinned_mem_limit 1 20389M")
	given, err := m.Admit(t.Context(), standin.Container{Pod: "a", Name: "c", Resource: shared, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	if pipe := given.Response.Envs["CUDA_MPS_PIPE_DIRECTORY"]; pipe != "/mps/nvidia.com/gpu.shared/pipe" {
		t.Errorf("a container finds MPS at %q", pipe)
	}
	mounts := map[string]string{}
	for _, mount := range given.Response.Mounts {
		mounts[mount.ContainerPath] = mount.HostPath
	}
	want := map[string]string{
		"/mps/nvidia.com/gpu.shared/pipe": "/run/nvidia/mps/nvidia.com/gpu.shared/pipe", "/dev/shm": "/run/nvidia/mps/shm",
	}
	if diff := cmp.Diff(want, mounts); diff != "" {
		t.Errorf("mounts of a container (-want +got):\n%s", diff)
	}

	mark := m.Mark()
	end()
	m.shows(6, 8, 0)
	if _, err := m.Admit(t.Context(), standin.Container{Pod: "b", Name: "c", Resource: shared, Count: 1}); err == nil {
		t.Error("a container is admitted without MPS")
	}
	m.startMPS("gpu-device-plugin", "mps-control-daemon")
	m.shows(6, 8, 8)
	for _, e := range m.Events(mark) {
		if e.Kind == standin.Listed && e.Resource == whole {
			t.Errorf("kubelet heard of the other GPUs, too: %+v", e)
		}
	}

	// A list in which they are all Unhealthy would be in the status of the pods that hold them.
	if err := m.StopDaemon(); err != nil {
		t.Fatal(err)
	}
	mark = m.Mark()
	if err := m.StartDaemon(); err != nil {
		t.Fatal(err)
	}
	m.shows(6, 8, 8)
	for _, e := range m.Events(mark) {
		unhealthy := slices.ContainsFunc(e.Devices, func(d *v1beta1.Device) bool { return d.GetHealth() != v1beta1.Healthy })
		if e.Kind == standin.Listed && e.Resource == shared && unhealthy {
			t.Errorf("the list of a daemon that has just started: %+v", e)
		}
	}

	m.share(2) // both processes follow the file
	m.told(shared, "set_default_active_thread_percentage 50")
	m.shows(6, 4, 4)
}

// TestUnderNVIDIAsNames: both processes ignore the name and the devices of the file, and so mean
// the same resource.
func TestUnderNVIDIAsNames(t *testing.T) {
	m := newMachine(t, "nvidia-device-plugin")
	m.has(map[string]standin.Quantity{whole: {Capacity: 32}})
	m.startMPS("mps-control-daemon")
	m.has(map[string]standin.Quantity{whole: {Capacity: 32, Allocatable: 32}})
	m.told(whole, "set_default_active_thread_percentage 25")
	m.told(whole, "set_default_device_pinned_mem_limit 7 20389M")
}
