package cluster_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const (
	leaseSpace = "gpu"
	rackLabel  = "rack"
	waveLabel  = "wave"
	migState   = "nvidia.com/mig.config.state"
)

// A rollout is a cluster of nodes that are to get another MIG layout. The test plays the mig.Controller
// of each node.
type rollout struct {
	*stage
	rules config.Rollout
	nodes []*member

	mu       sync.Mutex // guards the following fields
	busy     map[string]*member
	most     int      // how many nodes were busy at the same time
	problems []string // what must not be
	// victims has a node whose process has just written a slot.
	victims chan *member
}

// A member is a node of a rollout.
type member struct {
	*process
	name, rack, wave string
	bad              atomic.Bool // its change fails
	status           *feed.Feed[mig.Status]
	end              context.CancelFunc
	ended            sync.WaitGroup
}

// rollOut returns a rollout whose nodes have the labels that label returns by their number.
func (s *stage) rollOut(rules config.Rollout, count int, label func(i int) (rack, wave string)) *rollout {
	s.Helper()
	rules.Namespace = leaseSpace
	r := &rollout{stage: s, rules: rules, busy: map[string]*member{}, victims: make(chan *member, 1)}
	for i := range count {
		m := &member{name: fmt.Sprintf("n%02d", i), status: feed.New(mig.Status{Layout: "old", State: mig.StateSuccess})}
		m.rack, m.wave = label(i)
		if err := s.server.ChangeNode(m.name, func(n *corev1.Node) {
			n.Labels = map[string]string{rackLabel: m.rack, waveLabel: m.wave, migState: "success"}
			for key, value := range n.Labels {
				if value == "" {
					delete(n.Labels, key)
				}
			}
		}); err != nil {
			s.Fatal(err)
		}
		r.nodes = append(r.nodes, m)
		r.start(m)
	}
	return r
}

// start starts a process of a node, and the part that the test plays.
func (r *rollout) start(m *member) {
	p := r.new(config.Config{Live: config.Live{MIG: config.MIG{Enabled: true, Budget: true}, Rollout: r.rules}})
	p.Startup.NodeName = m.name
	p.configure(func(c *config.Config) { c.NodeName = m.name })
	p.MIGChoice = choice.New(r.Context(), p.Configs, r.TempDir(), func() error { return nil }, undivided, clock.RealClock{})
	p.MIG = m.status
	p.requested = func(verb, resource string, _ int) {
		if resource == "leases" && verb != http.MethodGet {
			select {
			case r.victims <- m:
			default:
			}
		}
	}
	m.process = p
	p.start()
	ctx, cancel := context.WithCancel(context.Background())
	m.end = cancel
	m.ended.Go(func() { r.divide(ctx, m) })
	r.Cleanup(func() { r.kill(m) })
}

// kill ends a process; the node keeps what it has.
func (r *rollout) kill(m *member) {
	m.end()
	m.ended.Wait()
	m.stop()
}

// divide changes the layout of a node to the wanted one, as the mig.Controller does.
func (r *rollout) divide(ctx context.Context, m *member) {
	sleep := func(d time.Duration) bool {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(d):
			return true
		}
	}
	for {
		begun := slices.Contains(r.changing(), m.name)
		switch s := m.status.Value(); {
		case s.State == mig.StateSuccess:
			if _, changed := m.status.Latest(); !feed.WaitAny(ctx, changed) {
				return
			}
			continue
		case !begun:
			if err := m.cluster.RequestSlot("MIG layout new"); err != nil {
				m.status.Publish(mig.Status{Layout: "new", State: mig.StatePending, Reason: err.Error()})
				if !sleep(time.Second) {
					return
				}
				continue
			}
			r.begin(m)
		}
		if !sleep(20*time.Second + rand.N(time.Minute)) {
			return
		}
		if m.bad.Load() {
			m.status.Publish(mig.Status{Layout: "new", State: mig.StateFailed, Reason: "the driver refused it"})
			if !sleep(5 * time.Minute) {
				return
			}
			continue
		}
		r.finish(m)
		r.mark(m, "success")
		m.status.Publish(mig.Status{Layout: "new", State: mig.StateSuccess})
	}
}

