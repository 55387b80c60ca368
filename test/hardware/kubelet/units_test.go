package kubelet_test

import (
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
)

const (
	mpsRoot    = "/run/nvidia/mps"
	unit       = "volcano.sh/gpu-mem.128Mi"
	percentage = "volcano.sh/gpu-core.percentage"
)

// TestUnits: containers with units of the GPU are clients of NVIDIA's own control daemon of MPS.
// Each has its memory and its threads and no more, the memory of all of them fits, also when many
// use it all, and what a pod sets in its own environment has no effect.
func TestUnits(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	s := startSharing(t, "selectors: [{indices: [0], units: true}]", unit)
	whole := s.whole(t)
	t.Logf("%d units are offered; a process that is no client of MPS sees %+v", s.devices, whole)
	t.Run("limits", func(t *testing.T) { s.limits(t, whole.SMs) })
	t.Run("threads", func(t *testing.T) { s.threads(t) })
	t.Run("all memory in four containers", func(t *testing.T) { s.fillContainers(t) })
	t.Run("starts", func(t *testing.T) {
		s.node.startTimes(t, "80 units and 25 percent", map[string]string{unit: "80", percentage: "25"})
	})
	var next *process // it is to serve what follows, too
	t.Run("the daemon is killed", func(sub *testing.T) { next = s.killPlugin(sub, t) })
	s.plugin = next
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

// TestReplicas: a container with one of four replicas of the GPU by MPS has a quarter of the memory
// and of the threads.
func TestReplicas(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	const gpu = "nvidia.com/gpu"
	s := startSharing(t, "sharing: {mps: {resources: [{name: "+gpu+", replicas: 4}]}}", gpu)
	whole := s.whole(t)
	one := map[string]string{gpu: "1"}
	info := s.node.run(t, "info", one, nil, "info")
	got := info.line(t, 0)
	if want := whole.SMs / 4; s.devices != 4 || got.SMs < want-2 || got.SMs > want+2 {
		t.Errorf("a container with one of %d replicas has %d of %d SMs", s.devices, got.SMs, whole.SMs)
	}
	info.ended(t)
	info.remove(t)
	var all []pod
	for _, name := range []string{"a", "b", "c", "d"} {
		all = append(all, s.node.run(t, name, one, nil, "fill", "-chunk", "16", "-hold", "60s"))
	}
	for _, p := range all {
		got := p.line(t, 0)
		t.Logf("a container with one of four replicas allocates %d MiB of %d", got.Allocated>>20, whole.Total>>20)
		// A quarter of all memory, of which the driver keeps some: the last one may have less.
		if got.Allocated > whole.Total/4+(1<<30) || got.Allocated < whole.Total/4-(1<<30) {
			t.Errorf("a container with one of four replicas can allocate %d MiB of %d", got.Allocated>>20, whole.Total>>20)
		}
	}
	s.node.removeAll(t)
}

// limits: a container has its memory and its threads, and what it sets itself has no effect.
func (s sharing) limits(t *testing.T, sms int) {
	const limit = 80 * 128 << 20
	part := map[string]string{unit: "80", percentage: "25"}
	t.Cleanup(func() { s.node.removeAll(t) })
	first := s.node.run(t, "info", part, nil, "info")
	info := first.line(t, 0)
	first.ended(t)
	first.remove(t)
	t.Logf("a container with 80 units and 25 percent sees %+v", info)
	if want := sms / 4; info.SMs < want-2 || info.SMs > want+2 {
		t.Errorf("a container with 25 percent has %d of %d SMs", info.SMs, sms)
	}
	s.node.run(t, "full", part, nil, "fill", "-chunk", "16", "-hold", "60s").has(t, limit)
	t.Logf("status --holders says\n%s", s.said(t, "status", "--holders"))
	t.Logf("nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved,compute_mode"))
	s.node.run(t, "hostile", part, map[string]string{
		"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=100G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "NVIDIA_VISIBLE_DEVICES": "all",
		"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": "/nowhere",
	}, "fill", "-chunk", "16").has(t, limit)
}

// has holds a container that fills its memory to its limit in bytes, of which CUDA's context takes
// some.
func (p pod) has(t *testing.T, limit int64) {
	t.Helper()
	got := p.line(t, 0)
	t.Logf("pod %s can allocate %d MiB of %d, and then has %d left", p.name, got.Allocated>>20, limit>>20, got.Free>>20)
	if got.Allocated > limit || got.Allocated < limit-(1<<30) {
		t.Errorf("pod %s with %d MiB can allocate %d MiB: %+v", p.name, limit>>20, got.Allocated>>20, got)
	}
}

// threads: a container computes as fast as its percentage says, alone and beside another one.
func (s sharing) threads(t *testing.T) {
	t.Cleanup(func() { s.node.removeAll(t) })
	speed := func(name, percent string) pod {
		return s.node.run(t, name, map[string]string{unit: "8", percentage: percent}, nil, "spin", "-for", "4s")
	}
	alone := speed("alone", "25").line(t, 1)
	s.node.removeAll(t)
	quarter, rest := speed("quarter", "25"), speed("rest", "75")
	a, b := quarter.line(t, 1), rest.line(t, 1)
	t.Logf("multiplications and additions a second: 25 percent alone %.3g; beside 75 percent %.3g and %.3g",
		alone.FMAs/alone.Seconds, a.FMAs/a.Seconds, b.FMAs/b.Seconds)
	if ratio := (b.FMAs / b.Seconds) / (a.FMAs / a.Seconds); ratio < 2 || ratio > 4.5 {
		t.Errorf("75 percent compute %.2f times as fast as 25", ratio)
	}
}

