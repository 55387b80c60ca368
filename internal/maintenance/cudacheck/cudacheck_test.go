package cudacheck_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
)

var (
	wrong   = &cuda.Failure{Kind: cuda.Wrong, Text: "1 is 2"}
	passing = &cuda.Failure{Kind: cuda.Refused, Function: "cuInit", Code: cuda.SystemNotReady,
		Name: "CUDA_ERROR_SYSTEM_NOT_READY"}
	untried = &cuda.Failure{Kind: cuda.NoLibrary, Text: "no such file"}
)

// A rig is an Owner with inputs and outputs of the test.
type rig struct {
	*cudacheck.Proofs
	dir       string
	disk      *statefile.Disk
	configs   *feed.Feed[config.Config]
	snapshots *feed.Feed[inventory.Snapshot]

	mu        sync.Mutex
	fails     map[string]*cuda.Failure // by UUID
	takes     map[string]time.Duration
	busy      map[string]error
	notLead   error
	outlives  time.Duration // how long processes outlive their proof
	proofs    []string      // UUIDs, in the order of the starts
	running   int
	most      int
	reserved  map[string]bool
	checkedAt []time.Time       // when a device was reserved or refused
	told      map[string]string // why CUDA does not work, as health was told
	stop      func()
}

// snapshot returns a node with GPUs "GPU-0" and so on.
func snapshot(gpus int) inventory.Snapshot {
	s := inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580.95.05"}}
	for i := range gpus {
		s.GPUs = append(s.GPUs, inventory.GPU{
			UUID: "GPU-" + string(rune('0'+i)), Index: i, Model: "H100",
			Health: inventory.Health{State: inventory.Healthy},
		})
	}
	return s
}

func newRig(t *testing.T, dir string, gpus int) *rig {
	t.Helper()
	return &rig{
		dir: dir, configs: feed.New(config.Config{Live: config.Live{Validate: true}}), snapshots: feed.New(snapshot(gpus)),
		fails: map[string]*cuda.Failure{}, takes: map[string]time.Duration{}, busy: map[string]error{},
		reserved: map[string]bool{},
		told:     map[string]string{},
	}
}

// start has a new process run.
func (r *rig) start(t *testing.T, boot string) {
	t.Helper()
	r.Proofs = cudacheck.New(t.Context(), cudacheck.Options{
		Configs: r.configs, Snapshots: r.snapshots, StateDir: r.dir, BootID: boot, Prove: r.prove, Reserve: r.reserve,
		Disk: r.disk,
		Report: func(_ context.Context, uuid string, f *cuda.Failure) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.told, uuid)
			if f != nil {
				r.told[uuid] = f.Error()
			}
			return nil
		},
		Lead: func() error {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.notLead
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = r.Run(ctx) })
	tasks.Go(func() { _ = r.Follow(ctx) })
	r.stop = sync.OnceFunc(func() { cancel(); tasks.Wait() })
	t.Cleanup(r.stop)
}

func (r *rig) prove(ctx context.Context, uuid string) cuda.Proof {
	r.mu.Lock()
	r.proofs = append(r.proofs, uuid)
	r.running++
	r.most = max(r.most, r.running)
	f, takes := r.fails[uuid], r.takes[uuid]
	if !r.reserved[uuid] {
		panic("it is proven without being reserved")
	}
	r.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		f = &cuda.Failure{Kind: cuda.NotStarted, Text: "given up"}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running--
	ended := make(chan struct{})
	if r.outlives > 0 {
		go func() { time.Sleep(r.outlives); close(ended) }()
		return cuda.Proof{Failure: f, Ended: ended}
	}
	if f == nil || f.Kind != cuda.Hangs {
		close(ended)
	}
	return cuda.Proof{Failure: f, Took: takes, Memory: 100 << 20, Ended: ended}
}

func (r *rig) reserve(_ context.Context, d cudacheck.Device) (func(), error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkedAt = append(r.checkedAt, time.Now())
	if err := r.busy[d.UUID]; err != nil {
		return nil, err
	}
	r.reserved[d.UUID] = true
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.reserved, d.UUID)
	}, nil
}

