package driverswap_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clocktest "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverswap"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/gpudriver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const bootID = "a"

// A node has a stand-in of gpu-driver, and everything else that Swaps use.
type node struct {
	driver *gpudriver.Driver // nil for a node with the real gpu-driver
	socket string
	swaps  *driverswap.Swaps
	stop   func()               // ends the process that newNode has started
	clock  *clocktest.FakeClock // runs fast
	acts   acts                 // calls of gpu-driver, and acts of the process

	mu        sync.Mutex // guards all following fields
	users     []driverswap.User
	budget    error // of evictions
	slot      error
	refused   string
	released  bool   // also by a person
	byPerson  bool   // a person ran quiesce
	problem   string // of the new driver
	slotSince time.Time
	wanted    *feed.Feed[string]
	pods      policy.Pods
	idle      bool          // no GPU works
	silence   func()        // ends the stand-in of gpu-driver
	source    string        // URL of the archive of the wanted driver
	archive   string        // its digest
	opens     func(is bool) // called when the process opens or releases the driver; nil for nothing
}

// acts are in their order, without repetitions.
type acts struct {
	mu  sync.Mutex
	all []string
}

func (a *acts) note(act string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.all) == 0 || a.all[len(a.all)-1] != act {
		a.all = append(a.all, act)
	}
}

func (a *acts) list() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.all)
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{clock: clocktest.NewFakeClock(time.Now()), socket: filepath.Join(t.TempDir(), "driver.sock"),
		wanted: feed.New(gpudriver.NewVersion)}
	n.driver = gpudriver.New(gpudriver.Options{Socket: n.socket, Now: n.clock.Now, Note: n.acts.note})
	n.silence = n.driver.Serve(t)
	n.opens = func(is bool) { n.driver.SetReleased(!is) }
	n.runClock(t)
	n.stop = n.start(t)
	return n
}

// runClock lets the clock run 50 times as fast as the real one.
func (n *node) runClock(t *testing.T) {
	t.Helper()
	ended := make(chan struct{})
	t.Cleanup(func() { close(ended) })
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				n.clock.Step(50 * time.Millisecond)
			}
		}
	}()
}

// start begins a process that leads, and runs it until the returned function is called.
func (n *node) start(t *testing.T) (stop func()) {
	t.Helper()
	n.prepare()
	return n.run(t)
}

// prepare begins a process that does not lead yet.
func (n *node) prepare() {
	n.swaps = driverswap.New(driverswap.Options{
		Wanted: func() (driverswap.Wanted, <-chan struct{}) {
			version, changed := n.wanted.Latest()
			w := locked(n, func() driverswap.Wanted { return driverswap.Wanted{Pods: n.pods, Source: n.source, SHA256: n.archive} })
			w.Version = version
			return w, changed
		},
		Refused: func() string { return locked(n, func() string { return n.refused }) },
		Socket:  n.socket, BootID: bootID, Clock: n.clock,
		Admit: func(string) (time.Time, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.slotSince, n.slot
		},
		Users: func(context.Context) ([]driverswap.User, error) {
			return locked(n, func() []driverswap.User { return slices.Clone(n.users) }), nil
		},
		Evict: func(_ context.Context, p eviction.Pod) error {
			return locked(n, func() error {
				if n.budget == nil {
					n.acts.note("evict " + p.Namespace + "/" + p.Name)
					n.users = slices.DeleteFunc(n.users, func(u driverswap.User) bool { return u.Name == p.Name })
				}
				return n.budget
			})
		},
		Released: func(context.Context) (here, elsewhere bool, err error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.released && !n.byPerson, n.byPerson, nil
		},
		Release: func(context.Context) error {
			return locked(n, func() error { n.acts.note("release"); n.open(false); return nil })
		},
		Use: func(context.Context) error {
			return locked(n, func() error { n.acts.note("use"); n.open(true); return nil })
		},
		Healthy: func() []string {
			return locked(n, func() []string {
				if n.idle {
					return nil
				}
				return []string{"GPU-0", "GPU-1"}
			})
		},
		Problem: func(_ context.Context, version string, before []string) string {
			return locked(n, func() string {
				if (version == gpudriver.NewVersion || version == versionAfter) && slices.Equal(before, []string{"GPU-0", "GPU-1"}) {
					return n.problem
				}
				return "version " + version + ", before " + strings.Join(before, " ")
			})
		},
	})
}

