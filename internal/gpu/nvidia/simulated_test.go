package nvidia_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// What the package promises of time and numbers, with which the tests know when to look.
const (
	gpuPatience   = 2 * time.Second        // a call about one GPU
	shortPatience = 500 * time.Millisecond // the same while calls about two GPUs hang
	jobPatience   = 10 * time.Second       // calls about one GPU that return, in a row
	nodePatience  = 10 * time.Second       // a call about no GPU
	openPatience  = time.Minute            // a call while a session is opened
	waitStep      = 500 * time.Millisecond
	waitPatience  = 10 * time.Second
	maxPause      = 5 * time.Second // between two waits of no use
	retryGap      = time.Minute     // until events that were not permitted are asked for again
	waitBurst     = 256             // waits at once, and then one in each waitGap
	waitGap       = 10 * time.Millisecond
	maxHangs      = 2 // in a row, then a GPU is left alone

	shortestCount = 900 * time.Millisecond // between two counts of performance monitoring
	longestCount  = 10 * time.Minute
	mostPCIe      = 512e9 // bytes a second
	maxMIGDevices = 64
)

// A rig is a session with a simulated node.
type rig struct {
	t      testing.TB
	ctx    context.Context
	node   *simulator.Node
	driver *nvidia.Driver
	*nvidia.Session
}

// newNode returns the simulated node of a profile, by name or in YAML.
func newNode(t testing.TB, profile string) *simulator.Node {
	t.Helper()
	if len(profile) > 100 { // no name
		path := filepath.Join(t.TempDir(), "node.yaml")
		if err := os.WriteFile(path, []byte(profile), 0o600); err != nil {
			t.Fatal(err)
		}
		profile = path
	}
	p, err := simulator.Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	return simulator.New(p)
}

// scanWith returns what a new session finds on the node of a profile, with the files of root in
// place of the node's.
func scanWith(t testing.TB, profile string, root fs.FS, driverRoot string) inventory.Snapshot {
	t.Helper()
	var snapshot inventory.Snapshot
	simulated.InVirtualTime(t, func(t testing.TB) {
		driver := nvidia.New(nvidia.Options{Library: newNode(t, profile).NVML(), Root: root, DriverRoot: driverRoot})
		s, err := driver.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if snapshot, err = s.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	return snapshot
}

// addressOfT4 is where the profile t4 has its GPU, and what sysfs has of it is in folderOfT4.
const (
	addressOfT4 = "0000:00:04.0"
	folderOfT4  = "sys/bus/pci/devices/" + addressOfT4
)

// A hookedLibrary answers for a simulated one what a test wants: nil for what the simulator says.
type hookedLibrary struct {
	nvml.Interface
	device  func(index int, d nvml.Device) nvml.Device
	alloc   func() nvml.Return
	metrics func(*nvml.GpmMetricsGetType)
}

// hook has a library answer with some hooks.
func hook(h hookedLibrary) func(nvml.Interface) nvml.Interface {
	return func(l nvml.Interface) nvml.Interface {
		h.Interface = l
		return &h
	}
}

func (l *hookedLibrary) DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return) {
	d, ret := l.Interface.DeviceGetHandleByIndex(index)
	if l.device != nil && ret == nvml.SUCCESS {
		d = l.device(index, d)
	}
	return d, ret
}

func (l *hookedLibrary) GpmSampleAlloc() (nvml.GpmSample, nvml.Return) {
	if l.alloc != nil {
		if ret := l.alloc(); ret != nvml.SUCCESS {
			return nil, ret
		}
	}
	return l.Interface.GpmSampleAlloc()
}

func (l *hookedLibrary) GpmMetricsGet(r *nvml.GpmMetricsGetType) nvml.Return {
	ret := l.Interface.GpmMetricsGet(r)
	if l.metrics != nil {
		l.metrics(r)
	}
	return ret
}

// bubble runs a subtest beside others in a bubble. The patience with a GPU is one of real time,
// which a slow machine uses up: a job that takes too long leaves what it asks for to a later one.
func bubble(t *testing.T, name string, test func(*testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, test)
	})
}

// newRig opens a session with the node of a profile, on which faults have struck already. At the
// test's end it is closed, and nothing may be left of it.
func newRig(t testing.TB, profile string, faults ...simulator.Fault) *rig {
	t.Helper()
	return newRigWith(t, profile, func(l nvml.Interface) nvml.Interface { return l }, faults...)
}

// newRigWith is newRig with a library that answers for the node's.
func newRigWith(t testing.TB, profile string, wrap func(nvml.Interface) nvml.Interface,
	faults ...simulator.Fault) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	r := &rig{t: t, ctx: ctx, node: newNode(t, profile)}
	r.inject(faults...)
	r.driver = nvidia.New(nvidia.Options{Library: wrap(r.node.NVML()), Root: r.node.Root()})
	s, err := r.driver.Open(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	r.Session = s
	seen, err := r.Scan(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range seen.GPUs { // Open has seen and read them; from here on each call asks the driver
		_, _ = r.Read(r.ctx, g.UUID)
	}
	t.Cleanup(func() {
		cancel()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := r.Close(ctx); err != nil {
			t.Errorf("close the session: %v", err)
		}
		r.clean()
	})
	return r
}

// clean checks that nobody holds anything of the node, and that nobody used what had ended.
func (r *rig) clean() {
	r.t.Helper()
	if stats := r.node.Stats(); stats != (simulator.Stats{}) {
		r.t.Errorf("left behind on the node: %+v", stats)
	}
}

func (r *rig) inject(faults ...simulator.Fault) {
	r.t.Helper()
	for _, f := range faults {
		if err := r.node.Inject(f); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (r *rig) scan() inventory.Snapshot {
	r.t.Helper()
	snapshot, err := r.Scan(r.ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return snapshot
}

// retry has the next scan ask all that is left alone.
func (r *rig) retry() {
	r.t.Helper()
	if err := r.Retry(r.ctx); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) next() inventory.Event {
	r.t.Helper()
	event, err := r.Next(r.ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return event
}

// uuid returns the UUID of the GPU at a position of the profile.
func (r *rig) uuid(gpu int) string { return r.node.List()[gpu].UUID }