// set changes a value used by the rig's functions.
func (r *rig) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// times returns how often each device was proven.
func (r *rig) times() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	times := map[string]int{}
	for _, uuid := range r.proofs {
		times[uuid]++
	}
	return times
}

// health returns why CUDA does not work, as health was told, by UUID.
func (r *rig) health() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.told)
}

// change publishes another Snapshot.
func (r *rig) change(edit func(*inventory.Snapshot)) {
	s := r.snapshots.Value()
	s.Generation++
	s.GPUs = slices.Clone(s.GPUs)
	edit(&s)
	r.snapshots.Publish(s)
}

func (r *rig) unproven() map[string]string { return r.Unproven(r.snapshots.Value()) }

func equal(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// TestOnce: each device is proven once per boot, driver version and reset, two at a time, and a
// following process knows the verdicts.
func TestOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 4)
		for i := range 4 {
			r.takes[snapshot(4).GPUs[i].UUID] = time.Second
		}
		r.start(t, "boot-1")
		synctest.Wait()
		equal(t, "held at first", 4, len(r.unproven()))
		time.Sleep(3 * time.Second)
		synctest.Wait()
		equal(t, "held when all are proven", map[string]string{}, r.unproven())
		equal(t, "at a time", cudacheck.AtOnce, r.most)
		equal(t, "from start to verdicts", 2*time.Second, r.Status().Value().Done)
		r.stop()

		r.start(t, "boot-1")
		equal(t, "held after a restart", map[string]string{}, r.unproven())
		time.Sleep(time.Minute)
		once := map[string]int{"GPU-0": 1, "GPU-1": 1, "GPU-2": 1, "GPU-3": 1}
		equal(t, "proofs", once, r.times())

		r.change(func(s *inventory.Snapshot) { s.GPUs[2].Reset = time.Now() })
		equal(t, "held after a reset", map[string]string{"GPU-2": "CUDA is not proven on it yet"}, r.unproven())
		time.Sleep(time.Minute)
		once["GPU-2"]++
		equal(t, "proofs after a reset", once, r.times())
		r.change(func(s *inventory.Snapshot) { s.Driver.Version = "590.1" })
		equal(t, "held with another driver", 4, len(r.unproven()))
		time.Sleep(time.Minute)
		equal(t, "proven with another driver", 0, len(r.unproven()))
		r.stop()

		r.start(t, "boot-2")
		equal(t, "held after a boot", 4, len(r.unproven()))
		r.configs.Publish(config.Config{})
		equal(t, "held when switched off", 0, len(r.unproven()))
	})
}

// TestResetKnownAfterRestart: the next process knows the reset, and the proof is void.
func TestResetKnownAfterRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 1)
		r.start(t, "boot")
		time.Sleep(time.Second)
		r.set(func() { r.busy["GPU-0"] = errors.New("in use by pod p") })
		r.change(func(s *inventory.Snapshot) { s.GPUs[0].Reset = time.Now() })
		synctest.Wait()
		r.stop()
		r.change(func(s *inventory.Snapshot) { s.GPUs[0].Reset = time.Time{} }) // unknown to the next process
		r.start(t, "boot")
		synctest.Wait()
		equal(t, "held", 1, len(r.unproven()))
		equal(t, "waits", map[string]string{"GPU-0": "in use by pod p"}, r.Status().Value().Waiting)
		r.set(func() { delete(r.busy, "GPU-0") })
		time.Sleep(2 * time.Second)
		equal(t, "held when it is free", 0, len(r.unproven()))
	})
}

