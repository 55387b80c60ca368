package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/repairer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// An effect is what a reset does to a broken GPU.
type effect int

const (
	resetWorks    effect = iota // the reset repairs the GPU
	resetFails                  // nvidia-smi refuses
	resetsAnother               // it repairs another GPU, and says that it repaired this one
	faultStays                  // nvidia-smi says that it repaired the GPU, and the fault stays
)

// A ward is a cluster of nodes with GPUs that break.
type ward struct {
	*stage
	slots int
	nodes []*patient

	mu       sync.Mutex // guards all following fields
	busy     map[string]bool
	most     int
	problems []string
	took     []time.Duration // from the withdrawal of a GPU until it was Healthy
	evicted  int
}

// A patient is a node: its hardware and its pods outlive its process.
type patient struct {
	*process
	w         *ward
	name, dir string
	boot      int // number of the boot
	modes     *feed.Feed[repair.Mode]
	snapshots *feed.Feed[inventory.Snapshot]
	repairs   *repairer.Repairs
	end       context.CancelFunc
	ended     *sync.WaitGroup
	fuse      *fuse // of the process; nil for none

	mu        sync.Mutex // guards all following fields
	effects   map[string]effect
	holders   map[string]bool
	protected map[string]bool // GPUs whose pod has a disruption budget that allows no eviction
	withdrawn map[string]bool
	resets    map[string][]time.Time
}

const gpusOfANode = 4

// ward returns a cluster whose nodes have repairs in a mode, with processes that have started.
func (s *stage) ward(count, slots int, mode repair.Mode) *ward {
	s.Helper()
	w := &ward{stage: s, slots: slots, busy: map[string]bool{}}
	for i := range count {
		p := &patient{w: w, name: fmt.Sprintf("n%02d", i), dir: s.TempDir(), modes: feed.New(mode), effects: map[string]effect{},
			holders: map[string]bool{}, protected: map[string]bool{}, withdrawn: map[string]bool{}, resets: map[string][]time.Time{}}
		snapshot := inventory.Snapshot{Generation: 1}
		for g := range gpusOfANode {
			snapshot.GPUs = append(snapshot.GPUs, inventory.GPU{UUID: fmt.Sprintf("GPU-%d", g), Index: g, BDF: fmt.Sprintf("0000:0%d:00.0", g),
				Health: inventory.Health{State: inventory.Healthy}, ComputeCapability: inventory.ComputeCapability{Major: 9}})
		}
		p.snapshots = feed.New(snapshot)
		if err := s.server.ChangeNode(p.name, func(n *corev1.Node) {
			n.Labels = map[string]string{"nvidia.com/gpu.present": "true"}
		}); err != nil {
			s.Fatal(err)
		}
		w.nodes = append(w.nodes, p)
		p.start()
	}
	return w
}