// run runs Swaps until the returned function is called.
func (n *node) run(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.swaps.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// open is called when the process opens or releases the driver.
func (n *node) open(is bool) {
	if n.released = !is; n.opens != nil {
		n.opens(is)
	}
}

func locked[T any](n *node, do func() T) T {
	n.mu.Lock()
	defer n.mu.Unlock()
	return do()
}

// change changes the node.
func (n *node) change(do func()) { locked(n, func() int { do(); return 0 }) }

// await waits for a state whose reason has a text.
func (n *node) await(t *testing.T, state policy.State, reason string) policy.Status {
	t.Helper()
	return poll.Latest(t, string(state)+" "+reason, n.swaps.Status(), func(s policy.Status) bool {
		return s.State == state && strings.Contains(s.Reason, reason)
	})
}

func (n *node) did(t *testing.T, want ...string) {
	t.Helper()
	if got := n.acts.list(); !slices.Equal(got, want) {
		t.Errorf("acts %q, want %q", got, want)
	}
}

// TestStartDuringChange: a process that starts during a change withholds GPUs before gpu-driver has
// answered, as the journal says.
func TestStartDuringChange(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		journal string
		holds   bool
	}{
		"no journal":         {"", false},
		"no change":          {`{"version": 1, "loaded": {"digest": "aa"}}`, false},
		"damaged":            {`{"change": {"step": "unproven"`, false},
		"unproven":           {`{"change": {"step": "unproven", "bootID": "a"}}`, true},
		"unloading":          {`{"change": {"step": "unloading", "bootID": "b"}}`, true},
		"failed":             {`{"change": {"step": "failed", "bootID": "a"}}`, false},
		"the next boot":      {`{"change": {"step": "next-boot", "bootID": "a"}}`, false},
		"this boot loads it": {`{"change": {"step": "next-boot", "bootID": "b"}}`, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := &node{clock: clocktest.NewFakeClock(time.Now()), wanted: feed.New("580.1"),
				socket: filepath.Join(t.TempDir(), "driver.sock")}
			journal := filepath.Join(filepath.Dir(n.socket), driverapi.Journal)
			if err := os.WriteFile(journal, []byte(c.journal), 0o600); err != nil {
				t.Fatal(err)
			}
			n.runClock(t)
			n.prepare()
			_, begun := n.swaps.Status().Latest()
			if is := n.swaps.Status().Value().Withholds; is != c.holds {
				t.Errorf("GPUs are withheld before the first step: %t", is)
			}
			n.run(t)
			<-begun
			if s := n.await(t, policy.Waiting, "does not answer"); s.Withholds != c.holds {
				t.Errorf("GPUs are withheld while gpu-driver does not answer: %t", s.Withholds)
			}
		})
	}
}

// TestChange: a node with pods changes its driver.
func TestChange(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.change(func() { n.users = []driverswap.User{{Namespace: "team", Name: "train-0"}, {Name: "claim team/c"}} })
	s := n.await(t, policy.Waiting, "claim team/c, team/train-0")
	if !s.Withholds || !s.NeedsSlot || s.Loaded != "570.1" || s.Wanted != "580.1" {
		t.Errorf("status %+v", s)
	}
	n.change(func() { n.users, n.problem = nil, "GPU 0 is Unknown" })
	if s = n.await(t, policy.Changing, "does not work yet: GPU 0 is Unknown"); !s.Withholds {
		t.Errorf("GPUs are offered with a driver that is not proven: %+v", s)
	}
	n.change(func() { n.problem = "" })
	if s = n.await(t, policy.Done, ""); s.Withholds || s.NeedsSlot || s.Loaded != "580.1" {
		t.Errorf("status %+v", s)
	}
	n.did(t, "swap bb", "release", "load bb", "use", "confirm bb")
}

// TestEvictedPods: pods are evicted as far as their budgets allow, and a refusal is said.
func TestEvictedPods(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.change(func() {
		n.pods, n.budget = policy.Evict, errors.New("a disruption budget")
		n.users = []driverswap.User{{Namespace: "team", Name: "train-0"}}
	})
	n.await(t, policy.Changing, "team/train-0 (a disruption budget)")
	n.change(func() { n.budget = nil })
	n.await(t, policy.Done, "")
	n.did(t, "evict team/train-0", "swap bb", "release", "load bb", "use", "confirm bb")
}