// changing returns the nodes that change.
func (r *rollout) changing() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.busy))
}

// finish notes that a node does not change any more.
func (r *rollout) finish(m *member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.busy, m.name)
}

// begin notes that a node changes, and what must not be.
func (r *rollout) begin(m *member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, other := range r.busy {
		if m.rack != "" && other.rack == m.rack {
			r.problems = append(r.problems, fmt.Sprintf("%s and %s change in rack %s", m.name, other.name, m.rack))
		}
	}
	for _, other := range r.nodes {
		if other.wave < m.wave && other.status.Value().State != mig.StateSuccess {
			r.problems = append(r.problems, fmt.Sprintf("%s of wave %s changes before %s", m.name, m.wave, other.name))
		}
	}
	r.busy[m.name] = m
	r.most = max(r.most, len(r.busy))
}

// mark sets the state on the Node, as the task for the label does.
func (r *rollout) mark(m *member, state string) {
	if err := r.server.ChangeNode(m.name, func(n *corev1.Node) { n.Labels[migState] = state }); err != nil {
		r.Error(err)
	}
}

// want has all nodes want the new layout.
func (r *rollout) want() {
	for _, m := range r.nodes {
		r.mark(m, "pending")
		m.status.Publish(mig.Status{Layout: "new", State: mig.StatePending})
	}
}

// done returns how many nodes have the new layout.
func (r *rollout) done() int {
	n := 0
	for _, m := range r.nodes {
		if s := m.status.Value(); s.Layout == "new" && s.State == mig.StateSuccess {
			n++
		}
	}
	return n
}

// slots returns the slots in use, as NODE STATE.
func (r *rollout) slots() []string {
	var all []string
	for _, l := range r.server.Leases(leaseSpace) {
		holder := ""
		if l.Spec.HolderIdentity != nil {
			holder = *l.Spec.HolderIdentity
		}
		all = append(all, holder+" "+l.Annotations["gpu-device-plugin.github.io/change.state"])
	}
	return all
}

// requests returns how often the nodes have read or written slots.
func (r *rollout) requests() int {
	n := 0
	for request, count := range r.server.Requests() {
		if request.Resource == "leases" {
			n += count
		}
	}
	return n
}

// check fails the test if more nodes changed than may, or others did at the wrong time.
func (r *rollout) check(most int) {
	r.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.most > most || len(r.problems) > 0 {
		r.Errorf("%d nodes changed at the same time, want at most %d; %v", r.most, most, r.problems)
	}
}

func noLabels(int) (rack, wave string) { return "", "" }

// 30 nodes in ten racks and three waves change, three at a time.
func TestSlots(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 3, TopologyLabel: rackLabel, WaveLabel: waveLabel, WaveSoak: 2 * time.Minute}, 30,
			func(i int) (rack, wave string) { return fmt.Sprint("r", i%10), fmt.Sprint(i % 3) })
		s.pass(time.Minute)
		before := s.server.Writes()
		r.want()
		began := time.Now()
		s.until("all nodes have the layout", func() bool { return r.done() == 30 })
		t.Logf("it took %v", time.Since(began).Round(time.Second))
		s.until("all slots are free", func() bool { return len(r.slots()) == 0 })
		r.check(3)
		if r.most < 2 {
			t.Errorf("%d nodes changed at the same time", r.most)
		}
		// the test itself writes the label twice for each node; a slot that is given back at once makes two more
		if writes := s.server.Writes() - before - 60; writes > 30*6 {
			t.Errorf("%d writes for 30 nodes", writes)
		}
		before = r.requests()
		s.pass(10 * time.Minute)
		if idle := r.requests() - before; idle > 0 {
			t.Errorf("%d requests of idle nodes", idle)
		}
	})
}