// fillContainers: four containers use all units at once, and there are no others.
func (s sharing) fillContainers(t *testing.T) {
	t.Cleanup(func() { s.node.removeAll(t) })
	units := s.devices / 4
	var all []pod
	for _, name := range []string{"a", "b", "c", "d"} {
		all = append(all, s.node.run(t, name, map[string]string{unit: decimal(units)}, nil, "fill", "-chunk", "16", "-hold",
			"60s"))
	}
	for _, p := range all {
		p.has(t, int64(units)*128<<20)
	}
	t.Logf("nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved"))
	over := s.node.run(t, "over", map[string]string{unit: decimal(s.devices)}, nil, "info")
	t.Logf("units that are held: %s", over.refused(t))
}

// killPlugin kills the daemon while a container computes: that goes on, and the next daemon, which
// is returned, knows what it has. That one ends with the whole test.
func (s sharing) killPlugin(t, whole *testing.T) *process {
	t.Cleanup(func() { s.node.removeAll(t) })
	p := s.node.run(t, "held", map[string]string{unit: "80"}, nil, "spin", "-for", "6s")
	p.line(t, 0)
	if err := s.plugin.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-s.plugin.ended
	began := time.Now()
	next := startPlugin(whole, unit, s.devices, s.args...)
	took := time.Since(began)
	var holders string
	until(t, "the next daemon knows the container", func() bool {
		holders = s.said(t, "status", "--holders", "-o", "wide")
		return strings.Contains(holders, "default/held-node, container main: 10240 MiB, by mps")
	})
	t.Logf("all units are offered %.1f s after the daemon was killed; then status says\n%s", took.Seconds(), holders)
	if got := p.line(t, 1); got.Error != "" || got.Launches == 0 {
		t.Errorf("a container that computes while the daemon is killed: %+v", got)
	}
	p.ended(t)
	s.node.removeAll(t)
	until(t, "nothing is held", func() bool { return !strings.Contains(s.said(t, "status", "--holders"), "holder:") })
	return next
}

// fillAll has this many clients use all the units at once: none may find the GPU full before it has
// what is its own.
func (s sharing) fillAll(t *testing.T, clients int) {
	units := s.devices / clients
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

// mostClients says how many clients the server of MPS takes, which are at least as many as a GPU in
// units may have containers.
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

// notHeld says what MPS does not hold back, as docs/sharing.md has it, and what its server takes.
func (s sharing) notHeld(t *testing.T) {
	t.Logf("without clients, nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved"))
	held := s.client(t, []string{pinned(80)}, "take", "-bytes", "1073741824", "-hold", "100s")
	held.first(t)
	t.Logf("with a client that has 1 GiB, nvidia-smi says %s", s.smi(t, "memory.used,memory.free,memory.reserved"))
	held.stop()
	only := filepath.Join(t.TempDir(), "control")
	if err := os.WriteFile(only, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(filepath.Join(s.pipe, "control"), only, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(only, unix.MNT_DETACH) })
	alone := start(t, "client", []string{"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Dir(only), pinned(80)}, *client, "fill",
		"-chunk", "16").last(t)
	t.Logf("a process that sees the socket control alone allocates %d MiB of its 10240: %+v", alone.Allocated>>20, alone)
	own := s.client(t, []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G,1=4G"}, "fill", "-chunk", "1024").last(t)
	t.Logf("a process that gives itself 0=2G,1=4G with one GPU allocates %d MiB of its 2048", own.Allocated>>20)
	for _, bytes := range []string{"268435456", "4294967296"} {
		managed := s.client(t, []string{pinned(16)}, "managed", "-bytes", bytes).last(t)
		t.Logf("a client with 2 GiB allocates %s bytes of managed memory: %+v", bytes, managed)
	}
	without := start(t, "client", []string{"CUDA_MPS_PIPE_DIRECTORY=/nowhere", pinned(8)}, *client, "fill", "-chunk",
		"1024").last(t)
	t.Logf("a process that finds no control daemon allocates %d MiB of its 1024: %+v", without.Allocated>>20, without)
}

// killClient kills clients in the middle of their work, each beside another one, and says how those
// end. NVIDIA promises nothing. The next client computes.
func (s sharing) killClient(t *testing.T) {
	const times = 6
	lost := map[string]int{}
	for range times {
		victim, other := s.client(t, []string{pinned(8)}, "spin", "-for", "3s"), s.client(t, []string{pinned(8)}, "spin",
			"-for", "3s")
		victim.first(t)
		other.first(t)
		_ = victim.Process.Kill() // an error says that it has ended
		<-victim.ended
		if next := s.client(t, []string{pinned(8)}, "info").last(t); next.Error != "" {
			t.Errorf("after a client was killed, the next one has %+v", next)
		}
		lost[other.last(t).Error]++
	}
	t.Logf("%d clients were killed at work; so the others ended: %v", times, lost)
}

// killDaemon kills the control daemon: its units are not offered, and then they are again.
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
	until(t, "no units are offered", func() bool { return healthy(t, unit) == 0 })
	away := time.Since(began)
	until(t, "the units are offered again", func() bool { return healthy(t, unit) == s.devices })
	t.Logf("the control daemon was killed: units not offered after %.1f s, offered again after %.1f s; its client ends with %+v",
		away.Seconds(), time.Since(began).Seconds(), before.last(t))
	if next := s.client(t, []string{pinned(8)}, "info").last(t); next.Error != "" {
		t.Errorf("a client of the next control daemon has %+v", next)
	}
}
