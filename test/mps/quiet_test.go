package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

const (
	// startLines is how many lines a process may log at its start, on a node with eight GPUs on which
	// nothing is wrong.
	startLines = 12
	// quietProbes is for how many probe intervals nothing may be logged after that. The control daemon
	// is asked as often by a program of this test, without the 10 s between two probes.
	quietProbes = 360
	probe       = "get_default_active_thread_percentage"
)

// TestQuietLogs: with CDI and MPS configured, and at the default verbosity, both processes log few
// lines at their start, and none in the hour after that while nothing happens.
func TestQuietLogs(t *testing.T) {
	m := newMachine(t, "gpu-device-plugin")
	m.shows(6, 8, 0)
	if err := m.StopDaemon(); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(m.LogPath(), 0); err != nil {
		t.Fatal(err)
	}
	m.Args = append(m.Args, "--v=0", "--device-list-strategy=envvar,cdi-annotations")
	m.startMPS("gpu-device-plugin", "mps-control-daemon")
	m.told(shared, "get_default_device_pinned_mem_limit 1") // the last limit
	if err := m.StartDaemon(); err != nil {
		t.Fatal(err)
	}
	m.has(map[string]standin.Quantity{whole: {Capacity: 6, Allocatable: 6}, shared: {Capacity: 8, Allocatable: 8}})
	m.until(`"Ready"`, func() ([]byte, error) { return os.ReadFile(m.LogPath()) })

	logs := map[string]string{"the device plugin": m.LogPath(), "the MPS control daemon": m.Path("mps.log")}
	started := map[string]string{}
	for name, path := range logs {
		started[name] = m.lines(path)
		if n := strings.Count(started[name], "\n"); n > startLines || n < 3 {
			t.Errorf("%s logs %d lines at its start, want at most %d:\n%s", name, n, startLines, started[name])
		}
	}

	for range quietProbes {
		c := exec.CommandContext(t.Context(), "nvidia-cuda-mps-control")
		c.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+m.Path("mps/"+shared+"/pipe"))
		c.Stdin = strings.NewReader(probe + "\n")
		if answer, err := c.CombinedOutput(); err != nil || string(answer) != "25.0\n" {
			t.Fatalf("a probe: %q, %v", answer, err)
		}
	}
	// And each process probes once more by itself.
	control := m.Path("mps/" + shared + "/log/control.log")
	asked := func() int { return strings.Count(m.lines(control), "Cmd:"+probe) }
	before := asked()
	m.until("asked", func() ([]byte, error) {
		if asked() < before+2 {
			return nil, nil
		}
		return []byte("asked"), nil
	})
	for name, path := range logs {
		if now := m.lines(path); now != started[name] {
			t.Errorf("%s also logs, while nothing happens:\n%s", name, strings.TrimPrefix(now, started[name]))
		}
	}
}

// lines returns what a file has.
func (m *machine) lines(path string) string {
	m.t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		m.t.Fatal(err)
	}
	return strings.TrimLeft(string(text), "\x00") // where it was cut off while it was written
}
