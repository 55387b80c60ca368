package devicemanager

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A unitPod is a pod that runs, and what it asked for.
type unitPod struct {
	asked map[string]int
	gpu   string // UUID, where it has units
	units []string
}

// A unitStory is a random story of pods on a unitNode.
type unitStory struct {
	*unitNode
	random *rand.Rand
	pods   map[string]*unitPod
	next   int
	// mayRefuse is until when one pod may be refused because a control daemon was killed: the daemon
	// probes each every 10 s, and the kubelet may not have the list yet in which its units are Unhealthy.
	mayRefuse time.Time
}

// TestRandomPodsOfUnits: pods with units, percentages, replicas and whole GPUs come and go, while
// processes are killed, replaced and reconfigured. A pod for which the node's count has room never
// fails, has what it asked for, and leaves nothing.
func TestRandomPodsOfUnits(t *testing.T) {
	pods := 200
	if *minutes {
		pods = 2000
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	s := &unitStory{newUnitNode(t), rand.New(rand.NewPCG(seed, 1)), map[string]*unitPod{}, 0, time.Time{}}
	s.settle(t)
	events := []func(*testing.T){s.killDaemon, s.killMPS, s.rollOut, s.reload, s.restartKubelet, s.withoutMPS}
	for round := 0; s.next < pods; round++ {
		switch {
		case round%5 == 4:
			events[round/5%len(events)](t)
		case s.random.IntN(4) == 0:
			s.endSome()
		default:
			for range 4 {
				s.admit(t)
			}
		}
		s.settle(t)
		s.look(t)
	}
	for name := range s.pods {
		s.Remove(name)
	}
	clear(s.pods)
	s.settle(t)
	s.look(t)
}

func (s *unitStory) killDaemon(t *testing.T) {
	s.daemon.end(t, syscall.SIGKILL)
	s.daemon = s.run(t, "")
}

func (s *unitStory) killMPS(t *testing.T) {
	s.killControlDaemon(t)
	s.mayRefuse = time.Now().Add(15 * time.Second)
}

func (s *unitStory) rollOut(t *testing.T) {
	next := s.run(t, "")
	s.daemon.end(t, syscall.SIGTERM)
	s.daemon = next
}

func (s *unitStory) reload(t *testing.T) {
	s.reserveMiB = 1024 * (1 + s.random.IntN(3))
	s.configure(t)
}

func (s *unitStory) restartKubelet(t *testing.T) {
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
}

// endSome ends about two of three pods.
func (s *unitStory) endSome() {
	for name := range s.pods {
		if s.random.IntN(3) > 0 {
			s.Remove(name)
			delete(s.pods, name)
		}
	}
}

// unitGPUMiB is the memory of a GPU.
const unitGPUMiB = 95830

// size is how many units a GPU has.
func (s *unitStory) size() int { return (unitGPUMiB - s.reserveMiB) / 1024 }

// held returns how many of a resource pods hold.
func (s *unitStory) held(name string) (held int) {
	for _, p := range s.pods {
		held += p.asked[name]
	}
	return held
}

// free returns how many units of a GPU no pod holds.
func (s *unitStory) free() []int {
	used := map[string]int{}
	over := map[string]int{}
	for _, p := range s.pods {
		for _, id := range p.units {
			if s.isPlanned(id) {
				used[p.gpu]++
			} else {
				over[p.gpu]++
			}
		}
	}
	free := slices.Repeat([]int{s.size()}, unitGPUs)
	for i, gpu := range slices.Sorted(maps.Keys(used)) {
		free[i] -= used[gpu] + over[gpu]
		delete(over, gpu)
	}
	at := len(used)
	for _, n := range over {
		free[at] -= n
		at++
	}
	return free
}

// isPlanned reports whether a unit is of the plan still: with a larger reserve there are fewer.
func (s *unitStory) isPlanned(id string) bool {
	var number int
	_, text, _ := strings.Cut(id, "::")
	_, _ = fmt.Sscan(text, &number)
	return number < s.size()
}

// left returns how many units pods hold that left the plan.
func (s *unitStory) left() (left int) {
	for _, p := range s.pods {
		for _, id := range p.units {
			if !s.isPlanned(id) {
				left++
			}
		}
	}
	return left
}

// settle waits until what is offered beside what pods hold is what is free on the emptiest GPU.
func (s *unitStory) settle(t *testing.T) {
	t.Helper()
	want := map[string]int{
		unitMemory: s.held(unitMemory) + max(0, slices.Max(s.free())), unitPercent: 100 * unitGPUs, replicas: 4, resource.WholeGPU: 1,
	}
	shown := map[string]int{}
	untilSo(t, func() string { return fmt.Sprintf("the node shows %v, want %v; free %v", shown, want, s.free()) },
		func() bool {
			for name, q := range s.Resources() {
				shown[name] = q.Allocatable
			}
			return maps.Equal(shown, want)
		})
}

// withoutMPS ends all control daemons. Units are not offered while they are away, and Allocate
// says why.
func (s *unitStory) withoutMPS(t *testing.T) {
	t.Helper()
	s.mps.end(t, syscall.SIGTERM)
	untilSo(t, func() string { return fmt.Sprintf("units are offered: %v", s.Resources()) }, func() bool {
		return s.Resources()[unitMemory].Allocatable <= s.left() // those are held, and given to nobody else
	})
	c := kubelet.Container{Pod: "none", Name: "main", Resource: unitMemory, Count: 1}
	if _, err := s.Admit(t.Context(), c); err == nil {
		t.Error("a pod has units without MPS")
	}
	for _, h := range s.status(t).Holders {
		if h.Receipt != nil && (len(h.Receipt.Differences) != 1 ||
			!strings.Contains(h.Receipt.Differences[0], "does not answer")) {
			t.Errorf("without MPS, the receipt of %s is %+v", h.Pod, h.Receipt)
		}
	}
	s.mps = s.run(t, "mps-control-daemon")
}

// admit admits a pod that the scheduler would send: the node has as much free as it asks for.
func (s *unitStory) admit(t *testing.T) {
	t.Helper()
	free := map[string]int{}
	for name, q := range s.Resources() {
		free[name] = q.Allocatable - s.held(name)
	}
	p := &unitPod{asked: map[string]int{}}
	switch kind := s.random.IntN(8); {
	case kind == 0 && free[resource.WholeGPU] > 0:
		p.asked[resource.WholeGPU] = 1
	case kind == 1 && free[replicas] > 0:
		p.asked[replicas] = 1
	case free[unitMemory] > 0:
		p.asked[unitMemory] = 1 + s.random.IntN(min(30, free[unitMemory]))
		if steps := min(free[unitPercent]/5, 8); steps > 0 && s.random.IntN(2) == 0 {
			p.asked[unitPercent] = 5 * (1 + s.random.IntN(steps))
		}
	default:
		return
	}
	name := fmt.Sprint("p", s.next)
	s.next++
	container := v1.Container{Name: "main", Resources: v1.ResourceRequirements{Limits: v1.ResourceList{}}}
	for of, count := range p.asked {
		container.Resources.Limits[v1.ResourceName(of)] = *apiresource.NewQuantity(int64(count), apiresource.DecimalSI)
	}
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)},
		Spec:       v1.PodSpec{Containers: []v1.Container{container}},
	}
	s.node.mu.Lock()
	s.node.pods[name] = pod
	s.node.mu.Unlock()
	before := s.free()
	if err := s.allocate(t.Context(), pod, &container, kubelet.Container{}); err != nil {
		if time.Now().Before(s.mayRefuse) && strings.Contains(err.Error(), "the MPS control daemon of") {
			s.mayRefuse = time.Time{}
			s.Remove(name)
			s.settle(t)
			return
		}
		t.Fatalf("%s asks for %v, and the node has %v, of its GPUs %v: %v", name, p.asked, free, before, err)
	}
	options, err := runOptions(t.Context(), s.current(), pod, &container)
	if err != nil {
		t.Fatal(err)
	}
	env, names := map[string]string{}, []string{}
	for _, e := range options.Envs {
		env[e.Name] = e.Value
	}
	for _, m := range options.Mounts {
		if m.ContainerPath == env["CUDA_MPS_PIPE_DIRECTORY"] {
			env["the pipe directory on the node"] = m.HostPath
		}
	}
	for _, c := range options.CDIDevices {
		names = append(names, c.Name)
	}
	s.pods[name] = p
	p.check(t, s, name, env, names)
}

