package devicemanager

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const (
	unitMemory  = "volcano.sh/gpu-mem.1Gi"
	unitPercent = "volcano.sh/gpu-core.percentage"
	replicas    = resource.WholeGPU + ".shared"
	unitGPUs    = 2
)

// A unitNode is a node of four simulated GPUs, two of which are in units, one is shared and one is
// whole, with the processes of the program and the stand-in for NVIDIA's control daemon of MPS.
type unitNode struct {
	*node
	programs, folder string
	daemon, mps      *process
	started          int
	reserveMiB       int
}

// A process is one of the program's.
type process struct {
	*exec.Cmd
	socket string
	ended  chan struct{}
}

func newUnitNode(t *testing.T) *unitNode {
	t.Helper()
	n := &unitNode{node: newNode(t), programs: t.TempDir(), reserveMiB: 1024}
	root := "github.com/gpu-device-plugin/gpu-device-plugin/"
	for name, from := range map[string]string{"gpu-device-plugin": "cmd/gpu-device-plugin",
		"nvidia-cuda-mps-control": "test/mps"} {
		c := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(n.programs, name), root+from)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v: %s", name, err, out)
		}
	}
	folder, err := os.MkdirTemp("", "m") // short: the paths of sockets below it must be
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	n.folder = folder
	if err := os.Mkdir(filepath.Join(folder, "mps"), 0o755); err != nil {
		t.Fatal(err)
	}
	n.configure(t)
	n.mps = n.run(t, "mps-control-daemon")
	n.daemon = n.run(t, "")
	return n
}

// configure writes the configuration file.
func (n *unitNode) configure(t *testing.T) {
	t.Helper()
	text := fmt.Sprintf("version: v1\nselectors:\n- {indices: [0, 1], units: true}\n- {indices: [2], replicas: 4, rename: %s}\n"+
		"units: {size: 1Gi, reserveMiB: %d}\n", replicas, n.reserveMiB)
	path := filepath.Join(n.folder, "config.yaml")
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

// run starts a process of the program; an empty command is the daemon.
func (n *unitNode) run(t *testing.T, command string) *process {
	t.Helper()
	n.started++
	p := &process{socket: filepath.Join(n.folder, fmt.Sprint("c", n.started)), ended: make(chan struct{})}
	arguments := []string{"--simulate", "h100-nvl-x4", "--config-file", filepath.Join(n.folder, "config.yaml"),
		"--mps-root", "/run/nvidia/mps", "--mps-root-ctr-path", filepath.Join(n.folder, "mps")}
	if command == "" {
		arguments = append(arguments, "--kubelet-socket", filepath.Join(n.dir, "kubelet.sock"), "--pod-resources-socket",
			n.podResourcesSocket,
			"--control-socket", p.socket, "--state-dir", filepath.Join(n.folder, "state"), "--cdi-dir", filepath.Join(n.folder,
				"cdi"),
			"--device-list-strategy", "envvar,cdi-cri")
	} else {
		arguments = append([]string{command}, arguments...)
	}
	log, err := os.OpenFile(filepath.Join(n.folder, "log"+command), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	p.Cmd = exec.Command(filepath.Join(n.programs, "gpu-device-plugin"), arguments...)
	p.Env = append(os.Environ(), "PATH="+n.programs)
	p.Stdout, p.Stderr = log, log
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		_ = p.Wait()
	}()
	t.Cleanup(func() {
		p.end(t, syscall.SIGTERM)
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the log of %q ends with:\n%s", command, text[max(0, len(text)-4000):])
		}
	})
	return p
}

// end ends a process by a signal.
func (p *process) end(t *testing.T, signal syscall.Signal) {
	t.Helper()
	_ = p.Process.Signal(signal) // it may have ended
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Errorf("%s does not end by %v", p.Args, signal)
		_ = p.Process.Kill()
	}
}

// killControlDaemon kills a control daemon of MPS.
func (n *unitNode) killControlDaemon(t *testing.T) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(n.folder, "mps/gpu.*/pipe/nvidia-cuda-mps-control.pid"))
	if err != nil || len(files) != unitGPUs {
		t.Fatalf("control daemons %q, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if strings.HasPrefix(string(comm), "nvidia-cuda-mps") { // not one that took its number since
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// status returns what the daemon knows, with holders.
func (n *unitNode) status(t *testing.T) (s status.Status) {
	t.Helper()
	var out, problem bytes.Buffer
	c := exec.CommandContext(t.Context(), n.daemon.Path, "status", "--holders", "-o", "json", "--control-socket",
		n.daemon.socket)
	c.Stdout, c.Stderr = &out, &problem
	if err := c.Run(); err != nil {
		t.Fatalf("status: %v: %s", err, problem.String())
	}
	if err := json.Unmarshal(out.Bytes(), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// untilSo waits until something is so.
func untilSo(t *testing.T, what func() string, is func() bool) {
	t.Helper()
	deadline, look := time.NewTimer(patience), time.NewTicker(5*time.Millisecond)
	defer deadline.Stop()
	defer look.Stop()
	for !is() {
		select {
		case <-deadline.C:
			t.Fatal(what())
		case <-look.C:
		}
	}
}

// cdiDevices returns the names of all CDI devices of the node's specs.
func (n *unitNode) cdiDevices(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(n.folder, "cdi/*.json"))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for _, file := range slices.Sorted(slices.Values(files)) {
		var spec struct {
			Kind    string `json:"kind"`
			Devices []struct {
				Name string `json:"name"`
			} `json:"devices"`
		}
		text, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(text, &spec)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range spec.Devices {
			all[spec.Kind+"="+d.Name] = true
		}
	}
	return all
}
