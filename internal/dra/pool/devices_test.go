package pool_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const patience = time.Minute // how long a test waits for what must come

// A process has Devices that run.
type process struct {
	*pool.Devices
	t         *testing.T
	snapshots *feed.Feed[inventory.Snapshot]
	owners    *feed.Feed[dra.Owners]
	configs   *feed.Feed[config.Config]
	clock     *clocktesting.FakeClock
	stop      func()
}

func start(t *testing.T, dir string, mode config.DRAMode, s inventory.Snapshot, owners dra.Owners) *process {
	t.Helper()
	p := &process{
		t: t, snapshots: feed.New(s), owners: feed.New(owners), configs: feed.New(config.Config{Live: config.Live{DRA: config.DRA{Mode: mode}}}),
		clock: clocktesting.NewFakeClock(time.Now()),
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.Devices = pool.New(pool.Options{
		StateDir: dir, Node: "node-1", Snapshots: p.snapshots, Configs: p.configs, Owners: p.owners, Clock: p.clock,
	})
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	p.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(p.stop)
	return p
}

// publishesAll are the options of a node whose GPUs are all in slices.
func publishesAll(dir string, s inventory.Snapshot) pool.Options {
	return pool.Options{
		StateDir: dir, Node: "node-1", Snapshots: feed.New(s), Owners: feed.New(dra.All(s.GPUs)),
		Configs: feed.New(config.Config{Live: config.Live{DRA: config.DRA{Mode: config.DRAAll}}}),
	}
}

// run runs Devices until the end of the bubble in which it is called: time is exact in it. What is
// to be done at once is done when it returns.
func run(t *testing.T, o pool.Options) *pool.Devices {
	t.Helper()
	ctx := t.Context()
	d := pool.New(o)
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
	return d
}

// gpus are a node with GPUs of these minors. The UUID of one is "GPU-" with a letter.
func gpus(minors map[string]int) inventory.Snapshot {
	s := inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580"}}
	for uuid, minor := range minors {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: "GPU-" + uuid, Minor: minor,
			Health: inventory.Health{State: inventory.Healthy}})
	}
	slices.SortFunc(s.GPUs, func(a, b inventory.GPU) int { return a.Minor - b.Minor })
	for i := range s.GPUs {
		s.GPUs[i].Index = i
	}
	return s
}

// text is the pool in one line: the devices with their UUIDs, or why there are none.
func text(p dra.Pool) string {
	switch {
	case p.Name == "":
		return "not known"
	case len(p.Slices) == 0:
		return "no slices"
	}
	var devices []string
	for _, slice := range p.Slices {
		for _, d := range slice.Devices {
			devices = append(devices, strings.TrimPrefix(d.Name, "gpu-")+strings.TrimPrefix(d.GPU(), "GPU-"))
		}
	}
	slices.Sort(devices)
	return fmt.Sprint(devices)
}

// until waits for a pool. Time passes meanwhile.
func (p *process) until(want string) {
	p.t.Helper()
	for deadline := time.Now().Add(patience); text(p.Pools().Value()) != want; {
		if time.Now().After(deadline) {
			p.t.Fatalf("the pool is %s, want %s", text(p.Pools().Value()), want)
		}
		<-time.After(5 * time.Millisecond)
		p.clock.Step(time.Second)
	}
}

// A device keeps the number of its GPU over restarts, whatever minors the GPUs have then, and what
// was published is known at once.
func TestNumbersStay(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	node := gpus(map[string]int{"a": 0, "b": 1})
	p := start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
	p.until("[0a 1b]")
	if err := p.SetPublished(t.Context(), map[string]bool{"GPU-a": true}); err != nil {
		t.Fatal(err)
	}
	p.stop()
	node = gpus(map[string]int{"b": 0, "a": 1, "c": 2})
	p = start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
	p.until("[0a 1b 2c]")
	if diff := cmp.Diff(map[string]bool{"GPU-a": true}, p.Published().Value()); diff != "" {
		t.Errorf("published (-want +got):\n%s", diff)
	}
	if numbers, err := pool.KnownNumbers(dir); err != nil || !maps.Equal(numbers, p.Numbers()) {
		t.Errorf("KnownNumbers() = %v, %v, want %v", numbers, err, p.Numbers())
	}
	if numbers, err := pool.KnownNumbers(t.TempDir()); err != nil || len(numbers) > 0 {
		t.Errorf("KnownNumbers() of an empty folder = %v, %v", numbers, err)
	}
	for device, want := range map[string]string{"gpu-0": "GPU-a", "gpu-1-mig-1g10gb-19-0": "GPU-b", "gpu-9": "",
		"other": ""} {
		if uuid, known := p.GPU(device); uuid != want || known != (want != "") {
			t.Errorf("%s is of %q, known %v, want %q", device, uuid, known, want)
		}
	}
	p.snapshots.Publish(gpus(map[string]int{"d": 0, "c": 1, "b": 2, "a": 3}))
	node = p.snapshots.Value()
	p.owners.Publish(dra.All(node.GPUs))
	p.until("[0a 1b 2c 3d]")
}