// TestKilledAtEachStep: a process that starts in the middle of a change finishes it, and nothing is done
// twice.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"swap bb", "release", "load bb", "use", "confirm bb"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			poll.Until(t, at, func() bool { return slices.Contains(n.acts.list(), at) })
			n.stop()
			n.start(t)
			n.await(t, policy.Done, "")
			if c := n.driver.Status().Change; c != nil {
				t.Errorf("the change %+v is not over", c)
			}
			for _, act := range []string{"load bb", "confirm bb"} {
				if times := strings.Count(strings.Join(n.acts.list(), "\n"), act); times != 1 {
					t.Errorf("%s: %d times", act, times)
				}
			}
		})
	}
}

// TestNoSlotNoChange: a node without a slot, with a refusal or without gpu-driver keeps its GPUs.
func TestNoSlotNoChange(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.change(func() { n.refused = "the operator" })
	if s := n.await(t, policy.Blocked, "the operator"); s.Withholds || s.NeedsSlot {
		t.Errorf("status %+v", s)
	}
	n.change(func() { n.refused, n.slot = "", errors.New("all slots are in use") })
	if s := n.await(t, policy.Waiting, "all slots are in use"); s.Withholds || !s.NeedsSlot {
		t.Errorf("status %+v", s)
	}
	n.did(t)
	n.wanted.Publish("590.1")
	if s := n.await(t, policy.Blocked, "no driver 590.1"); s.NeedsSlot {
		t.Errorf("status %+v", s)
	}
	n.wanted.Publish("")
	n.await(t, policy.Off, "")
	n.did(t)
}

// TestUsersThatStay: a driver in use is left to the next boot, and the node offers its GPUs until then.
func TestUsersThatStay(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.driver.SetHolders(preflight.Holder{Kind: preflight.KindService, Name: "x.service"})
	n.driver.Edit(func(s *driverapi.Status) {
		s.Change = &driverapi.Change{From: gpudriver.OldDigest, To: gpudriver.NewDigest, Step: driverapi.StepUnloading,
			Since: n.clock.Now().Add(-policy.HoldersLimit), Note: "GPU-0,GPU-1"}
	})
	if s := n.await(t, policy.AwaitsBoot, "next boot"); s.Withholds || !s.NeedsSlot || s.Reboot == "" {
		t.Errorf("status %+v", s)
	}
	poll.Until(t, "the use of the old driver", func() bool { return locked(n, func() bool { return !n.released }) })
	n.driver.Edit(func(s *driverapi.Status) { // the node restarts
		s.Change.Step, s.LoadedDigest, s.LoadedVersion = driverapi.StepUnproven, gpudriver.NewDigest, gpudriver.NewVersion
		s.Change.Since = n.clock.Now()
	})
	n.await(t, policy.Done, "")
}

// TestFailure: a driver that does not work is changed back, the node offers its GPUs and keeps its slot
// until an operator takes it away; then the change is tried again.
func TestFailure(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.change(func() { n.problem = "CUDA fails" })
	n.driver.Edit(func(s *driverapi.Status) {
		s.LoadedDigest, s.LoadedVersion = gpudriver.NewDigest, gpudriver.NewVersion
		s.Change = &driverapi.Change{From: gpudriver.OldDigest, To: gpudriver.NewDigest, Step: driverapi.StepUnproven,
			Since: n.clock.Now().Add(-policy.ProofLimit), Note: "GPU-0,GPU-1"}
	})
	s := n.await(t, policy.Failed, "CUDA fails")
	if s.Withholds || !s.NeedsSlot || s.Loaded != "570.1" {
		t.Errorf("status %+v", s)
	}
	poll.Until(t, "the use of the old driver", func() bool { return locked(n, func() bool { return !n.released }) })
	n.did(t, "revert bb", "release", "use")
	n.change(func() { // an operator took the slot away, and the node got it again at once
		n.problem, n.slotSince = "", n.clock.Now().Add(time.Second)
	})
	n.await(t, policy.Done, "")
	n.did(t, "revert bb", "release", "use", "cancel bb", "swap bb", "release", "load bb", "use", "confirm bb")
}

