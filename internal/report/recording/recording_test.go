package recording_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/recording"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

var (
	update  = flag.Bool("update", false, "update the verdicts of the recordings in testdata")
	seed    = flag.Uint64("seed", 1, "seed of the random nodes; 0 for another each time, which is printed")
	stories = flag.Int("stories", 8, "number of random nodes")
)

// verdicts runs a Monitor during do, and returns the changes of verdicts and lists, and the Events,
// in order.
func verdicts(t *testing.T, o monitor.Options, do func(context.Context, *monitor.Monitor)) []string {
	t.Helper()
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	m := monitor.New(o)
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	var changes []string
	story := recording.Story{Options: resource.Options{MIG: resource.MIGMixed}}
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for {
			time.Sleep(time.Millisecond) // a reader surely gets only the last of several Snapshots of a moment
			s, changed := m.Snapshots().Latest()
			changes = append(changes, story.Next(s, time.Now())...)
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	do(ctx, m)
	time.Sleep(2 * time.Millisecond)
	cancel()
	<-watched
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	return changes
}

// play plays a recording to a Monitor.
func play(t *testing.T, r *recording.Recording) []string {
	t.Helper()
	dir := t.TempDir()
	if err := r.Prepare(dir); err != nil {
		t.Fatal(err)
	}
	p := r.Play()
	return verdicts(t, monitor.Options{Driver: p, Policy: r.Policy, BootID: r.BootID, StateDir: dir}, p.Follow)
}

func load(t *testing.T, path string) *recording.Recording {
	t.Helper()
	r, err := recording.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRandomNodes records simulated nodes with random faults and daemons that are killed now and
// then. Each recording leads to the original verdicts in the original order.
func TestRandomNodes(t *testing.T) {
	first := *seed
	if first == 0 {
		first = rand.Uint64()
	}
	t.Logf("run this again with -run TestRandomNodes -seed %d", first)
	for i := range *stories {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { randomNode(t, rand.New(rand.NewPCG(first, uint64(i)))) })
		})
	}
}

// A spread driver answers each call a moment later, and no two calls at the same time. The driver
// of a simulated node answers at once: in virtual time, many calls then end at the same moment, and
// a recording has no order for them. On a real node no two calls end in the same nanosecond.
type spread struct{ monitor.Driver }

// later returns after up to a millisecond.
func later() { time.Sleep(1 + rand.N(time.Millisecond)) }

func (d spread) Open(ctx context.Context) (monitor.Session, error) {
	defer later()
	s, err := d.Driver.Open(ctx)
	if err != nil {
		return nil, err
	}
	return spreadSession{s}, nil
}

type spreadSession struct{ monitor.Session }

func (s spreadSession) Scan(ctx context.Context) (inventory.Snapshot, error) {
	defer later()
	return s.Session.Scan(ctx)
}

func (s spreadSession) Read(ctx context.Context, uuid string) (inventory.Reading, error) {
	defer later()
	return s.Session.Read(ctx, uuid)
}

func (s spreadSession) Retry(ctx context.Context) error {
	defer later()
	return s.Session.Retry(ctx)
}

func (s spreadSession) LostByClose(ctx context.Context) (string, error) {
	defer later()
	return s.Session.LostByClose(ctx)
}

func (s spreadSession) Next(ctx context.Context) (inventory.Event, error) {
	defer later()
	return s.Session.Next(ctx)
}

func (s spreadSession) Close(ctx context.Context) error {
	defer later()
	return s.Session.Close(ctx)
}

