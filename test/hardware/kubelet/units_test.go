package kubelet_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/driverroot"
)

// TestUnits: containers with units of the GPU are clients of NVIDIA's own control daemon of MPS. Each has its memory and its threads and no
// more, the memory of all of them fits, also when many use it all, and what a pod sets in its own environment has no effect.
func TestUnits(t *testing.T) {
	needsGPU(t)
	if !inNamespaces(t) {
		return
	}
	n := startNode(t)
	s := startUnits(t)
	whole := s.client(t, nil, "info").last(t)
	t.Logf("a process that is no client of MPS sees %+v", whole)

	const unit, percentage = "volcano.sh/gpu-mem.128Mi", "volcano.sh/gpu-core.percentage"
	t.Run("limits", func(t *testing.T) {
		const limit = 80 * 128 << 20
		part := map[string]string{unit: "80", percentage: "25"}
		t.Cleanup(func() { n.removeAll(t) })
		first := n.run(t, "info", part, nil, "info")
		info := first.line(t, 0)
		first.ended(t)
		t.Logf("a container with 80 units and 25 percent sees %+v", info)
		if want := whole.SMs / 4; info.SMs < want-2 || info.SMs > want+2 {
			t.Errorf("a container with 25 percent has %d of %d SMs", info.SMs, whole.SMs)
		}
		full := n.run(t, "full", part, nil, "fill", "-chunk", "16", "-hold", "60s")
		got := full.line(t, 0)
		t.Logf("it can allocate %d MiB of %d: %+v", got.Allocated>>20, limit>>20, got)
		if got.Allocated > limit || got.Allocated < limit-(1<<30) {
			t.Errorf("a container with %d MiB can allocate %d MiB", limit>>20, got.Allocated>>20)
		}
		t.Logf("status --holders says\n%s", s.said(t, "status", "--holders"))
		t.Logf("nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved,compute_mode"))
		hostile := n.run(t, "hostile", part, map[string]string{
			"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=100G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "NVIDIA_VISIBLE_DEVICES": "all",
			"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": "/nowhere",
		}, "fill", "-chunk", "16").line(t, 0)
		t.Logf("one that sets the variables of MPS itself can allocate %d MiB", hostile.Allocated>>20)
		if hostile.Allocated > limit || hostile.Allocated == 0 {
			t.Errorf("a container that sets the variables of MPS itself can allocate %d MiB of %d: %+v", hostile.Allocated>>20, limit>>20, hostile)
		}
	})
	t.Run("threads", func(t *testing.T) {
		speed := func(name, percent string) pod {
			return n.run(t, name, map[string]string{unit: "8", percentage: percent}, nil, "spin", "-for", "4s")
		}
		t.Cleanup(func() { n.removeAll(t) })
		alone := speed("alone", "25").line(t, 1)
		n.removeAll(t)
		quarter, rest := speed("quarter", "25"), speed("rest", "75")
		a, b := quarter.line(t, 1), rest.line(t, 1)
		t.Logf("multiplications and additions a second: 25 percent alone %.3g; beside 75 percent %.3g and %.3g",
			alone.FMAs/alone.Seconds, a.FMAs/a.Seconds, b.FMAs/b.Seconds)
		if ratio := (b.FMAs / b.Seconds) / (a.FMAs / a.Seconds); ratio < 2 || ratio > 4.5 {
			t.Errorf("75 percent compute %.2f times as fast as 25", ratio)
		}
	})
	t.Run("all memory in four containers", func(t *testing.T) {
		units := s.units / 4
		limit := int64(units) * 128 << 20
		t.Cleanup(func() { n.removeAll(t) })
		var all []pod
		for _, name := range []string{"a", "b", "c", "d"} {
			all = append(all, n.run(t, name, map[string]string{unit: decimal(units)}, nil, "fill", "-chunk", "16", "-hold", "60s"))
		}
		for _, p := range all {
			got := p.line(t, 0)
			t.Logf("of %d MiB it allocates %d: %+v", limit>>20, got.Allocated>>20, got)
			if got.Allocated > limit || got.Allocated < limit-(1<<30) {
				t.Errorf("a container with %d MiB can allocate %d MiB", limit>>20, got.Allocated>>20)
			}
		}
		t.Logf("nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved"))
		over := n.run(t, "over", map[string]string{unit: decimal(s.units)}, nil, "info")
		t.Logf("units that are held: %s", over.refused(t))
	})
	t.Run("starts", func(t *testing.T) {
		n.startTimes(t, "80 units and 25 percent", map[string]string{unit: "80", percentage: "25"})
	})
	t.Run("as many clients as there can be", func(t *testing.T) { s.mostClients(t) })
	for _, clients := range []int{16, mostContainers} {
		t.Run("all memory in "+decimal(clients)+" processes", func(t *testing.T) { s.fillAll(t, clients) })
	}
	t.Run("what MPS does not hold", func(t *testing.T) { s.notHeld(t) })
	t.Run("a client that is killed", func(t *testing.T) { s.killClient(t) })
	t.Run("the control daemon is killed", func(t *testing.T) { s.killDaemon(t) })
	if mode := s.smi(t, "compute_mode"); !strings.Contains(mode, "Default") {
		t.Errorf("the compute mode is %s", mode)
	}
}