// TestQuiesceOfAPerson: who runs quiesce keeps the driver released. A change waits for the end of it
// before it begins, and before the new driver is tried, and does not end it.
func TestQuiesceOfAPerson(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.change(func() { n.users = []driverswap.User{{Namespace: "a", Name: "p"}} })
	n.await(t, policy.Waiting, "waiting for the end of pods with GPUs: a/p")
	quiesce := func(is bool) { n.change(func() { n.open(!is); n.byPerson = is }) }
	quiesce(true)
	if s := n.await(t, policy.Waiting, "the driver is released by quiesce"); s.NeedsSlot || s.Withholds {
		t.Errorf("while a person has the driver: %+v", s)
	}
	quiesce(false)
	n.await(t, policy.Waiting, "a/p")
	n.driver.SetHolders(preflight.Holder{Kind: preflight.KindService, Name: "x"})
	n.change(func() { n.users, n.problem = nil, "no GPU" })
	n.await(t, policy.Changing, "in use: service x")
	n.change(func() { n.byPerson = true }) // takes the release over
	n.driver.SetHolders()
	n.await(t, policy.Waiting, "is not tried yet")
	quiesce(false)
	n.await(t, policy.Changing, "does not work yet: no GPU")
	n.change(func() { n.problem = "" })
	n.await(t, policy.Done, "")
	n.did(t, "swap bb", "release", "load bb", "confirm bb")
}

// TestSilenceInAChange: a gpu-driver that restarts in the middle of a change changes nothing for pods,
// also if nobody wants the change any more and for a new process. The change goes on to its end.
func TestSilenceInAChange(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.change(func() { n.problem = "no GPU" })
	n.await(t, policy.Changing, "does not work yet")
	n.silence()
	if s := n.await(t, policy.Waiting, "does not answer"); !s.Withholds || !s.NeedsSlot {
		t.Errorf("status %+v", s)
	}
	n.wanted.Publish("")
	n.stop()
	n.writeJournal(t)
	n.start(t)
	if s := n.await(t, policy.Waiting, "does not answer"); !s.Withholds || s.Wanted != "" {
		t.Errorf("status %+v", s)
	}
	n.driver.Serve(t)
	n.change(func() { n.problem = "" })
	poll.Latest(t, "the end", n.swaps.Status(), func(s policy.Status) bool { return s.Known && s.State == policy.Off })
	n.did(t, "swap bb", "release", "load bb", "use", "confirm bb")
}

// writeJournal writes the journal of a driver that is not proven.
func (n *node) writeJournal(t *testing.T) {
	t.Helper()
	const journal = `{"version": 1, "change": {"to": "bb", "step": "unproven"}}`
	if err := os.WriteFile(filepath.Join(filepath.Dir(n.socket), driverapi.Journal), []byte(journal), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestMissingGPUDriver: a gpu-driver that is away keeps GPUs from pods for a limited time. The time
// before the GPUs work does not count. When it is back, its change goes on, although nobody wants it.
func TestMissingGPUDriver(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.change(func() { n.problem = "no GPU" })
	n.await(t, policy.Changing, "does not work yet")
	n.change(func() { n.idle = true })
	n.silence()
	n.await(t, policy.Waiting, "does not answer")
	n.clock.Step(2 * policy.SilenceLimit)
	n.change(func() { n.idle = false })
	now := n.clock.Now()
	poll.Until(t, "GPUs are offered", func() bool {
		n.clock.Step(30 * time.Second)
		s := n.swaps.Status().Value()
		return !s.Withholds && strings.Contains(s.Reason, "has not answered for 10m0s, and GPUs are offered")
	})
	if waited := n.clock.Since(now); waited < policy.SilenceLimit/2 {
		t.Errorf("GPUs are offered after %v", waited)
	}
	n.writeJournal(t)
	n.wanted.Publish("")
	poll.Latest(t, "nothing is wanted", n.swaps.Status(), func(s policy.Status) bool { return s.State == policy.Off })
	n.driver.Serve(t)
	n.change(func() { n.problem = "" })
	poll.Until(t, "the end of the change", func() bool { return n.driver.Status().Change == nil })
}
