package monitor_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

var (
	stories   = flag.Int("stories", 10, "number of random stories of faults")
	storySeed = flag.Uint64("seed", 0, "seed of the random stories; 0 for another each time, which is printed")
)

const (
	storyGPUs = 4
	// inTime is how long a GPU that has become bad may still be given to work: a poll, a look that
	// hangs in a session that is new, and the grace of those that cannot be asked.
	inTime = (4 + 60 + 10 + 5) * time.Second
	// hangTime is how long a look may take because calls hang: so much later than it was read a GPU
	// may be folded in.
	hangTime = 65 * time.Second
	// recoveryTime is how long a recovery may take to be believed: a GPU that is left alone is tried
	// once in half an hour.
	recoveryTime = 32 * time.Minute
	// maxGoroutines is how many a Monitor may have at a time: the loop, a look, samples, an event
	// wait, and calls that hang.
	maxGoroutines = 13
)

// TestRandomFaults has faults strike simulated nodes under the adapter that ships, 200 in each
// story, in no order and with nobody waiting for anything. Whatever they were: what is bad is not
// given to work for long, nothing becomes Healthy while it is bad, every verdict says why,
// goroutines stay few, and once the remedy of each verdict is applied, all GPUs are Healthy,
// and what is published is what the node has.
func TestRandomFaults(t *testing.T) {
	seed := *storySeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("run this again with -run TestRandomFaults -seed %d", seed)
	threads := countThreads(t)
	profile, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	for i := range *stories {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		driver := []string{"580.95.05", "550.54.15", "570.1"}[r.IntN(3)]
		t.Run(fmt.Sprintf("%d on %s", i, driver), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newStory(t, r, profile, driver).run(200) })
		})
		if t.Failed() {
			return
		}
	}
	if now := countThreads(t); now > threads+runtime.GOMAXPROCS(0)+8 {
		t.Errorf("%d threads, %d before", now, threads)
	}
}

