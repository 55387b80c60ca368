package repairer_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/repairer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// A node has the hardware, the state directory and the users of GPUs, which outlive a process.
type node struct {
	*testing.T
	dir       string
	snapshots *feed.Feed[inventory.Snapshot]
	modes     *feed.Feed[repair.Mode]

	mu     sync.Mutex // guards all following fields
	users  map[string][]string
	refuse error // of the cluster
	write  func(path string, v any) error
	// smi is what nvidia-smi does with GPUs; nil repairs them.
	smi    func(ctx context.Context, gpus []inventory.GPU) error
	resets []string // UUIDs
	// priority is that of the pods, budget refuses evictions, and evicted are the pods in the order of
	// the requests.
	priority map[string]int
	budget   error
	evicted  []string
}

// A process is a daemon on a node.
type process struct {
	*node
	repairs *repairer.Repairs
	resets  *reset.Resets
	stop    context.CancelFunc
	ended   sync.WaitGroup
}

// newNode returns a node whose GPU-a is Unhealthy with the remedy reset, and GPU-b is Healthy.
func newNode(t *testing.T) *node {
	s := inventory.Snapshot{Generation: 1}
	for i, uuid := range []string{"GPU-a", "GPU-b"} {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: uuid, Index: i, BDF: "0000:01:00." + string(rune('0'+i)),
			Health: inventory.Health{State: inventory.Healthy}})
	}
	n := &node{T: t, dir: t.TempDir(), snapshots: feed.New(s), modes: feed.New(repair.Idle),
		users: map[string][]string{}}
	n.fail("GPU-a")
	return n
}

func (n *node) setHealth(uuid string, h inventory.Health) {
	s := n.snapshots.Value()
	s.GPUs = append([]inventory.GPU(nil), s.GPUs...)
	for i := range s.GPUs {
		if s.GPUs[i].UUID == uuid {
			s.GPUs[i].Health = h
		}
	}
	s.Generation++
	n.snapshots.Publish(s)
}

func (n *node) fail(uuid string) {
	n.setHealth(uuid, inventory.Health{State: inventory.Unhealthy, Reason: "XID 95", Remedy: inventory.RemedyReset,
		Since: time.Now()})
}

func (n *node) set(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
}

// done returns the UUIDs of the GPUs that were reset, in order.
func (n *node) done() (uuids string) {
	n.set(func() { uuids = strings.Join(n.resets, " ") })
	return uuids
}