// A bad change stops after as many nodes as there are slots. Another try frees a slot, and a repaired
// node gives its slot back.
func TestABadChangeStops(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 4}, 20, noLabels)
		for _, m := range r.nodes {
			m.bad.Store(true)
		}
		r.want()
		s.until("four nodes have failed", func() bool { return strings.Count(strings.Join(r.slots(), ","), "failed") == 4 })
		s.pass(time.Hour)
		r.check(4)
		if touched := r.changing(); len(touched) != 4 {
			t.Errorf("nodes %v were touched, want 4", touched)
		}
		waiting := 0
		for _, m := range r.nodes {
			if reason := m.status.Value().Reason; strings.Contains(reason, "waiting for a slot of the cluster: all slots of the cluster"+
				" are in use; failed: n") && strings.Contains(reason, "kubectl gpu rollout retry NODE") {
				waiting++
			}
		}
		if waiting != 16 {
			t.Errorf("%d nodes say why they wait, want 16", waiting)
		}
		for _, m := range r.nodes { // repaired
			m.bad.Store(false)
		}
		s.until("all nodes have the layout", func() bool { return r.done() == 20 })
		s.until("all slots are free", func() bool { return len(r.slots()) == 0 })
		r.check(4)
	})
}

// An operator pauses the cluster, takes the slot of a node away, and the API server deletes that of
// a Node that is deleted.
func TestSlotsThatOthersChange(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 1}, 2, noLabels)
		if err := s.server.Add("leases", &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
			Name: slots.Paused, Namespace: leaseSpace, Labels: map[string]string{"gpu-device-plugin.github.io/slot": "true"},
			Annotations: map[string]string{"gpu-device-plugin.github.io/change.reason": "holidays"},
		}}); err != nil {
			t.Fatal(err)
		}
		r.want()
		s.until("all wait", func() bool {
			return strings.Contains(r.nodes[0].status.Value().Reason, "are paused: holidays; continue with kubectl gpu rollout resume")
		})
		if err := s.server.DeleteLease(leaseSpace, slots.Paused); err != nil {
			t.Fatal(err)
		}
		s.until("a node changes", func() bool { return len(r.slots()) == 1 && r.slots()[0][4:] == "working" })
		first, other := r.nodes[0], r.nodes[1]
		if slices.Contains(r.changing(), other.name) {
			first, other = other, first
		}
		r.kill(first) // the node does not come back
		if err := s.server.DeleteLease(leaseSpace, slots.Name(0)); err != nil {
			t.Fatal(err)
		}
		r.finish(first)
		s.until("the other node has the layout", func() bool { return other.status.Value().State == mig.StateSuccess })
		r.check(1)
		r.start(first)
		s.until("the first has it, too", func() bool { return r.done() == 2 })
		s.until("all slots are free", func() bool { return len(r.slots()) == 0 })
		if first.logged("Took a slot of the cluster") != 1 || first.logged("Gave a slot of the cluster back") != 1 {
			t.Errorf("the log has %s", first.log.GetBuffer())
		}
	})
}

// Agents are killed at each kind of write and start again, while the API server fails now and then:
// never do more nodes change than may, and no slot is lost.
func TestSlotsSurviveKills(t *testing.T) {
	const nodes, most, seeds = 12, 3, 3
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			onStage(t, func(s *stage) {
				random := rand.New(rand.NewPCG(uint64(seed), 1))
				r := s.rollOut(config.Rollout{Slots: most, TopologyLabel: rackLabel}, nodes,
					func(i int) (rack, wave string) { return fmt.Sprint("r", i%6), "" })
				r.want()
				kills := 0
				for range 4000 {
					if r.done() == nodes {
						break
					}
					if random.IntN(30) == 0 {
						s.server.SetFault(apiserver.Fault{Status: 503, Late: random.IntN(2) == 0,
							Only: func(request apiserver.Request) bool { return request.Resource == "leases" }})
						s.pass(time.Duration(random.IntN(20)) * time.Second)
						s.server.SetFault(apiserver.Fault{})
					}
					select {
					case m := <-r.victims:
						r.kill(m)
						s.pass(time.Duration(random.IntN(10)) * time.Second)
						r.start(m)
						kills++
					case <-time.After(time.Second):
					}
				}
				s.until("all nodes have the layout", func() bool { return r.done() == nodes })
				s.until("all slots are free", func() bool { return len(r.slots()) == 0 })
				r.check(most)
				if kills < 10 {
					t.Errorf("%d kills", kills)
				}
			})
		})
	}
}