// start starts the process of a node.
func (p *patient) start() {
	w := p.w
	p.process = w.new(config.Config{
		Live: config.Live{Repair: p.modes.Value(), Rollout: config.Rollout{Slots: w.slots, Namespace: leaseSpace}},
	})
	p.Startup.NodeName = p.name
	p.configure(func(c *config.Config) { c.NodeName = p.name })
	ctx, cancel := context.WithCancel(context.Background())
	p.end, p.ended = cancel, &sync.WaitGroup{}
	fuse := p.fuse
	p.mu.Lock()
	clear(p.withdrawn) // the list of a new process
	p.mu.Unlock()
	write := func(path string, v any) error {
		return fuse.step("write "+filepath.Base(path), func() error { return statefile.WriteState(path, v) })
	}
	reserve := func(_ context.Context, g inventory.GPU) (users []string, release func(), err error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.holders[g.UUID] {
			return []string{"pod a/b"}, nil, nil
		}
		return nil, func() {}, nil
	}
	resets := reset.New(reset.Options{
		Snapshots: p.snapshots, StateDir: p.dir, BootID: fmt.Sprint("boot", p.boot), May: func() error { return nil }, Reserve: reserve,
		Withhold: func(_ context.Context, gpus []string, reason string) error {
			return fuse.step("withdraw or return", func() error { p.withhold(gpus, reason); return nil })
		},
		Clients: func(inventory.GPU) []string { return nil }, PreviousLeader: feed.New("").Latest, Write: write,
		Run: func(ctx context.Context, gpus []inventory.GPU, _ func()) error { return p.nvidiaSMI(ctx, fuse, gpus) },
	})
	cluster := func() interface{ RequestRepair(string) error } { return p.cluster }
	p.repairs = repairer.New(repairer.Options{
		Mode: p.modes.Latest, Snapshots: p.snapshots, StateDir: p.dir, CreatesMIG: func() bool { return false },
		Users: func(ctx context.Context, g inventory.GPU) repair.Users {
			users, _, _ := reserve(ctx, g)
			u := repair.Users{Names: users}
			if len(users) > 0 && p.modes.Value() == repair.Evict {
				u.Pods = []repair.Pod{{Namespace: "a", Name: g.UUID}}
			}
			return u
		},
		Rank: func(context.Context, []repair.Pod) error { return nil },
		Evict: func(_ context.Context, pod mig.Pod) error {
			return fuse.step("evict", func() error { return p.evict(pod.Name) })
		},
		Admit: func(what string) error { return cluster().RequestRepair(what) },
		Reset: resets.Reset, Resetting: func() bool { return resets.Status().Value().Withholds() }, Write: write,
	})
	p.Repairs = p.repairs.Status()
	p.process.start()
	p.ended.Go(func() { _ = resets.Run(ctx) })
	p.ended.Go(func() { _ = p.repairs.Run(ctx) })
	w.Cleanup(p.kill)
}

// kill ends the process; the node keeps what it has.
func (p *patient) kill() {
	p.end()
	p.ended.Wait()
	p.stop()
}

// evict ends the pod with a GPU, within its disruption budget, and notes what must not be.
func (p *patient) evict(uuid string) error {
	hasSlot := slices.ContainsFunc(p.w.server.Leases(leaseSpace), func(l *coordinationv1.Lease) bool {
		return strings.HasPrefix(l.Name, slots.Prefix) && l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity == p.name
	})
	isBroken := slices.ContainsFunc(p.snapshots.Value().GPUs, func(g inventory.GPU) bool {
		return g.UUID == uuid && g.Health.State != inventory.Healthy
	})
	if !hasSlot || !isBroken {
		p.w.problem("%s: the pod of %s is evicted; slot %v, broken %v", p.name, uuid, hasSlot, isBroken)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.protected[uuid] {
		return errors.New("the disruption budget needs the pod")
	}
	p.holders[uuid] = false
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.evicted++
	return nil
}

// reboot restarts the node: its pods end, and a reset under way is over.
func (p *patient) reboot() {
	p.kill()
	p.restartNode()
}

// restartNode restarts a node without a process.
func (p *patient) restartNode() {
	p.boot++
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.holders)
	clear(p.withdrawn)
}

func (p *patient) withhold(gpus []string, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, uuid := range gpus {
		p.withdrawn[uuid] = reason != ""
		if _, broke := p.effects[uuid]; !broke {
			p.w.problem("%s: %s never broke, and is withdrawn: %s", p.name, uuid, reason)
		}
	}
}

// nvidiaSMI resets GPUs, and notes what must not be.
func (p *patient) nvidiaSMI(ctx context.Context, fuse *fuse, gpus []inventory.GPU) error {
	began, uuid := time.Now(), gpus[0].UUID
	if err := fuse.step("nvidia-smi begins", func() error { p.noteReset(began, gpus); return nil }); err != nil {
		return err
	}
	defer func() {
		p.w.mu.Lock()
		delete(p.w.busy, p.name)
		p.w.mu.Unlock()
	}()
	p.mu.Lock()
	does := p.effects[uuid]
	p.mu.Unlock()
	select {
	case <-time.After(4 * time.Second):
	case <-ctx.Done():
		return context.Canceled // killed with the daemon
	}
	return fuse.step("nvidia-smi ends", func() error {
		switch does {
		case resetFails:
			return errors.New("Unknown Error")
		case resetsAnother:
			uuid = fmt.Sprintf("GPU-%d", (gpus[0].Index+1)%gpusOfANode)
		case faultStays:
			return nil
		case resetWorks:
			p.w.mu.Lock()
			p.w.took = append(p.w.took, time.Since(began))
			p.w.mu.Unlock()
		}
		p.setHealth(uuid, inventory.Health{State: inventory.Healthy, Since: time.Now()})
		return nil
	})
}