// A node that was never looked at, or whose owners are not known, is not one without GPUs. In a
// mode without DRA there are slices only as long as the driver has a GPU, and while the first GPUs
// come from the device plugin there is none yet.
func TestWhatIsToBePublished(t *testing.T) {
	t.Parallel()
	node := gpus(map[string]int{"a": 0, "b": 1})
	none := gpus(nil)
	lost, stale := inventory.Snapshot{Generation: 1, Stale: "no driver"}, node
	stale.Stale = "the driver does not answer"
	for name, tt := range map[string]struct {
		mode   config.DRAMode
		s      inventory.Snapshot
		owners dra.Owners
		want   string
	}{
		"all":                  {config.DRAAll, node, dra.All(node.GPUs), "[0a 1b]"},
		"what was there last":  {config.DRAAll, stale, dra.All(node.GPUs), "[0a 1b]"},
		"no GPU":               {config.DRAAll, none, dra.Owners{}, "[]"},
		"none is the driver's": {config.DRASplit, node, dra.Owners{}, "[]"},
		"all leave the plugin": {config.DRAAll, node, dra.Owners{"GPU-a": dra.LeavesPlugin, "GPU-b": dra.LeavesPlugin},
			"no slices"},
		"one leaves it yet": {config.DRAAll, node, dra.Owners{"GPU-a": dra.LeavesPlugin, "GPU-b": dra.OwnedByDRA}, "[1b]"},
		"off":               {config.DRAOff, node, dra.Owners{"GPU-a": dra.OwnedByPlugin}, "no slices"},
		"one leaves":        {config.DRAOff, node, dra.Owners{"GPU-a": dra.OwnedByPlugin, "GPU-b": dra.LeavesDRA}, "[1b]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			p := start(t, dir, tt.mode, tt.s, tt.owners)
			p.until(tt.want)
			if _, err := os.Stat(filepath.Join(dir, "dra-numbers.json")); tt.mode == config.DRAOff && tt.want == "no slices" &&
				err == nil {
				t.Error("numbers are written although nothing is published")
			}
		})
	}
	for name, p := range map[string]*process{
		"no look":   start(t, t.TempDir(), config.DRAAll, inventory.Snapshot{}, dra.Owners{}),
		"no driver": start(t, t.TempDir(), config.DRAAll, lost, dra.Owners{}),
		"no owners": start(t, t.TempDir(), config.DRAAll, node, nil),
	} {
		seen := p.snapshots.Value()
		p.snapshots.Publish(seen) // it has looked at the first one when it looks at this
		if got := text(p.Pools().Value()); got != "not known" {
			t.Errorf("%s: the pool is %s", name, got)
		}
		p.owners.Publish(dra.All(node.GPUs))
		p.snapshots.Publish(node)
		p.until("[0a 1b]")
	}
}

// While numbers cannot be written, a new GPU is not published, and those that have one are;
// afterwards it is.
func TestNumbersThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	node := gpus(map[string]int{"a": 0})
	p := start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
	p.until("[0a]")
	path := filepath.Join(dir, "dra-numbers.json")
	if err := errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "in the way"), 0o700)); err != nil {
		t.Fatal(err)
	}
	more := gpus(map[string]int{"a": 0, "b": 1})
	more.GPUs[0].Health.State = inventory.Unhealthy
	p.owners.Publish(dra.All(more.GPUs))
	p.snapshots.Publish(more)
	poll.Until(t, "the fault of the other GPU is published", func() bool {
		pool := p.Pools().Value()
		if text(pool) != "[0a]" {
			t.Fatalf("the pool is %s", text(pool))
		}
		return len(pool.Slices[0].Devices[0].Taints) > 0
	})
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	p.until("[0a 1b]")
}

