package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

const (
	mem   = "volcano.sh/gpu-mem.1Gi"
	cores = "volcano.sh/gpu-core.percentage"
	// unitConfiguration offers two of eight GPUs, of 79 GiB each, in units.
	unitConfiguration = `
selectors: [{indices: [0, 1], units: true}]
units: {size: 1Gi, reserveMiB: 1647}
`
)

// configure replaces the configuration file.
func (m *machine) configure(text string) {
	m.t.Helper()
	unfinished := m.Path("config.yaml.new")
	if err := os.WriteFile(unfinished, []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Rename(unfinished, m.Path("config.yaml")); err != nil {
		m.t.Fatal(err)
	}
}

// controlDaemon returns the process of the control daemon of a GPU in units; 0 if there is none.
func (m *machine) controlDaemon(gpu string) int {
	m.t.Helper()
	environs, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		m.t.Fatal(err)
	}
	for _, path := range environs {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		environ, _ := os.ReadFile(path)
		if strings.HasPrefix(string(name), "nvidia-cuda-mps") &&
			strings.Contains(string(environ), m.Path("mps/gpu."+gpu)+"/pipe") {
			return pid
		}
	}
	return 0
}

// receipt waits until the daemon has such a receipt.
func (m *machine) receipt(sentence string) {
	m.t.Helper()
	m.until(sentence, func() ([]byte, error) {
		return exec.CommandContext(m.t.Context(), m.Setup.Daemon, "status", "--holders", "-o", "wide", "--control-socket",
			m.ControlSocket()).CombinedOutput()
	})
}

// TestUnitsWithControlDaemons: each GPU in units has a control daemon. While that is away, its
// units are not offered.
func TestUnitsWithControlDaemons(t *testing.T) {
	m := newMachine(t, "gpu-device-plugin")
	m.configure(unitConfiguration)
	quantity := func(units int) map[string]standin.Quantity {
		return map[string]standin.Quantity{
			whole: {Capacity: 6, Allocatable: 6}, mem: {Capacity: 2 * 78, Allocatable: units}, cores: {Capacity: 200,
				Allocatable: 200},
		}
	}
	m.has(quantity(0))
	m.says("the MPS control daemon of gpu.GPU-")
	end := m.startMPS("gpu-device-plugin", "mps-control-daemon")
	m.has(quantity(78)) // those of one GPU

	given, err := m.Admit(t.Context(), standin.Container{Pod: "a", Name: "c", Resource: mem, Count: 10})
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(given.IDs[0], "::")
	env := given.Response.Envs
	if env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] != "0=10240M" || env["CUDA_MPS_PIPE_DIRECTORY"] != "/mps/pipe" ||
		env["NVIDIA_VISIBLE_DEVICES"] != first {
		t.Errorf("a container with 10 units of %s gets %v", first, env)
	}
	given, err = m.Admit(t.Context(), standin.Container{Pod: "a", Name: "c", Resource: cores, Count: 25})
	if err != nil || given.Response.Envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] != "25" || len(given.Response.Envs) != 1 {
		t.Errorf("a container with 25 percent gets %v, %v", given.Response, err)
	}
	if _, err = m.Admit(t.Context(), standin.Container{Pod: "b", Name: "c", Resource: cores, Count: 7}); err == nil {
		t.Error("7 percent are given")
	}
	m.has(quantity(10 + 78)) // what the container has, and the other GPU
	m.receipt("/a, container c: 10240 MiB, 25 percent, by mps, since 20")
	log, err := os.ReadFile(m.Path("mps/gpu." + first + "/log/control.log"))
	if err != nil || strings.Contains(string(log), "set_default") {
		t.Errorf("the control daemon of a GPU in units sets limits for all: %s, %v", log, err)
	}

	// A control daemon that is killed is started again, and the container stays in the account.
	killed := m.controlDaemon(first)
	if err := syscall.Kill(killed, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	m.until("another one", func() ([]byte, error) {
		if pid := m.controlDaemon(first); pid != 0 && pid != killed {
			return []byte("another one"), nil
		}
		return nil, nil
	})
	// A daemon that starts again finds what the container has.
	if err := m.StopDaemon(); err != nil {
		t.Fatal(err)
	}
	if err := m.StartDaemon(); err != nil {
		t.Fatal(err)
	}
	m.has(quantity(10 + 78))
	m.receipt("/a, container c: 10240 MiB, 25 percent, by mps, since 20") // also by a process that did not give it
	end()
	m.has(quantity(0))
	m.receipt("/a, container c: 10240 MiB, 25 percent, by mps, not as requested, since 20")
	if _, err := m.Admit(t.Context(), standin.Container{Pod: "c", Name: "c", Resource: mem, Count: 1}); err == nil {
		t.Error("a unit is given without MPS")
	}
}