// noteReset notes that a reset begins, and what is wrong about that.
func (p *patient) noteReset(began time.Time, gpus []inventory.GPU) {
	p.w.mu.Lock()
	p.w.busy[p.name] = true
	p.w.most = max(p.w.most, len(p.w.busy))
	if len(gpus) != 1 {
		p.w.problems = append(p.w.problems, fmt.Sprintf("%s: %d GPUs are reset together", p.name, len(gpus)))
	}
	p.w.mu.Unlock()
	uuid := gpus[0].UUID
	p.mu.Lock()
	defer p.mu.Unlock()
	recent := 0
	for _, t := range p.resets[uuid] {
		if began.Sub(t) < repair.BudgetTime-time.Second { // the history has whole seconds
			recent++
		}
	}
	p.resets[uuid] = append(p.resets[uuid], began)
	for other, is := range p.withdrawn {
		if is != (other == uuid) {
			p.w.problem("%s: while %s is reset, %s is withdrawn: %v", p.name, uuid, other, is)
		}
	}
	if p.holders[uuid] || recent >= repair.Budget {
		p.w.problem("%s: %s is reset; in use %v, %d resets before", p.name, uuid, p.holders[uuid], recent)
	}
}

func (w *ward) problem(format string, a ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.problems = append(w.problems, fmt.Sprintf(format, a...))
}

func (p *patient) setHealth(uuid string, h inventory.Health) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.snapshots.Value()
	s.GPUs = slices.Clone(s.GPUs)
	for i := range s.GPUs {
		if s.GPUs[i].UUID == uuid {
			s.GPUs[i].Health = h
		}
	}
	s.Generation++
	p.snapshots.Publish(s)
}

// fail breaks a GPU.
func (p *patient) fail(gpu int, e effect) {
	uuid := fmt.Sprintf("GPU-%d", gpu)
	p.mu.Lock()
	p.effects[uuid] = e
	p.mu.Unlock()
	p.setHealth(uuid, inventory.Health{State: inventory.Unhealthy, Reason: "XID 95", Remedy: inventory.RemedyReset, Since: time.Now()})
}

// hold lets a pod have a GPU, or end. The kubelet gives it a GPU that is Healthy and not withdrawn.
func (p *patient) hold(gpu int, holds bool) {
	g := p.snapshots.Value().GPUs[gpu]
	p.mu.Lock()
	defer p.mu.Unlock()
	if !holds || g.Health.State == inventory.Healthy && !p.withdrawn[g.UUID] {
		p.holders[g.UUID] = holds
	}
}

// reason returns what the first broken GPU of a node waits for.
func (p *patient) reason() string {
	if s := p.repairs.Status().Value(); len(s.Steps) > 0 {
		return string(s.Steps[0].State) + ": " + s.Steps[0].Reason
	}
	return ""
}

func (p *patient) isHealthy(gpu int) bool {
	return p.snapshots.Value().GPUs[gpu].Health.State == inventory.Healthy
}

// leases returns the names of the Leases about repairs, and of the slots.
func (w *ward) leases() (names []string) {
	for _, l := range w.server.Leases(leaseSpace) {
		names = append(names, l.Name)
	}
	return names
}

// resume does what kubectl gpu repair resume does.
func (w *ward) resume() {
	w.Helper()
	_ = w.server.DeleteLease(leaseSpace, repair.Resumed) // there may be none
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: repair.Resumed, Namespace: leaseSpace,
		Labels: map[string]string{"gpu-device-plugin.github.io/repair": "true"}}}
	now := metav1.NowMicro()
	l.Spec.RenewTime = &now
	if err := w.server.Add("leases", l); err != nil {
		w.Fatal(err)
	}
	if err := w.server.DeleteLease(leaseSpace, repair.Stopped); err != nil {
		w.Fatal(err)
	}
}