// A slot that was taken and not yet compared with the others is compared by the next process; a
// budget that is switched off gives the slot back.
func TestSlotOfAnEarlierProcess(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 2, TopologyLabel: rackLabel}, 2,
			func(int) (rack, wave string) { return "r", "" })
		m := r.nodes[0]
		s.server.SetFault(apiserver.Fault{Status: 503, Only: func(request apiserver.Request) bool {
			return request.Resource == "leases" && request.Verb == "update"
		}})
		m.status.Publish(mig.Status{Layout: "new", State: mig.StatePending})
		s.until("it has a slot", func() bool { return cmp.Equal(r.slots(), []string{"n00 checking"}) })
		r.kill(m)
		s.server.SetFault(apiserver.Fault{})
		r.start(m)
		s.until("it changes", func() bool { return cmp.Equal(r.slots(), []string{"n00 working"}) })
		s.server.SetFault(leaseFault(http.StatusServiceUnavailable, "delete", false))
		m.configure(func(c *config.Config) { c.MIG.Budget = false })
		s.pass(time.Minute) // nothing needs the watch of the Node, which ends
		s.server.SetFault(apiserver.Fault{})
		s.until("the slot is free", func() bool { return len(r.slots()) == 0 })
		synctest.Wait()
	})
}

// leaseFault returns an answer of the API server to a kind of request for Leases.
func leaseFault(status int, verb string, late bool) apiserver.Fault {
	return apiserver.Fault{Status: status, Late: late, Only: func(request apiserver.Request) bool {
		return request.Resource == "leases" && request.Verb == verb
	}}
}

// A new process does not give the slot back before it knows whether the change is done.
func TestSlotOfAChangeThatIsNotReadYet(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 1}, 1, noLabels)
		m := r.nodes[0]
		r.want()
		s.until("it changes", func() bool { return cmp.Equal(r.changing(), []string{"n00"}) })
		r.kill(m)
		m.status = feed.New(mig.Status{})
		r.start(m)
		s.pass(10 * time.Second)
		if got := r.slots(); !cmp.Equal(got, []string{"n00 working"}) {
			t.Errorf("slots: %v", got)
		}
		s.until("the slot is free", func() bool { return len(r.slots()) == 0 && r.done() == 1 })
		m.status.Publish(mig.Status{Layout: "new", State: mig.StatePending})
		s.until("it changes", func() bool { return cmp.Equal(r.changing(), []string{"n00"}) })
		r.kill(m)
		m.status.Publish(mig.Status{Resume: true}) // no layout is wanted any more
		m.process.start()
		s.until("the slot is free", func() bool { return len(r.slots()) == 0 })
	})
}

// A slot is given back also if the API server refused a write, or created a Lease without an answer.
func TestSlotAfterAWriteThatFailed(t *testing.T) {
	for _, test := range []struct {
		name  string
		begun bool // the change has begun
		fault apiserver.Fault
	}{
		{"somebody else has written the Lease", true, leaseFault(http.StatusConflict, "update", false)},
		{"the Lease was not found", true, leaseFault(http.StatusNotFound, "update", false)},
		{"the Lease was created without an answer", false, leaseFault(http.StatusServiceUnavailable, "create", true)},
	} {
		t.Run(test.name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				r := s.rollOut(config.Rollout{Slots: 2}, 1, noLabels)
				m := r.nodes[0]
				if !test.begun {
					s.server.SetFault(test.fault)
				}
				r.want()
				s.until("it has a slot", func() bool { return len(r.slots()) == 1 && (!test.begun || r.slots()[0] == "n00 working") })
				if test.begun {
					s.server.SetFault(test.fault)
					m.status.Publish(mig.Status{Layout: "new", State: mig.StateFailed, Reason: "the driver refused it"})
					s.pass(100 * time.Millisecond)
				}
				r.finish(m)
				m.status.Publish(mig.Status{Layout: "new", State: mig.StateSuccess})
				s.pass(time.Second)
				s.server.SetFault(apiserver.Fault{})
				s.until("the slot is free", func() bool { return len(r.slots()) == 0 })
			})
		})
	}
}