func randomNode(t *testing.T, r *rand.Rand) {
	node := simulated.Node(t, []string{"dgx-h100", "a100-mig-mixed", "l4-x8", "dgx-a100"}[r.IntN(4)])
	state := t.TempDir()
	policy := health.Default()
	for range 3 { // processes of the daemon
		dir := t.TempDir()
		var recorder recording.Recorder
		if err := recorder.Start(recording.Options{Dir: dir, Policy: policy, StateDir: state, BootID: "boot"}); err != nil {
			t.Fatal(err)
		}
		driver := recorder.Driver(spread{simulated.DriverOf(node)})
		o := monitor.Options{Driver: driver, Policy: policy, StateDir: state, BootID: "boot"}
		were := verdicts(t, o, func(ctx context.Context, m *monitor.Monitor) {
			for range 12 {
				f := randomFault(r, len(node.List()))
				_ = node.Inject(f) // some faults do not fit the node
				time.Sleep(time.Duration(r.Int64N(int64(40 * time.Second))))
				if r.IntN(6) == 0 {
					uuid := node.List()[0].UUID
					_ = recording.Requests{Monitor: m, Recorder: &recorder}.Clear(ctx, uuid) // the device may be gone
					// simultaneous actions have no order
					time.Sleep(time.Duration(r.Int64N(int64(time.Second))))
				}
				if ctx.Err() != nil {
					return
				}
			}
			synctest.Wait()
			if err := recorder.Stop(); err != nil { // later calls are not recorded
				t.Error(err)
			}
		})
		t.Logf("%d verdicts", len(were))
		is := play(t, load(t, dir))
		if !slices.Equal(were, is) {
			t.Fatalf("the verdicts of the recording are others (-was, +is):\n%s", cmp.Diff(were, is))
		}
	}
}

func randomFault(r *rand.Rand, gpus int) simulator.Fault {
	gpu := fmt.Sprint(r.IntN(gpus))
	return []simulator.Fault{
		{Kind: simulator.KindXID, GPU: gpu, XID: []uint64{13, 31, 46, 48, 63, 79, 94, 95, 119}[r.IntN(9)]},
		{Kind: simulator.KindLost, GPU: gpu},
		{Kind: simulator.KindRestore, GPU: gpu},
		{Kind: simulator.KindRestore},
		{Kind: simulator.KindRemove, GPU: gpu},
		{Kind: simulator.KindAdd, GPU: gpu},
		{Kind: simulator.KindHang, GPU: gpu},
		{Kind: simulator.KindHang, GPU: gpu, Count: 1},
		{Kind: simulator.KindFail, GPU: gpu, Return: []string{"UNKNOWN", "RESET_REQUIRED", "GPU_IS_LOST"}[r.IntN(3)]},
		{Kind: simulator.KindRecoveryAction, GPU: gpu, Action: "drain-and-reset"},
		{Kind: simulator.KindECC, GPU: gpu, Count: 1},
		{Kind: simulator.KindFabric, GPU: gpu, State: "in-progress"},
		{Kind: simulator.KindDriver, Driver: "missing"},
		{Kind: simulator.KindReset, GPU: gpu},
	}[r.IntN(14)]
}

// TestRecordings plays each recording in testdata and compares the result with the file of the same
// name with the ending .verdicts.
func TestRecordings(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.jsonl")
	if err != nil || len(paths) == 0 {
		t.Fatal("no recordings", err)
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			t.Parallel()
			r := load(t, path)
			golden := strings.TrimSuffix(path, ".jsonl") + ".verdicts"
			var is string
			synctest.Test(t, func(t *testing.T) { is = strings.Join(play(t, r), "\n") + "\n" })
			if *update {
				if err := os.WriteFile(golden, []byte(is), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err, "(-update writes it)")
			}
			if is != string(want) {
				t.Errorf("the verdicts are others (-want, +is):\n%s", cmp.Diff(string(want), is))
			}
		})
	}
}

// record records a simulated node during do, in virtual time, and returns the folder.
func record(t *testing.T, o recording.Options, do func(*simulator.Node)) (dir string, were []string) {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	synctest.Test(t, func(t *testing.T) {
		node := simulated.Node(t, "dgx-h100")
		var recorder recording.Recorder
		o.Policy = health.Default()
		if err := recorder.Start(o); err != nil {
			t.Fatal(err)
		}
		driver := recorder.Driver(spread{simulated.DriverOf(node)})
		were = verdicts(t, monitor.Options{Driver: driver, Policy: o.Policy}, func(context.Context, *monitor.Monitor) {
			do(node)
			synctest.Wait()
			if err := recorder.Stop(); err != nil {
				t.Error(err)
			}
		})
	})
	return o.Dir, were
}

func inject(t *testing.T, n *simulator.Node, f simulator.Fault) {
	t.Helper()
	if err := n.Inject(f); err != nil {
		t.Fatal(err)
	}
}