// check fails the test if something was that must not be.
func (w *ward) check() {
	w.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.most > w.slots || len(w.problems) > 0 {
		w.Errorf("%d nodes repaired at the same time, want at most %d; %d problems: %q", w.most, w.slots, len(w.problems),
			w.problems[:min(5, len(w.problems))])
	}
}

// TestFleetRepairs: the Lease of a node shows its repairs, in the plan too, and goes when they are
// forgotten. A node whose GPUs are well makes no requests.
func TestFleetRepairs(t *testing.T) {
	onStage(t, func(s *stage) {
		w := s.ward(2, 1, repair.Idle)
		sick := w.nodes[0]
		s.pass(time.Minute)
		before := s.server.Requests()
		s.pass(time.Hour)
		for request, n := range s.server.Requests() {
			if request.Resource == "leases" && n > before[request] {
				t.Errorf("idle nodes: %d %v", n-before[request], request)
			}
		}
		sick.hold(2, true)
		sick.fail(2, resetWorks)
		s.until("the Lease says what it waits for", func() bool { return strings.Contains(sick.shown().reason, "in use: GPU 2 by pod a/b") })
		sick.hold(2, false)
		s.until("the GPU is Healthy", func() bool { return sick.isHealthy(2) })
		s.until("the Lease shows the repair", func() bool {
			shown := sick.shown()
			return len(shown.Attempts) == 1 && shown.Attempts[0].Repaired && len(shown.Steps) == 0
		})
		s.pass(25 * time.Hour)
		if names := w.leases(); len(names) > 0 {
			t.Errorf("Leases %v", names)
		}
		w.check()
		w.nodes[1].modes.Publish(repair.Plan)
		w.nodes[1].configure(func(c *config.Config) { c.Repair = repair.Plan })
		w.nodes[1].fail(0, resetWorks)
		s.until("the Lease shows the plan", func() bool { return strings.Contains(w.nodes[1].shown().reason, "repair: idle would reset it now") })
		s.pass(time.Hour)
		if w.nodes[1].isHealthy(0) {
			t.Error("the plan repaired a GPU")
		}
		s.server.SetFault(leaseFault(http.StatusServiceUnavailable, "delete", false))
		w.nodes[1].modes.Publish(repair.Off)
		w.nodes[1].configure(func(c *config.Config) { c.Repair = repair.Off })
		s.pass(time.Minute) // nothing needs the watch of the Node, which ends
		s.server.SetFault(apiserver.Fault{})
		s.until("the Lease of the plan is gone", func() bool { return len(w.leases()) == 0 })
	})
}

// shown is what the Lease of a node says; reason is that of the first step.
type shown struct {
	repair.Status
	reason string
}

func (p *patient) shown() (s shown) {
	for _, l := range p.w.server.Leases(leaseSpace) {
		if l.Name == repair.LeasePrefix+p.name {
			if err := json.Unmarshal([]byte(l.Annotations["gpu-device-plugin.github.io/repair.status"]), &s.Status); err != nil {
				p.w.Error(err)
			}
		}
	}
	if len(s.Steps) > 0 {
		s.reason = s.Steps[0].Reason
	}
	return s
}

// TestManyNodesAskForARepair: more nodes than are likely by chance stop the repairs of the cluster,
// until an operator resumes them.
func TestManyNodesAskForARepair(t *testing.T) {
	onStage(t, func(s *stage) {
		w := s.ward(10, 1, repair.Idle)
		for _, p := range w.nodes[:2] { // 20 percent
			p.fail(0, resetWorks)
			s.until("it is repaired", func() bool { return p.isHealthy(0) })
		}
		for _, p := range w.nodes[2:6] {
			p.fail(0, resetWorks)
		}
		isStopped := func() bool { return slices.Contains(w.leases(), repair.Stopped) }
		s.until("the repairs are stopped", isStopped)
		s.pass(2 * time.Hour)
		for _, p := range w.nodes[3:6] {
			if p.isHealthy(0) || !strings.Contains(p.reason(), "of 10 GPU nodes asked for a repair within 1h0m0s") ||
				!strings.Contains(p.reason(), "continue with kubectl gpu repair resume") {
				t.Errorf("%s: healthy %v, %s", p.name, p.isHealthy(0), p.reason())
			}
		}
		w.resume()
		for _, p := range w.nodes[2:6] {
			s.until("it is repaired", func() bool { return p.isHealthy(0) })
		}
		if isStopped() {
			t.Error("the same nodes have stopped the repairs again")
		}
		w.check()
	})
}