// countThreads returns how many threads this process has.
func countThreads(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// A story is what happens to one node.
type story struct {
	*monitor.Monitor
	t    *testing.T
	r    *rand.Rand
	node *simulator.Node
	// bad says since when each GPU has been bad, as long as it was there or not; zero while it is not.
	bad   [storyGPUs]time.Time
	there [storyGPUs]bool
	// silent are the reasons for which nobody can be asked, as they have been since changed;
	// lastSilent is when there were some last.
	silent              silence
	changed, lastSilent time.Time
	unloaded            bool // there is no driver
	goroutines          int  // before there was a Monitor
	told                []string
}

// A silence is why nobody can be asked.
type silence struct {
	hanging  [storyGPUs]bool // there are calls that hang
	shielded [storyGPUs]bool // but they may not be made, because others fail
	unloaded bool            // there is no driver
}

// of reports whether a GPU must not be given to work because it does not answer, or nobody does.
func (s silence) of(gpu int) bool { return s.unloaded || s.hanging[gpu] && !s.shielded[gpu] }

func newStory(t *testing.T, r *rand.Rand, p simulator.Profile, driver string) *story {
	t.Helper()
	p.Driver, p.GPUs = driver, p.GPUs[:storyGPUs]
	s := &story{t: t, r: r, node: simulator.New(p), goroutines: runtime.NumGoroutine()}
	policy := health.Default()
	policy.FlapLimit = 1_000_000
	s.Monitor = monitor.New(monitor.Options{
		Driver: simulated.DriverOf(s.node), Policy: policy,
	})
	ctx, cancel := context.WithCancel(withoutLog(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		s.node.Close()
		if t.Failed() {
			return
		}
		// sets cannot be freed without a driver
		if left := s.node.Stats(); left.Sessions > 0 || left.StaleCalls > 0 || left.GPMSamples > 0 {
			t.Errorf("left behind: %+v", left)
		}
	})
	return s
}

func (s *story) run(faults int) {
	s.pass(time.Second)
	if s.r.IntN(2) == 0 {
		if err := s.SetSampling(s.t.Context(), monitor.Sampling{Every: 5 * time.Second, Blocking: true}); err != nil {
			s.t.Fatal(err)
		}
	}
	for faults > 0 {
		f := s.fault()
		if s.node.Inject(f) == nil { // else it cannot be: the GPU is unplugged
			s.tell(f)
			s.unloaded = f.Kind == simulator.KindDriver || s.unloaded && (f.Kind != simulator.KindRestore ||
				f.GPU != "")
			s.note()
			if f.Kind != simulator.KindRestore && f.Kind != simulator.KindAdd {
				faults--
			}
		}
		wait := time.Duration(s.r.IntN(3000)) * time.Millisecond
		if s.r.IntN(25) == 0 {
			wait *= 60
		}
		s.pass(wait)
		s.check()
	}
	s.repairAll()
}

// pass lets time pass, and everything that happens in it.
func (s *story) pass(d time.Duration) {
	time.Sleep(d) // the bubble's clock: nobody waits for it
	synctest.Wait()
}

// fault returns what happens next.
func (s *story) fault() simulator.Fault {
	pick := func(words ...string) string { return words[s.r.IntN(len(words))] }
	f := simulator.Fault{GPU: strconv.Itoa(s.r.IntN(storyGPUs))}
	switch f.Kind = simulator.Kind(pick(
		"xid", "xid", "xid", "event", "lost", "remove", "add", "add", "recovery-action", "fail", "hang", "ecc",
		"fabric", "remap-failure", "remap-pending", "unrepairable-memory", "sram-threshold", "throttle", "nvlink",
		"mig", "driver", "restore", "restore", "restore", "restore", "restore", "restore",
	)); f.Kind {
	case simulator.KindXID:
		f.XID = 1 + s.r.Uint64N(176)
	case simulator.KindEvent:
		f.Event = pick("double-bit-ecc", "fatal-poison", "non-fatal-poison", "gpu-unavailable",
			"dram-retirement-failure")
	case simulator.KindRecoveryAction:
		f.Action = pick("none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex")
	case simulator.KindFail:
		f.Return, f.Call = pick("UNKNOWN", "RESET_REQUIRED", "GPU_IS_LOST"), pick("", "DeviceGetMemoryInfo")
	case simulator.KindHang:
		f.Call = pick("DeviceGetFieldValues", "DeviceGetMemoryInfo", "EventSetWait")
		if f.Call == "EventSetWait" {
			f.GPU = ""
		}
	case simulator.KindFabric:
		f.State = pick("not-started", "in-progress", "completed")
	case simulator.KindMIG:
		f.Profiles = [][]string{nil, {"1g.10gb", "1g.10gb"}, {"3g.40gb", "1c.3g.40gb"}}[s.r.IntN(3)]
	case simulator.KindDriver:
		f.GPU, f.Driver = "", "missing"
	case simulator.KindRestore:
		if s.r.IntN(4) == 0 {
			f.GPU = ""
		}
	default: // takes a GPU alone
	}
	return f
}

// note brings what is bad up to what the node has now.
func (s *story) note() {
	silent := silence{unloaded: s.unloaded}
	for i, g := range s.node.List() {
		refuses := func(f string) bool { return strings.Contains(f, " answers ") }
		hangs := func(f string) bool {
			asked := f != "DeviceGetFieldValues hangs" || s.tells(565) // which an older driver is not
			return strings.HasSuffix(f, " hangs") && f != "EventSetWait hangs" && asked
		}
		gates := g.State != "present" || slices.ContainsFunc(g.Faults, refuses)
		silent.hanging[i] = slices.ContainsFunc(g.Faults, hangs)
		silent.shielded[i] = gates && silent.hanging[i]
		for _, f := range g.Faults {
			gates = gates || f == "memory cannot be repaired" && s.tells(590) ||
				(f == "row remapping failed" || f == "the fabric is not up") && len(g.MIG) == 0 ||
				strings.HasPrefix(f, "the driver asks for ") && f != "the driver asks for recover-imex" && s.tells(565)
		}
		there := g.State == "present"
		switch {
		case !gates:
			s.bad[i] = time.Time{}
		case s.bad[i].IsZero() || there != s.there[i]:
			s.bad[i] = time.Now()
		}
		s.there[i] = there
	}
	if silent != s.silent {
		s.silent, s.changed = silent, time.Now()
	}
}

// tells reports whether the driver is of a branch or newer.
func (s *story) tells(branch int) bool {
	return inventory.Driver{Version: s.Snapshots().Value().Driver.Version}.Branch() >= branch
}

// check fails unless the latest Snapshot is in order, and in accord with the node.
func (s *story) check() {
	s.t.Helper()
	now := time.Now()
	if s.silent != (silence{}) {
		s.lastSilent = now
	}
	underWay := time.Duration(0)
	if now.Sub(s.lastSilent) < 2*hangTime {
		underWay = hangTime
	}
	for i, g := range s.node.List() {
		got, there := s.Snapshots().Value().GPU(g.UUID)
		if !there {
			continue
		}
		h := got.Health
		if good := h.State == healthy; good != (h.Reason == "") || good != (h.Remedy == inventory.NoRemedy) {
			s.fail("GPU %d: %+v", i, h)
		}
		bad := s.bad[i]
		switch {
		case bad.IsZero() && !s.silent.of(i):
		case h.Allocatable() && now.Sub(bad) > inTime && now.Sub(s.changed) > inTime:
			s.fail("GPU %d is given to work, bad since %v, silence is %+v since %v: %+v", i, bad, s.silent, s.changed,
				h)
		case !bad.IsZero() && h.State == healthy && h.Since.Sub(bad) > underWay:
			s.fail("GPU %d became Healthy %v after it became bad: %+v", i, h.Since.Sub(bad), h)
		}
	}
	// NumGoroutine is quick, but can be some off, as it stops nobody: who looks at all of them sees
	// how many there are.
	if runtime.NumGoroutine()-s.goroutines > maxGoroutines {
		if all := stacks(); strings.Count(all, "\n\ngoroutine ")+1-s.goroutines > maxGoroutines {
			s.fail("too many goroutines:\n%s", all)
		}
	}
}

// repairAll restores the node and gives each GPU and MIG device that stays bad the remedies that
// its verdicts ask for, one after the other: a reset, which is seen by the GPU's being unbound and
// bound, or an operator's word in the place of all that a process does not outlive.
func (s *story) repairAll() {
	for i := range storyGPUs {
		_ = s.node.Inject(simulator.Fault{Kind: simulator.KindAdd, GPU: strconv.Itoa(i)}) // refused if it is there
	}
	if err := s.node.Inject(simulator.Fault{Kind: simulator.KindRestore}); err != nil {
		s.t.Fatal(err)
	}
	s.unloaded = false
	s.note()
	s.pass(recoveryTime)
	for range 3 {
		if !s.applyRemedies() {
			break // all that could be asked for has been given
		}
		s.pass(recoveryTime)
	}
	s.check()
	snapshot, nodes := s.Snapshots().Value(), s.node.List()
	if snapshot.Stale != "" || len(snapshot.GPUs) != len(nodes) || len(snapshot.LeftOut) > 0 {
		s.fail("%d GPUs, %q, left out %v", len(snapshot.GPUs), snapshot.Stale, snapshot.LeftOut)
	}
	for i, g := range snapshot.GPUs {
		if g.UUID != nodes[i].UUID || g.Health.State != healthy || len(g.MIGDevices) != len(nodes[i].MIG) {
			s.fail("GPU %d after the repair: %+v, the node's is %+v", i, g, nodes[i])
		}
		for j, m := range g.MIGDevices {
			if m.UUID != nodes[i].MIG[j].UUID || m.Health.State != healthy {
				s.fail("MIG device %d:%d after the repair: %+v", i, j, m)
			}
		}
	}
}

// applyRemedies applies the remedies of the current verdicts, and reports whether there was a
// verdict.
func (s *story) applyRemedies() (asked bool) {
	for i, g := range s.Snapshots().Value().GPUs {
		verdicts := map[string]inventory.Health{g.UUID: g.Health}
		for _, m := range g.MIGDevices {
			verdicts[m.UUID] = m.Health
		}
		reset := false
		for uuid, h := range verdicts {
			asked = asked || h.State != healthy
			switch h.Remedy {
			case inventory.RemedyReset, inventory.RemedyDrain:
				reset = true
			case inventory.RemedyReboot, inventory.RemedyHuman, inventory.RemedyHardware:
				if err := s.Clear(withoutLog(s.t.Context()), uuid); err != nil {
					s.t.Fatal(err)
				}
			default: // by itself
			}
		}
		if reset {
			s.reset(i)
		}
	}
	return asked
}

// reset unbinds the GPU at an index and binds it again.
func (s *story) reset(index int) {
	for _, kind := range []simulator.Kind{simulator.KindRemove, simulator.KindAdd} {
		if err := s.node.Inject(simulator.Fault{Kind: kind, GPU: strconv.Itoa(index)}); err != nil {
			s.t.Fatal(err)
		}
		s.pass(time.Minute)
	}
}

// stacks returns the stacks of all goroutines.
func stacks() string {
	text := make([]byte, 1<<20)
	return string(text[:runtime.Stack(text, true)])
}

// tell notes what happens, for fail.
func (s *story) tell(f simulator.Fault) {
	text, err := json.Marshal(f)
	if err != nil {
		s.t.Fatal(err)
	}
	s.told = append(s.told, fmt.Sprintf("%s %s", time.Now().Format("15:04:05.0"), text))
}

// fail ends the test and tells what happened last.
func (s *story) fail(format string, args ...any) {
	s.t.Helper()
	s.t.Logf("the last that happened:\n%s", strings.Join(s.told[max(0, len(s.told)-25):], "\n"))
	s.t.Fatalf(time.Now().Format("15:04:05.0 ")+format, args...)
}