// TestFailures: a failed device stays failed until a reset or an operator's command, and a failure
// that may pass is tried again.
func TestFailures(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 4)
		r.fails["GPU-1"], r.fails["GPU-2"], r.fails["GPU-3"] = wrong, passing, untried
		r.start(t, "boot")
		time.Sleep(5 * time.Second)
		equal(t, "health is told", map[string]string{"GPU-1": wrong.Error(), "GPU-2": passing.Error()}, r.health())
		equal(t, "held", map[string]string{
			"GPU-1": wrong.Error(), "GPU-2": passing.Error(), "GPU-3": "CUDA is not proven on it yet",
		}, r.unproven())
		equal(t, "waits", map[string]string{"GPU-3": untried.Error()}, r.Status().Value().Waiting)
		r.change(func(s *inventory.Snapshot) { // as the health then says
			s.GPUs[1].Health, s.GPUs[2].Health = inventory.Health{State: inventory.Unhealthy},
				inventory.Health{State: inventory.Unhealthy}
		})
		r.set(func() { clear(r.fails); r.fails["GPU-1"] = wrong })
		time.Sleep(time.Minute)
		equal(t, "held after a while", map[string]string{"GPU-1": wrong.Error()}, r.unproven())
		equal(t, "proofs", map[string]int{"GPU-0": 1, "GPU-1": 1, "GPU-2": 2, "GPU-3": 2}, r.times())
		r.stop()

		clear(r.told)
		r.start(t, "boot")
		synctest.Wait()
		equal(t, "health is told after a restart", map[string]string{"GPU-1": wrong.Error()}, r.health())
		r.set(func() { clear(r.fails) })
		r.Again("GPU-1")
		synctest.Wait()
		r.change(func(s *inventory.Snapshot) { s.GPUs[1].Health = inventory.Health{State: inventory.Healthy} })
		time.Sleep(time.Second)
		equal(t, "held after an operator's word", 0, len(r.unproven()))
		equal(t, "health", 0, len(r.health()))
	})
}

// TestPauses: a device that fails repeatedly is tried at growing intervals.
func TestPauses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 1)
		r.fails["GPU-0"] = passing
		r.start(t, "boot")
		time.Sleep(time.Hour)
		if n := r.times()["GPU-0"]; n < 12 || n > 18 {
			t.Errorf("%d tries within an hour", n)
		}
	})
}

// TestHangingDevice does not delay other devices, and is not tried again while the process of the
// try exists, even if the device was absent meanwhile.
func TestHangingDevice(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 8)
		for _, g := range snapshot(8).GPUs {
			r.takes[g.UUID] = time.Second
		}
		r.takes["GPU-0"], r.fails["GPU-0"] = cuda.Limit, &cuda.Failure{Kind: cuda.Hangs, Function: "cuInit"}
		r.start(t, "boot")
		time.Sleep(8 * time.Second)
		held := r.unproven()
		if len(held) != 1 || held["GPU-0"] == "" {
			t.Errorf("held after 8 s: %v", held)
		}
		time.Sleep(cuda.Limit)
		if why := r.unproven()["GPU-0"]; !strings.Contains(why, "cuInit does not return") {
			t.Errorf("held: %q", why)
		}
		r.Again("GPU-0")
		gone := r.snapshots.Value().GPUs[0]
		r.change(func(s *inventory.Snapshot) { s.GPUs = s.GPUs[1:] })
		time.Sleep(time.Minute)
		r.change(func(s *inventory.Snapshot) { s.GPUs = append(s.GPUs, gone) })
		time.Sleep(time.Hour)
		equal(t, "proofs", 1, r.times()["GPU-0"])
	})
}

// TestOnlyTheLeadDecides: a process that lost the lead during a proof writes nothing.
func TestOnlyTheLeadDecides(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 1)
		r.takes["GPU-0"] = time.Second
		r.start(t, "boot")
		synctest.Wait()
		r.set(func() { r.notLead = errors.New("another one leads") })
		time.Sleep(5 * time.Second)
		r.stop()
		if _, err := os.Stat(filepath.Join(dir, cudacheck.File)); err == nil {
			t.Error("it wrote")
		}
		equal(t, "held", 1, len(r.unproven()))
		// as the lead tells
		r.Records().Publish(cudacheck.Records{"GPU-0": {Boot: "boot", Driver: "580.95.05", At: time.Now()}})
		equal(t, "held when it was told", 0, len(r.unproven()))
	})
}