const mpsRoot = "/run/nvidia/mps"

// sharing is the GPU in units by MPS, with the programs that have it so.
type sharing struct {
	uuid  string
	units int // on offer while none is held
}

// startUnits starts mps-control-daemon and the daemon. Compute modes stay as they are: a library in front of NVML says that they are set.
func startUnits(t *testing.T) sharing {
	t.Helper()
	if _, err := exec.LookPath("nvidia-cuda-mps-control"); err != nil {
		t.Skip("no nvidia-cuda-mps-control in PATH")
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("version: v1\nselectors: [{indices: [0], units: true}]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	root := []string{"--config-file", file, "--mps-root", mpsRoot, "--mps-root-ctr-path", mpsRoot}
	out, err := exec.CommandContext(t.Context(), *daemon, "mps-control-daemon", "mount-shm", "--mps-root-ctr-path", mpsRoot).CombinedOutput()
	if err != nil {
		t.Fatalf("mount-shm: %v: %s", err, out)
	}
	if err := unix.Mount(mpsRoot+"/shm", "/dev/shm", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	start(t, "mps-control-daemon", nil, *daemon, append([]string{"mps-control-daemon", "--driver-root-ctr-path", withoutModes(t)}, root...)...)
	startPlugin(t, "volcano.sh/gpu-mem.128Mi", 0, root...)
	found, err := filepath.Glob(mpsRoot + "/gpu.*")
	if err != nil || len(found) != 1 {
		t.Fatalf("folders of control daemons: %q, %v", found, err)
	}
	s := sharing{uuid: strings.TrimPrefix(filepath.Base(found[0]), "gpu."), units: healthy(t, "volcano.sh/gpu-mem.128Mi")}
	t.Logf("%d units of 128 MiB are on offer; nvidia-smi says %s", s.units, s.smi(t, "memory.total,memory.reserved,memory.used"))
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
	out, err := exec.CommandContext(t.Context(), "gcc", "-shared", "-fPIC", "-o", filepath.Join(folder, "libnvidia-ml.so.1"),
		"-Wl,-soname,libnvidia-ml.so.1", "-Wl,-rpath,"+folder, "-Wl,--no-as-needed", source, "-L"+folder, "-l:libnvidia-mx.so.1",
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
	out, err := exec.CommandContext(t.Context(), "nvidia-smi", "--query-gpu="+fields, "--format=csv,noheader").CombinedOutput()
	if err != nil {
		t.Errorf("nvidia-smi: %v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// healthy returns how many healthy devices of a resource the daemon says that it has on offer.
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

// client starts the client on the node; with limits it is a client of MPS that has what a container would have.
func (s sharing) client(t *testing.T, limits []string, command ...string) *process {
	t.Helper()
	var environment []string
	if limits != nil {
		environment = append([]string{"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(mpsRoot, "gpu."+s.uuid, "pipe")}, limits...)
	}
	return start(t, "client", environment, *client, command...)
}

// last returns the last line that a client has printed, when it has ended.
func (p *process) last(t *testing.T) (a answer) {
	t.Helper()
	<-p.ended
	lines := strings.Split(strings.TrimSpace(tail(p.log)), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &a); err != nil {
		t.Fatalf("the client prints %q: %v", lines, err)
	}
	return a
}

// first waits for the first line that a client prints.
func (p *process) first(t *testing.T) (a answer) {
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

// fillAll has this many clients use all the units at once: none may find the GPU full before it has what is its own.
func (s sharing) fillAll(t *testing.T, clients int) {
	units := s.units / clients
	own := int64(units) * 128 << 20
	var all []*process
	for range clients {
		all = append(all, s.client(t, []string{pinned(units)}, "fill", "-chunk", "16", "-hold", "100s"))
	}
	var least, most int64 = own, 0
	for _, p := range all {
		got := p.first(t)
		if got.Error != "" {
			t.Errorf("a client of %d: %s", clients, got.Error)
		}
		least, most = min(least, got.Allocated), max(most, got.Allocated)
	}
	t.Logf("each of %d clients with %d MiB allocates %d to %d MiB; nvidia-smi says %s",
		clients, own>>20, least>>20, most>>20, s.smi(t, "memory.used,memory.free,memory.reserved"))
	if most > own || least < own-(1<<30) {
		t.Errorf("clients with %d MiB allocate %d to %d MiB", own>>20, least>>20, most>>20)
	}
	end(all)
}

// mostContainers is how many containers a GPU in units has at most.
const mostContainers = 48

// mostClients says how many clients the server of MPS takes, which are at least as many as a GPU in units may have containers.
func (s sharing) mostClients(t *testing.T) {
	var all []*process
	refused := ""
	for len(all) < 64 && refused == "" {
		p := s.client(t, []string{pinned(8)}, "take", "-bytes", "16777216", "-hold", "100s")
		all = append(all, p)
		refused = p.first(t).Error
	}
	t.Logf("%d clients are taken; the next one: %q", len(all)-1, refused)
	if len(all)-1 < mostContainers {
		t.Errorf("only %d clients are taken: %s", len(all)-1, refused)
	}
	end(all)
}

// end ends clients.
func end(all []*process) {
	for _, p := range all {
		_ = p.Process.Signal(syscall.SIGTERM) // an error says that it has ended
	}
	for _, p := range all {
		<-p.ended
	}
}

// notHeld says what MPS does not hold back, as docs/fractions.md has it, and what its server takes.
func (s sharing) notHeld(t *testing.T) {
	t.Logf("without clients, nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved"))
	held := s.client(t, []string{pinned(80)}, "take", "-bytes", "1073741824", "-hold", "100s")
	held.first(t)
	t.Logf("with a client that has 1 GiB, nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved"))
	held.stop()
	own := s.client(t, []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G,1=4G"}, "fill", "-chunk", "1024").last(t)
	t.Logf("a process that gives itself 0=2G,1=4G with one GPU allocates %d MiB of its 2048", own.Allocated>>20)
	for _, bytes := range []string{"268435456", "4294967296"} {
		managed := s.client(t, []string{pinned(16)}, "managed", "-bytes", bytes).last(t)
		t.Logf("a client with 2 GiB allocates %s bytes of managed memory: %+v", bytes, managed)
	}
	without := start(t, "client", []string{"CUDA_MPS_PIPE_DIRECTORY=/nowhere", pinned(8)}, *client, "fill", "-chunk", "1024").last(t)
	t.Logf("a process that finds no control daemon allocates %d MiB of its 1024: %+v", without.Allocated>>20, without)
}

// killClient kills a client in the middle of its work, beside another one, and says what becomes of that: it goes on, or ends with an
// error, as it did in one of two runs with driver 580. The next one computes.
func (s sharing) killClient(t *testing.T) {
	victim, other := s.client(t, []string{pinned(8)}, "spin", "-for", "30s"), s.client(t, []string{pinned(8)}, "spin", "-for", "6s")
	victim.first(t)
	other.first(t)
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	t.Logf("beside a client that was killed, another one ends with %+v", other.last(t))
	next := s.client(t, []string{pinned(8)}, "info").last(t)
	if next.Error != "" {
		t.Errorf("after a client was killed, the next one has %+v", next)
	}
}

// killDaemon kills the control daemon: its units are not on offer, and then they are again.
func (s sharing) killDaemon(t *testing.T) {
	before := s.client(t, []string{pinned(8)}, "spin", "-for", "20s")
	before.first(t)
	out, err := exec.CommandContext(t.Context(), "pgrep", "-f", "nvidia-cuda-mps-control -f").Output()
	pid := regexp.MustCompile(`\d+`).FindString(string(out))
	if err != nil || pid == "" {
		t.Fatalf("pgrep: %q, %v", out, err)
	}
	number, _ := strconv.Atoi(pid)
	began := time.Now()
	if err := syscall.Kill(number, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	const unit = "volcano.sh/gpu-mem.128Mi"
	until(t, "no units are on offer", func() bool { return healthy(t, unit) == 0 })
	away := time.Since(began)
	until(t, "the units are on offer again", func() bool { return healthy(t, unit) == s.units })
	t.Logf("the control daemon was killed: units not on offer after %.1f s, on offer again after %.1f s; its client ends with %+v",
		away.Seconds(), time.Since(began).Seconds(), before.last(t))
	if next := s.client(t, []string{pinned(8)}, "info").last(t); next.Error != "" {
		t.Errorf("a client of the next control daemon has %+v", next)
	}
}