// check holds what a container was given to what it asked for.
func (p *unitPod) check(t *testing.T, s *unitStory, name string, env map[string]string, cdi []string) {
	t.Helper()
	held := s.current().GetDevices(name, "main")
	for of, count := range p.asked {
		if len(held[of]) != count {
			t.Errorf("%s asked for %v, and holds %d of %s", name, p.asked, len(held[of]), of)
		}
	}
	mib := p.asked[unitMemory] * 1024
	if mib == 0 {
		return
	}
	for id := range held[unitMemory] {
		gpu, _, _ := strings.Cut(id, "::")
		if p.gpu != "" && p.gpu != gpu {
			t.Fatalf("%s has units of two GPUs", name)
		}
		p.gpu, p.units = gpu, append(p.units, id)
		for other, of := range s.pods {
			if of != p && slices.Contains(of.units, id) {
				t.Fatalf("%s and %s have unit %s", name, other, id)
			}
		}
	}
	want := map[string]string{
		"NVIDIA_VISIBLE_DEVICES": p.gpu, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": fmt.Sprintf("0=%dM", mib),
		"CUDA_MPS_PIPE_DIRECTORY": "/mps/pipe", "the pipe directory on the node": "/run/nvidia/mps/gpu." + p.gpu + "/pipe",
	}
	wantCDI := []string{"k8s.device-plugin.nvidia.com/gpu=" + p.gpu,
		fmt.Sprintf("k8s.device-plugin.nvidia.com/memory-limit=%dMi", mib)}
	if percent := p.asked[unitPercent]; percent > 0 {
		want["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = fmt.Sprint(percent)
		wantCDI = append(wantCDI, fmt.Sprintf("k8s.device-plugin.nvidia.com/thread-limit=%d", percent))
	}
	if diff := cmp.Diff(want, env); diff != "" {
		t.Errorf("environment of %s (-want +got):\n%s", name, diff)
	}
	slices.Sort(cdi)
	if diff := cmp.Diff(wantCDI, cdi); diff != "" {
		t.Errorf("CDI devices of %s (-want +got):\n%s", name, diff)
	}
	known := s.cdiDevices(t)
	for _, device := range cdi {
		if !known[device] {
			t.Errorf("no spec has %s of %s", device, name)
		}
	}
}

// look holds the daemon's receipts to what the pods asked for: all of them, and no others. No GPU
// has more given than it has.
func (s *unitStory) look(t *testing.T) {
	t.Helper()
	type row struct {
		GPU, Layer         string
		MiB, Percentage    int
		Since, Differences bool
	}
	want := map[string]row{}
	for name, p := range s.pods {
		if p.gpu != "" {
			want[name] = row{p.gpu, "mps", p.asked[unitMemory] * 1024, p.asked[unitPercent], true, false}
		}
	}
	var got map[string]row
	diff := func() string { return "receipts (-want +got):\n" + cmp.Diff(want, got) }
	untilSo(t, diff, func() bool { // the prober asks a control daemon that it knows every 10 s
		got = map[string]row{}
		sums := map[string]int{}
		for _, h := range s.status(t).Holders {
			if r := h.Receipt; r != nil {
				got[h.Pod] = row{h.Device, r.Layer, r.MemoryMiB, r.Percentage, time.Since(r.Since) < time.Hour,
					len(r.Differences) > 0}
				sums[h.Device] += r.MemoryMiB
			}
		}
		for gpu, sum := range sums {
			if sum > unitGPUMiB-1024 { // the least reserve of the story
				t.Errorf("limits on GPU %s are %d MiB in all", gpu, sum)
			}
		}
		return maps.Equal(want, got)
	})
}