// TestClearWithoutProofs: clearing a device writes no file while the
// configuration wants no proofs. A process that does not lead forgets the request.
func TestClearWithoutProofs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 1)
		r.configs.Publish(config.Config{})
		r.start(t, "boot")
		r.Again("GPU-0")
		synctest.Wait()
		if _, err := os.Stat(filepath.Join(dir, cudacheck.File)); err == nil {
			t.Error("it wrote")
		}
		r.stop()

		r.configs.Publish(config.Config{Live: config.Live{Validate: true}})
		r.start(t, "boot")
		time.Sleep(time.Second)
		r.stop()
		r.set(func() { r.notLead = errors.New("another one leads") })
		r.Again("GPU-0")
		r.set(func() { r.notLead = nil })
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_ = r.Run(ctx)
		equal(t, "proofs", map[string]int{"GPU-0": 1}, r.times())
	})
}

// TestFullDisk: if a verdict cannot be written, the earlier verdict does not count for the next
// process.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 1)
		r.start(t, "boot")
		time.Sleep(time.Second)
		equal(t, "held", 0, len(r.unproven()))
		ownprocess.LimitFiles(t, 10)
		r.set(func() { r.fails["GPU-0"] = wrong })
		r.Again("GPU-0")
		time.Sleep(time.Second)
		synctest.Wait()
		ownprocess.LimitFiles(t, 0)
		equal(t, "held on a full disk", map[string]string{"GPU-0": wrong.Error()}, r.unproven())
		r.stop()
		r.set(func() { r.busy["GPU-0"] = errors.New("in use by pod p") })
		r.start(t, "boot")
		equal(t, "held by the next process", 1, len(r.unproven()))
	})
}

// TestDevicesThatAreNotTried: an unhealthy device, and all devices while the driver does not
// answer.
func TestDevicesThatAreNotTried(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "", 2)
		r.change(func(s *inventory.Snapshot) {
			s.Stale, s.GPUs[1].Health = "it does not answer", inventory.Health{State: inventory.Lost, Reason: "gone"}
		})
		r.start(t, "boot")
		time.Sleep(time.Minute)
		equal(t, "proofs of a driver that does not answer", map[string]int{}, r.times())
		r.change(func(s *inventory.Snapshot) { s.Stale = "" })
		time.Sleep(time.Minute)
		equal(t, "proofs", map[string]int{"GPU-0": 1}, r.times())
		equal(t, "waits", map[string]string{"GPU-1": "it is Lost: gone"}, r.Status().Value().Waiting)
	})
}

// TestMIGDevices are proven, but not their GPU.
func TestMIGDevices(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "", 2)
		r.change(func(s *inventory.Snapshot) {
			s.GPUs[1].MIG = inventory.MIGEnabled
			s.GPUs[1].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-0", Index: 0, GI: 1,
				Health: inventory.Health{State: inventory.Healthy}}}
		})
		r.fails["MIG-0"] = wrong
		r.start(t, "boot")
		time.Sleep(time.Second)
		equal(t, "proofs", map[string]int{"GPU-0": 1, "MIG-0": 1}, r.times())
		equal(t, "held", map[string]string{"MIG-0": wrong.Error()}, r.unproven())
	})
}

// TestADamagedFile is set aside, and the devices are proven again.
func TestADamagedFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, cudacheck.File), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir, 1)
		r.start(t, "boot")
		time.Sleep(time.Second)
		equal(t, "held", 0, len(r.unproven()))
		if _, err := os.Stat(filepath.Join(dir, cudacheck.File+".damaged")); err != nil {
			t.Error(err)
		}
	})
}

// TestSelect: devices by index and UUID, and all devices of a GPU by the GPU's index or UUID.
func TestSelect(t *testing.T) {
	t.Parallel()
	all := []cudacheck.Device{{Index: "0", UUID: "GPU-0", GPU: "GPU-0"}, {Index: "1:0", UUID: "MIG-0", GPU: "GPU-1"},
		{Index: "1:1", UUID: "MIG-1", GPU: "GPU-1"}}
	for names, want := range map[string]int{"": 3, "0": 1, "1": 2, "1:1": 1, "GPU-1": 2, "MIG-0": 1, "0,MIG-1": 2} {
		got, err := cudacheck.Select(all, strings.FieldsFunc(names, func(r rune) bool { return r == ',' }))
		if err != nil || len(got) != want {
			t.Errorf("%q: %v, %v", names, got, err)
		}
	}
	if _, err := cudacheck.Select(all, []string{"2"}); err == nil {
		t.Error("a device that is not there")
	}
}