// start starts a daemon on the node.
func (n *node) start() *process {
	p := &process{node: n}
	reserve := func(_ context.Context, g inventory.GPU) (users []string, release func(), err error) {
		n.set(func() { users = n.users[g.UUID] })
		if len(users) > 0 {
			return users, nil, nil
		}
		return nil, func() {}, nil
	}
	p.resets = reset.New(reset.Options{
		Snapshots: n.snapshots, StateDir: n.dir, BootID: "boot", May: func() error { return nil }, Reserve: reserve,
		Withhold:       func(context.Context, []string, string) error { return nil },
		Clients:        func(inventory.GPU) []string { return nil },
		PreviousLeader: feed.New("").Latest,
		Run: func(ctx context.Context, gpus []inventory.GPU, _ func()) error {
			var smi func(context.Context, []inventory.GPU) error
			n.set(func() {
				smi = n.smi
				for _, g := range gpus {
					n.resets = append(n.resets, g.UUID)
				}
			})
			if smi != nil {
				return smi(ctx, gpus)
			}
			for _, g := range gpus {
				n.setHealth(g.UUID, inventory.Health{State: inventory.Healthy})
			}
			return nil
		},
	})
	p.repairs = repairer.New(repairer.Options{
		Mode: n.modes.Latest, Snapshots: n.snapshots, StateDir: n.dir, CreatesMIG: func() bool { return false },
		Users: func(ctx context.Context, g inventory.GPU) repair.Users {
			users, _, _ := reserve(ctx, g)
			u := repair.Users{Names: users}
			for _, name := range users {
				u.Pods = append(u.Pods, repair.Pod{Name: name})
			}
			return u
		},
		Rank: func(_ context.Context, pods []repair.Pod) error {
			for i := range pods {
				n.set(func() { pods[i].Priority = n.priority[pods[i].Name] })
			}
			return nil
		},
		Evict: func(_ context.Context, pod eviction.Pod) (err error) {
			n.set(func() {
				n.evicted = append(n.evicted, pod.Name)
				if err = n.budget; err == nil {
					for uuid, users := range n.users {
						n.users[uuid] = slices.DeleteFunc(slices.Clone(users), func(name string) bool { return name == pod.Name })
					}
				}
			})
			return err
		},
		Admit: func(string) (err error) {
			n.set(func() { err = n.refuse })
			return err
		},
		Reset: p.resets.Reset, Resetting: func() bool { return p.resets.Status().Value().Withholds() },
		Write: func(path string, v any) error {
			write := statefile.WriteState
			n.set(func() {
				if n.write != nil {
					write = n.write
				}
			})
			return write(path, v)
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = cancel
	p.ended.Go(func() { _ = p.repairs.Run(ctx) })
	p.ended.Go(func() { _ = p.resets.Run(ctx) })
	n.Cleanup(p.kill)
	return p
}

// kill ends the process; a reset that runs goes on until nvidia-smi ends.
func (p *process) kill() {
	p.stop()
	p.ended.Wait()
}

// until waits until something is so.
func (p *process) until(what string, is func(repair.Status) bool) repair.Status {
	p.Helper()
	for range 25 * 3600 {
		synctest.Wait()
		if s := p.repairs.Status().Value(); is(s) {
			return s
		}
		time.Sleep(time.Second)
	}
	p.Fatalf("never: %s; status %+v, resets %s", what, p.repairs.Status().Value(), p.done())
	return repair.Status{}
}

// step reports whether the first step is in a state, with a part of the reason.
func step(state repair.State, reason string) func(repair.Status) bool {
	return func(s repair.Status) bool {
		return len(s.Steps) > 0 && s.Steps[0].State == state && strings.Contains(s.Steps[0].Reason, reason)
	}
}

// attempts reports whether so many repairs have ended, and the last one with a result.
func attempts(n int, repaired bool, after string) func(repair.Status) bool {
	return func(s repair.Status) bool {
		if len(s.Attempts) != n {
			return false
		}
		last := s.Attempts[n-1]
		return !last.Ended.IsZero() && last.Repaired == repaired && strings.Contains(last.After, after)
	}
}

// TestRepair: a GPU is reset when nobody uses it and the cluster admits it, and not before.
func TestRepair(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.users["GPU-a"], n.refuse = []string{"pod a/b"}, errors.New("all slots of the cluster are in use")
		p := n.start()
		p.until("the pod is named", step(repair.Waiting, "in use: GPU 0 by pod a/b"))
		time.Sleep(time.Hour)
		n.set(func() { n.users = nil })
		if s := p.until("it waits for a slot", step(repair.Waiting, "slots")); !s.Wanted {
			t.Error("no slot is wanted")
		}
		if n.done() != "" {
			t.Errorf("reset: %s", n.done())
		}
		n.set(func() { n.refuse = nil })
		s := p.until("the GPU is repaired", attempts(1, true, "GPU 0 Healthy"))
		if n.done() != "GPU-a" || s.Repaired != 1 || s.Failed != 0 ||
			!strings.Contains(s.Attempts[0].Before, "GPU 0 Unhealthy: XID 95") {
			t.Errorf("reset: %s, status %+v", n.done(), s)
		}
		if s := p.until("nothing is left to do", func(s repair.Status) bool { return len(s.Steps) == 0 && !s.Wanted }); !s.Known {
			t.Errorf("status %+v", s)
		}
		p.until("the repair is forgotten", func(s repair.Status) bool { return len(s.Attempts) == 0 })
	})
}

// TestModes: the plan and a repair that is off reset nothing, and neither does a daemon that could not
// count its resets.
func TestModes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.modes.Publish(repair.Plan)
		p := n.start()
		if s := p.until("the plan", step(repair.Ready, "repair: idle would reset it now")); s.Wanted {
			t.Error("the plan wants a slot")
		}
		n.modes.Publish(repair.Off)
		p.until("nothing", func(s repair.Status) bool { return s.Known && s.Mode == repair.Off && len(s.Steps) == 0 })
		time.Sleep(time.Hour)
		p.kill()
		if s := p.repairs.Status().Value(); s.Known {
			t.Errorf("after its end: %+v", s)
		}
		n.modes.Publish(repair.Idle)
		n.dir = ""
		p = n.start()
		p.until("the problem", func(s repair.Status) bool { return strings.Contains(s.Problem, "--state-dir") })
		if n.done() != "" {
			t.Errorf("reset: %s", n.done())
		}
	})
}

// TestBudget: a GPU that resets do not repair is reset twice in 24 hours, however often the daemon
// starts again, and then an operator is needed.
func TestBudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.smi = func(context.Context, []inventory.GPU) error { return errors.New("Unknown Error") }
		began := time.Now()
		p := n.start()
		p.until("the first one fails", attempts(1, false, "Unknown Error"))
		p.until("it waits", step(repair.Waiting, "the next reset is at"))
		p.kill()
		p = n.start()
		p.until("the second one fails", attempts(2, false, "Unknown Error"))
		if s := p.until("an operator is needed", step(repair.Manual, "2 times in 24 hours")); s.Wanted {
			t.Error("a slot is wanted")
		}
		p.kill()
		p = n.start()
		p.until("an operator is needed", step(repair.Manual, "2 times in 24 hours"))
		p.until("it tries again on the next day", func(repair.Status) bool { return n.done() == "GPU-a GPU-a GPU-a" })
		if passed := time.Since(began); passed < 24*time.Hour {
			t.Errorf("three resets in %v", passed)
		}
	})
}