// xid injects an XID and clears it.
func xid(t *testing.T) func(*simulator.Node) {
	return func(n *simulator.Node) {
		time.Sleep(10*time.Second + 1)
		inject(t, n, simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
		time.Sleep(20*time.Second + 1)
		inject(t, n, simulator.Fault{Kind: simulator.KindRestore})
		time.Sleep(time.Minute)
	}
}

// TestRedacted: the files contain no name of the node, and the verdicts are equal except for names.
func TestRedacted(t *testing.T) {
	t.Parallel()
	dir, were := record(t, recording.Options{Redact: true, BootID: "11111111-2222-3333-4444-555555555555"}, xid(t))
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	p, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range simulator.New(p).List() {
		for _, name := range []string{strings.TrimPrefix(g.UUID, "GPU-"), g.BDF} {
			if strings.Contains(string(text), name) {
				t.Errorf("the recording has %s", name)
			}
		}
	}
	synctest.Test(t, func(t *testing.T) {
		is := play(t, load(t, dir))
		if len(is) != len(were) || !strings.Contains(strings.Join(is, "\n"), "GPU 3 (GPU-00000000-0000-4000-8000-") {
			t.Errorf("the verdicts are %q, and were %q", is, were)
		}
	})
}

// TestRing: the folder stays small, and the remaining files can be played.
func TestRing(t *testing.T) {
	t.Parallel()
	dir, _ := record(t, recording.Options{Files: 3, Size: 64 << 10},
		func(*simulator.Node) { time.Sleep(20 * time.Minute) })
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 3 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.Size() > 256<<10 {
			t.Errorf("%s: %v, %v", file, info, err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		r := load(t, dir)
		if is := play(t, r); len(is) != 9 || r.Length() < time.Minute {
			t.Errorf("%s have the verdicts %q", r.Length(), is)
		}
	})
}

// TestFilesThatCannotBePlayed: each error explains the problem.
func TestFilesThatCannotBePlayed(t *testing.T) {
	t.Parallel()
	dir, _ := record(t, recording.Options{}, xid(t))
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	whole, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(whole), "\n")
	for name, test := range map[string]struct {
		text string
		want string // expected error; empty for a playable file
	}{
		"cut off":   {string(whole[:len(whole)-10]), ""},
		"empty":     {"", "the first line is not a header"},
		"garbage":   {"\x00\x01\x02garbage\n", "the first line is not a header"},
		"no header": {strings.Join(lines[1:], ""), "the first line is not a header"},
		"format 2":  {strings.Replace(lines[0], `"format":1`, `"format":2`, 1), "the file has format 2"},
		"no call":   {lines[0], "it has no driver calls"},
		"bad line":  {lines[0] + lines[1] + "{]\n" + lines[2], "line 3: invalid character"},
		"long line": {lines[0] + strings.Repeat("x", 5<<20), "longer than 4 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "x.jsonl")
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			r, err := recording.Load(path)
			switch {
			case test.want == "" && (err != nil || !r.CutOff):
				t.Errorf("the error is %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("the error is %v, and not %q", err, test.want)
			}
		})
	}
	t.Run("10 GB", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "x.jsonl")
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, 10<<30); err != nil { // sparse: no block is written
			t.Fatal(err)
		}
		if _, err := recording.Load(path); err == nil || !strings.Contains(err.Error(), "the file has 10240 MiB") {
			t.Errorf("the error is %v", err)
		}
	})
	if _, err := recording.Load(t.TempDir()); err == nil || !strings.Contains(err.Error(), "has no recording") {
		t.Errorf("of an empty folder, the error is %v", err)
	}
}

func BenchmarkRead(b *testing.B) {
	node := simulated.Node(b, "dgx-h100")
	var recorder recording.Recorder
	s, err := recorder.Driver(simulated.DriverOf(node)).Open(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	look := func(b *testing.B) {
		snapshot, err := s.Scan(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		for _, g := range snapshot.GPUs {
			if _, err := s.Read(b.Context(), g.UUID); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("off", func(b *testing.B) {
		for b.Loop() {
			look(b)
		}
	})
	if err := recorder.Start(recording.Options{Dir: b.TempDir(), Policy: health.Default()}); err != nil {
		b.Fatal(err)
	}
	b.Run("on", func(b *testing.B) {
		for b.Loop() {
			look(b)
		}
	})
	_ = recorder.Stop() // a benchmark is faster than the disk
}