// A change ends in the namespace in which it began, also if its node gets an invalid wave.
func TestSlotOfAnotherConfiguration(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 1, WaveLabel: waveLabel}, 1, noLabels)
		m := r.nodes[0]
		r.want()
		s.until("it changes", func() bool { return cmp.Equal(r.slots(), []string{"n00 working"}) })
		m.bad.Store(true)
		m.configure(func(c *config.Config) { c.Rollout.Namespace = "other" })
		if err := s.server.ChangeNode(m.name, func(n *corev1.Node) { n.Labels[waveLabel] = "01" }); err != nil {
			t.Fatal(err)
		}
		s.until("it has failed", func() bool { return cmp.Equal(r.slots(), []string{"n00 failed"}) })
		renewed := func() time.Time { return s.server.Leases(leaseSpace)[0].Spec.RenewTime.Time }
		before := renewed()
		s.pass(5 * time.Minute)
		if !renewed().After(before) {
			t.Error("the slot is not renewed")
		}
		m.bad.Store(false)
		s.until("the slot is free", func() bool { return len(r.slots()) == 0 && len(s.server.Leases("other")) == 0 })
		m.status.Publish(mig.Status{Layout: "new", State: mig.StatePending})
		s.until("its wave is refused", func() bool {
			return strings.Contains(m.status.Value().Reason, `label wave of the node is "01"; the wave must be a number from 0 to 99`)
		})
	})
}

// Leases that somebody made by hand: without the label, without a node, a second one of the node.
func TestSlotsMadeByHand(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 2}, 1, noLabels)
		m := r.nodes[0]
		node, err := s.server.Node(m.name)
		if err != nil {
			t.Fatal(err)
		}
		add := func(name string, change func(*coordinationv1.Lease)) {
			l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: leaseSpace,
				Labels: map[string]string{"gpu-device-plugin.github.io/slot": "true"}}}
			change(l)
			if err := s.server.Add("leases", l); err != nil {
				t.Fatal(err)
			}
		}
		add("gpu-change-0", func(l *coordinationv1.Lease) { l.Labels = nil })
		add("gpu-change-99999999999", func(l *coordinationv1.Lease) {
			l.Annotations = map[string]string{"gpu-device-plugin.github.io/change.wave": "x"}
		})
		r.want()
		s.until("it waits", func() bool {
			return strings.Contains(m.status.Value().Reason, "changing: unknown (Lease gpu-change-0), unknown (Lease gpu-change-99999999999)")
		})
		if err := s.server.DeleteLease(leaseSpace, "gpu-change-99999999999"); err != nil {
			t.Fatal(err)
		}
		s.until("it changes", func() bool { return slices.Contains(r.slots(), "n00 working") })
		add("gpu-change-00", func(l *coordinationv1.Lease) {
			l.Spec.HolderIdentity = &m.name
			l.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: m.name, UID: node.UID}}
		})
		s.until("its slots are free", func() bool { return r.done() == 1 && len(r.slots()) == 1 })
	})
}

// A missing namespace is not a slot that another node took.
func TestSlotsWithoutNamespace(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 2}, 1, noLabels)
		s.server.SetFault(leaseFault(http.StatusNotFound, "create", false))
		r.want()
		s.until("the reason is the answer", func() bool {
			return strings.Contains(r.nodes[0].status.Value().Reason, "write Lease gpu-change-0: the API server answered 404")
		})
	})
}

// Nodes that wait while all slots are in use do not read the nodes of earlier waves.
func TestWaitingNodesReadFewNodes(t *testing.T) {
	onStage(t, func(s *stage) {
		r := s.rollOut(config.Rollout{Slots: 1, WaveLabel: waveLabel, WaveSoak: time.Minute}, 5,
			func(int) (rack, wave string) { return "", "1" })
		for _, m := range r.nodes {
			m.bad.Store(true)
		}
		r.want()
		s.until("a node has failed", func() bool { return strings.Contains(strings.Join(r.slots(), ""), "failed") })
		lists := func() int { return s.server.Requests()[apiserver.Request{Verb: "list", Resource: "nodes"}] }
		before := lists()
		s.pass(time.Hour)
		const watches = 5 * 20 // each watch begins with a list, and ends after three minutes of silence
		if n := lists() - before; n > watches+20 {
			t.Errorf("%d lists of nodes in an hour", n)
		}
		r.check(1)
	})
}