// A file that cannot be read is set aside: all GPUs may be published then, also for the next
// process, until somebody knows better.
func TestDamagedFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"dra-published.json", "dra-numbers.json"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	node := gpus(map[string]int{"a": 0})
	kept := filepath.Join(dir, "dra-numbers.json.damaged")
	if err := os.MkdirAll(filepath.Join(kept, "of another"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
	for p.clock.Waiters() == 0 { // it has tried
		runtime.Gosched()
	}
	if got := text(p.Pools().Value()); got != "not known" { // the file cannot be set aside: no number is given again
		t.Errorf("the pool is %s", got)
	}
	p.stop()
	if err := os.RemoveAll(kept); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		p := start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
		p.until("[0a]")
		if problem := p.Publication().Value().Problem; p.Published().Value() != nil ||
			!strings.Contains(problem, "dra-published.json.damaged") {
			t.Errorf("published %v, problem %q", p.Published().Value(), problem)
		}
		p.stop()
	}
	p = start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
	p.until("[0a]")
	if err := p.SetPublished(t.Context(), map[string]bool{}); err != nil || p.Publication().Value().Problem != "" {
		t.Errorf("SetPublished() = %v, problem %q", err, p.Publication().Value().Problem)
	}
	p.stop()
	p = start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
	p.until("[0a]")
	if got := p.Published().Value(); got == nil || len(got) > 0 {
		t.Errorf("published %v, want nothing", got)
	}
}

// TestDamagedFileThatIsRemoved: then nothing is published, without a restart.
func TestDamagedFileThatIsRemoved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "dra-published.json")
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		d := run(t, publishesAll(dir, gpus(map[string]int{"a": 0})))
		time.Sleep(time.Minute)
		if synctest.Wait(); d.Published().Value() != nil || !d.Lost() {
			t.Errorf("published %v", d.Published().Value())
		}
		if err := os.Remove(file + ".damaged"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if synctest.Wait(); d.Published().Value() == nil || d.Lost() || d.Publication().Value().Problem != "" {
			t.Errorf("once it is removed, published %v, problem %q", d.Published().Value(), d.Publication().Value().Problem)
		}
	})
}

// TestFileThatIsGone: a process that leads again does not take the loss of the file for the news
// that nothing is published.
func TestFileThatIsGone(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	for _, published := range []map[string]bool{{"GPU-a": true}, {}} {
		synctest.Test(t, func(t *testing.T) {
			d := pool.New(publishesAll(dir, gpus(map[string]int{"a": 0})))
			lead := func(told func()) {
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() { ended <- d.Run(ctx) }()
				synctest.Wait()
				told()
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
			lead(func() {
				if err := d.SetPublished(t.Context(), published); err != nil {
					t.Error(err)
				}
			})
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			lead(func() {
				lost, problem := len(published) > 0, d.Publication().Value().Problem
				if d.Lost() != lost || (d.Published().Value() == nil) != lost || strings.Contains(problem, "is gone") != lost {
					t.Errorf("after %v, lost %v, published %v, problem %q", published, d.Lost(), d.Published().Value(), problem)
				}
				if err := d.SetPublished(t.Context(), published); err != nil || d.Lost() ||
					!maps.Equal(d.Published().Value(), published) {
					t.Errorf("once it is known: %v, lost %v, published %v", err, d.Lost(), d.Published().Value())
				}
			})
		})
	}
}

// TestFirstStart: where no process was before, nothing is published, with a state directory and
// without. Without one, no file is read or written.
func TestFirstStart(t *testing.T) {
	here := t.TempDir()
	t.Chdir(here)
	others := filepath.Join(here, "dra-numbers.json")
	if err := os.WriteFile(others, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	node := gpus(map[string]int{"a": 0})
	for _, dir := range []string{t.TempDir(), ""} {
		p := start(t, dir, config.DRAAll, node, dra.All(node.GPUs))
		p.until("[0a]")
		if got, problem := p.Published().Value(), p.Publication().Value().Problem; got == nil || len(got) > 0 ||
			problem != "" {
			t.Errorf("in %q, published %v, problem %q", dir, got, problem)
		}
		if err := p.SetPublished(t.Context(), map[string]bool{"GPU-a": true}); err != nil {
			t.Error(err)
		}
		p.stop()
	}
	if files, err := filepath.Glob(filepath.Join(here, "*")); err != nil || !slices.Equal(files, []string{others}) {
		t.Errorf("without a state directory, there are %v, %v", files, err)
	}
}

// TestBeforeDivisionsAreKnown: devices are published once it is known how their GPUs are divided.
func TestBeforeDivisionsAreKnown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		node := gpus(map[string]int{"a": 0})
		divisions := feed.New(dra.Divisions(nil))
		o := publishesAll("", node)
		o.Divisions = divisions
		d := run(t, o)
		for _, want := range []string{"not known", "[0a]"} {
			synctest.Wait()
			if got := text(d.Pools().Value()); got != want {
				t.Errorf("the pool is %s, want %s", got, want)
			}
			divisions.Publish(dra.Divisions{})
		}
	})
}