// TestRandomFaults breaks GPUs of many nodes at random, with pods, kills, restarts of nodes and an
// operator. Every second node evicts pods, some of which have a strict disruption budget. GPU_FAULTS is
// the number of faults on 30 nodes; 1000 take two to ten minutes.
func TestRandomFaults(t *testing.T) {
	faults, nodes := 40, 5
	if text := os.Getenv("GPU_FAULTS"); text != "" {
		if _, err := fmt.Sscan(text, &faults); err != nil {
			t.Fatal(err)
		}
		nodes = 30
	}
	onStage(t, func(s *stage) {
		random := rand.New(rand.NewPCG(1, uint64(faults)))
		w := s.ward(nodes, 2, repair.Idle)
		for i, p := range w.nodes {
			if i%2 == 1 {
				p.configure(func(c *config.Config) { c.Repair = repair.Evict })
				p.modes.Publish(repair.Evict)
			}
		}
		stops, kills, reboots := 0, 0, 0
		operate := func() {
			if slices.Contains(w.leases(), repair.Stopped) {
				w.resume()
				stops++
			}
			for _, p := range w.nodes {
				for _, step := range p.repairs.Status().Value().Steps {
					if step.State == repair.Manual { // replaced
						p.setHealth(step.UUID, inventory.Health{State: inventory.Healthy, Since: time.Now()})
					}
				}
			}
		}
		repairable := func() (broken []string) {
			for _, p := range w.nodes {
				for gpu, g := range p.snapshots.Value().GPUs {
					if p.effects[g.UUID] == resetWorks && !p.isHealthy(gpu) {
						broken = append(broken, fmt.Sprintf("%s %s: %s", p.name, g.UUID, p.reason()))
					}
				}
			}
			return broken
		}
		for injected := 0; injected < faults; {
			p, gpu := w.nodes[random.IntN(nodes)], random.IntN(gpusOfANode)
			p.hold(gpu, random.IntN(3) == 0)
			held := random.IntN(gpusOfANode)
			p.hold(held, random.IntN(3) == 0)
			p.mu.Lock()
			p.protected[fmt.Sprintf("GPU-%d", held)] = random.IntN(3) == 0
			p.mu.Unlock()
			if p.isHealthy(gpu) {
				injected++
				p.fail(gpu, []effect{resetWorks, resetWorks, resetWorks, resetWorks, resetWorks, resetWorks, resetFails, resetsAnother, faultStays}[random.IntN(9)])
			}
			switch random.IntN(12) {
			case 0:
				kills++
				p.kill()
				s.pass(time.Duration(random.IntN(20)) * time.Second)
				p.start()
			case 1:
				reboots++
				p.reboot()
				s.pass(time.Duration(random.IntN(300)) * time.Second)
				p.start()
			case 2:
				s.server.SetFault(apiserver.Fault{Status: 503, Late: random.IntN(2) == 0,
					Only: func(r apiserver.Request) bool { return r.Resource == "leases" }})
				s.pass(time.Duration(random.IntN(60)) * time.Second)
				s.server.SetFault(apiserver.Fault{})
			}
			s.pass(time.Duration(random.IntN(600)) * time.Second)
			operate()
		}
		for _, p := range w.nodes {
			for gpu := range gpusOfANode {
				p.hold(gpu, false)
			}
		}
		for range 27 * 4 { // the budgets of a day are free again
			if len(repairable()) == 0 {
				break
			}
			s.pass(15 * time.Minute)
			operate()
		}
		for _, broken := range repairable() {
			t.Errorf("not repaired: %s", broken)
		}
		w.check()
		t.Logf("%d resets worked, %d evictions, %d stops, %d kills, %d reboots", len(w.took), w.evicted, stops, kills, reboots)
		if len(w.took) < faults/4 || kills == 0 || reboots == 0 || w.evicted == 0 {
			t.Error("too little happened")
		}
	})
}