// TestKills: the process is killed while it notes the repair, while nvidia-smi runs, and before it
// notes the result. Each reset counts.
func TestKills(t *testing.T) {
	t.Parallel()
	for _, during := range []string{"the note", "the reset", "the result"} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t)
			var victim *process
			kill := func() { victim.stop() }
			over := make(chan struct{})
			defer close(over)
			switch during {
			case "the note":
				n.write = func(path string, v any) error { // the dead process does not take the note back
					err := statefile.WriteState(path, v)
					kill()
					<-over
					return err
				}
			case "the reset":
				n.smi = func(context.Context, []inventory.GPU) error { kill(); return context.Canceled }
			case "the result":
				notes := 0
				n.write = func(path string, v any) error {
					if notes++; notes == 2 {
						kill()
						return errors.New("killed")
					}
					return statefile.WriteState(path, v)
				}
				n.smi = func(context.Context, []inventory.GPU) error { return errors.New("Unknown Error") }
			}
			n.set(func() { victim = n.start() })
			victim.ended.Wait()
			synctest.Wait()
			n.set(func() { n.write, n.smi = nil, nil })
			p := n.start()
			s := p.until("the attempt is known", func(s repair.Status) bool { return len(s.Attempts) == 1 })
			if s.Attempts[0].After != "the daemon ended during the repair" || s.Attempts[0].Repaired {
				t.Errorf("killed during %s: %+v", during, s.Attempts)
			}
			p.until("it tries again", attempts(2, true, "Healthy"))
			n.fail("GPU-a")
			p.until("an operator is needed", step(repair.Manual, "2 times"))
		})
	}
}

// TestDisk: no GPU is reset while the repair cannot be noted, and a damaged history is set aside.
func TestDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		if err := os.WriteFile(filepath.Join(n.dir, repairer.File), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		n.write = func(string, any) error { return errors.New("no space left on device") }
		p := n.start()
		p.until("the file is damaged", func(s repair.Status) bool { return strings.Contains(s.Problem, "history of repairs") })
		p.until("the disk is full", step(repair.Waiting, "cannot be noted: no space left"))
		time.Sleep(time.Hour)
		if n.done() != "" {
			t.Errorf("reset: %s", n.done())
		}
		n.set(func() { n.write = nil })
		p.until("the GPU is repaired", attempts(1, true, "Healthy"))
	})
}

// TestNotTried: a reset that is refused before it begins does not count.
func TestNotTried(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.write = func(path string, v any) error { // between the decision and the reset, a pod gets the GPU
			n.set(func() { n.users["GPU-a"], n.write = []string{"pod a/b"}, nil })
			return statefile.WriteState(path, v)
		}
		p := n.start()
		p.until("it waits for the pod", step(repair.Waiting, "in use: GPU 0 by pod a/b"))
		if s := p.repairs.Status().Value(); len(s.Attempts) > 0 || n.done() != "" {
			t.Errorf("status %+v, resets %s", s, n.done())
		}
		if _, err := os.Stat(filepath.Join(n.dir, repairer.File)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the attempt is in the file: %v", err)
		}
		n.set(func() { n.users = nil })
		p.until("the GPU is repaired", attempts(1, true, "Healthy"))
	})
}

// TestEvict: the pods of a GPU are evicted with a slot of the cluster and within their disruption
// budgets, those of one GPU at a time, the least important first.
func TestEvict(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.modes.Publish(repair.Evict)
		n.fail("GPU-b")
		n.users["GPU-a"], n.users["GPU-b"] = []string{"important"}, []string{"batch"}
		n.priority = map[string]int{"important": 9}
		n.budget, n.refuse = errors.New("the disruption budget web allows none"), errors.New("all slots of the cluster are in use")
		evictions := func() (all string) {
			n.set(func() { all = strings.Join(n.evicted, " ") })
			return all
		}
		p := n.start()
		waits := func(reason string) func(repair.Status) bool {
			return func(s repair.Status) bool {
				return len(s.Steps) == 2 && s.Steps[1].State == repair.Waiting && strings.Contains(s.Steps[1].Reason, reason)
			}
		}
		if s := p.until("it waits for a slot", waits("slots")); !s.Wanted || evictions() != "" {
			t.Errorf("status %+v, evicted %q", s, evictions())
		}
		n.set(func() { n.refuse = nil })
		p.until("the budget refuses", waits("the pods are evicted: the disruption budget web allows none"))
		if s := p.repairs.Status().Value(); !s.Wanted {
			t.Error("the slot is given back")
		}
		time.Sleep(5 * time.Minute)
		if got := evictions(); strings.Contains(got, "important") || strings.Count(got, "batch") > 31 {
			t.Errorf("evicted %q", got)
		}
		p.until("it gives up for a while", waits("its pods did not end within 10m0s"))
		p.until("the other GPU gets its turn", func(repair.Status) bool { return strings.Contains(evictions(), "important") })
		n.set(func() { n.budget = nil })
		p.until("the GPU is repaired", attempts(1, true, "GPU 0 Healthy"))
		p.until("the other one too", attempts(2, true, "GPU 1 Healthy"))
		if n.done() != "GPU-a GPU-b" {
			t.Errorf("reset: %s", n.done())
		}
	})
}