// A new GPU is published at once, and not after a further try.
func TestNewGPUs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		node := gpus(map[string]int{"a": 0})
		d := run(t, publishesAll(dir, node))
		if got := text(d.Pools().Value()); got != "[0a]" {
			t.Errorf("the pool is %s", got)
		}
	})
}

// TestTheLeadChanges: a process knows what the one that led before has written, and nothing after
// its own time. It does not write what is there.
func TestTheLeadChanges(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		node := gpus(map[string]int{"a": 0})
		both := []*pool.Devices{pool.New(publishesAll(dir, node)),
			pool.New(publishesAll(dir, node))}
		var numbers, published os.FileInfo
		for i := range 4 {
			d := both[i%2]
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- d.Run(ctx) }()
			synctest.Wait()
			if got, knows := text(d.Pools().Value()), d.Published().Value(); got != "[0a]" || knows == nil ||
				knows["GPU-a"] != (i > 0) {
				t.Errorf("%d: the pool is %s, published %v", i, got, knows)
			}
			if err := d.SetPublished(t.Context(), map[string]bool{"GPU-a": true}); err != nil {
				t.Error(err)
			}
			now, problem := os.Stat(filepath.Join(dir, "dra-numbers.json"))
			slice, err := os.Stat(filepath.Join(dir, "dra-published.json"))
			if err := errors.Join(problem, err); err != nil {
				t.Fatal(err)
			}
			if i > 0 && (!os.SameFile(now, numbers) || !os.SameFile(slice, published)) {
				t.Errorf("%d: what is there was written again", i)
			}
			numbers, published = now, slice
			cancel()
			if err := <-ended; err != nil || text(d.Pools().Value()) != "not known" || d.Published().Value() != nil {
				t.Errorf("%d: Run() = %v, then the pool is %s, published %v", i, err, text(d.Pools().Value()),
					d.Published().Value())
			}
		}
	})
}

// TestAProcessThatDoesNotLead writes nothing.
func TestAProcessThatDoesNotLead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		o := publishesAll(dir, gpus(map[string]int{"a": 0}))
		o.Lead = func() error { return errors.New("another process leads") }
		d := run(t, o)
		if err := d.SetPublished(t.Context(), map[string]bool{"GPU-a": true}); err == nil || text(d.Pools().Value()) != "[]" {
			t.Errorf("SetPublished() = %v, the pool is %s", err, text(d.Pools().Value()))
		}
		if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
			t.Errorf("written: %v, %v", left, err)
		}
	})
}

// TestWhatIsNotedLate: what is noted when the time of a process is over does not count in its next
// one. Another process has led meanwhile.
func TestWhatIsNotedLate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		node := gpus(map[string]int{"a": 0, "b": 1})
		a, b := pool.New(publishesAll(dir, node)), pool.New(publishesAll(dir, node))
		lead := func(d *pool.Devices) (known map[string]bool, stop func()) {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- d.Run(ctx) }()
			synctest.Wait()
			return d.Published().Value(), func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
		}
		note := func(d *pool.Devices, gpus map[string]bool) {
			if err := d.SetPublished(t.Context(), gpus); err != nil {
				t.Error(err)
			}
		}
		_, stop := lead(a)
		stop()
		note(a, map[string]bool{"GPU-a": true}) // the answer of the API server was under way
		_, stop = lead(b)
		note(b, map[string]bool{"GPU-a": true, "GPU-b": true})
		stop()
		known, stop := lead(a)
		defer stop()
		if !known["GPU-a"] || !known["GPU-b"] {
			t.Errorf("published %v", known)
		}
	})
}
