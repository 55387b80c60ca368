package mig_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// nodeOfThree has a GPU that changes its mode without a reset, and two that need one.
const nodeOfThree = `description: Three GPUs with multi-instance mode, and one without
driver: 590.48.01
cuda: "13.1"
gpus:
- {bdf: "0000:17:00.0", pcie: 0/0/0, model: h100-sxm5-80gb}
- {bdf: "0000:18:00.0", pcie: 0/0/1, model: a100-sxm4-40gb}
- {bdf: "0000:19:00.0", pcie: 0/0/2, model: a30-pcie-24gb}
- {bdf: "0000:1a:00.0", pcie: 0/0/3, model: l40s}
`

// An otherProcess sets MIG modes in its own sessions. It abandons a hanging call, like the daemon's
// process.
type otherProcess struct {
	node    *simulator.Node
	sets    atomic.Int64
	running atomic.Bool
}

func (p *otherProcess) Check() error {
	if p.running.Load() {
		return inventory.ErrNoAnswer
	}
	return nil
}

func (p *otherProcess) Set(ctx context.Context, uuid string, mode inventory.MIGMode) error {
	p.sets.Add(1)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	p.running.Store(true)
	ended, err := nvidia.AwaitProgram(ctx, time.Second, func() error {
		defer p.running.Store(false)
		return nvidia.SetMIGMode(nvidia.Options{Library: p.node.NVML(), Root: p.node.Root()}, uuid, mode)
	})
	if !ended {
		return inventory.ErrNoAnswer
	}
	return err
}

// A rig is a Controller on a simulated node behind the production monitor and adapter. Its kubelet
// allocates the devices of the plan.
type rig struct {
	t    *testing.T
	node *simulator.Node
	*monitor.Monitor
	desired *feed.Feed[mig.DesiredLayout]
	dir     string
	boot    string

	modes *otherProcess

	controller *mig.Controller
	built      func(*mig.Controller) // called before an Owner runs
	holds      atomic.Pointer[feed.Feed[map[string]resource.GPUHold]]
	stop       func()

	mu     sync.Mutex
	pods   map[string]string // by the UUID of the device
	absent error             // why kubelet does not answer
	dead   error             // the owner was killed: it learns nothing more
	// before and after are called around each step.
	before, after func(uuid string, step inventory.MIGStep) error
}

// onNode runs a parallel test in a bubble with a rig on nodeOfThree.
func onNode(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { test(t, newRig(t, nodeOfThree)) })
}

// newRig returns a rig without a Controller, in the bubble of the caller.
func newRig(t *testing.T, profile string) *rig {
	t.Helper()
	if len(profile) > 40 {
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
	node := simulator.New(p)
	policy := health.Default()
	policy.FlapLimit = 1_000_000
	r := &rig{
		t: t, node: node, dir: t.TempDir(), boot: "one", desired: feed.New(mig.DesiredLayout{}), pods: map[string]string{},
		stop:  func() {},
		modes: &otherProcess{node: node},
	}
	r.Monitor = monitor.New(monitor.Options{Driver: simulated.DriverOf(node), Policy: policy, Modes: r.modes})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		r.stop()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the monitor: %v", err)
		}
		node.Close()
	})
	if err := r.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

// start starts a Controller.
func (r *rig) start(change ...func(*mig.Options)) {
	r.stop()
	o := mig.Options{Desired: r.desired, Snapshots: r.Snapshots(), Driver: r, Holders: r, StateDir: r.dir, BootID: r.boot}
	for _, c := range change {
		c(&o)
	}
	owner := mig.New(o)
	r.controller = owner
	r.holds.Store(owner.Holds())
	if r.built != nil {
		r.built(owner)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(r.t.Context(), klog.Logger{}))
	ended := make(chan error, 1)
	go func() { ended <- owner.Run(ctx) }()
	r.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Errorf("the owner: %v", err)
		}
		r.stop = func() {}
	}
}

// plan returns the present plan.
func (r *rig) plan() resource.Plan {
	plan := resource.New(r.Snapshots().Value(), resource.Options{MIG: resource.MIGMixed})
	return plan.UnderGPUs(r.holds.Load().Value())
}

// offered returns the allocatable devices, by UUID.
func (r *rig) offered() map[string]resource.Device {
	devices := map[string]resource.Device{}
	for _, res := range r.plan().Resources {
		for _, d := range res.Devices {
			if d.Healthy {
				devices[d.UUID] = d
			}
		}
	}
	return devices
}

// Holders implements kubelet.Holders.
func (r *rig) Holders(_ context.Context, devices []string) ([]kubelet.HeldDevice, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var held []kubelet.HeldDevice
	for _, uuid := range devices {
		if pod, ok := r.pods[uuid]; ok {
			held = append(held, kubelet.HeldDevice{ID: uuid, Pod: pod})
		}
	}
	if r.absent != nil {
		return held, r.absent
	}
	offered := r.offered()
	for _, uuid := range devices {
		if _, still := offered[uuid]; still {
			return held, fmt.Errorf("the kubelet still offers device %s", uuid)
		}
	}
	return held, nil
}

// Partitions implements mig.Driver.
func (r *rig) Partitions(ctx context.Context, uuid string) (inventory.Partitions, error) {
	r.mu.Lock()
	dead := r.dead
	r.mu.Unlock()
	if dead != nil {
		return inventory.Partitions{}, dead
	}
	return r.Monitor.Partitions(ctx, uuid)
}

// Repartition implements mig.Driver, and checks that no step removes a device that a pod holds or
// may get.
func (r *rig) Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (int, error) {
	r.mu.Lock()
	before, after := r.before, r.after
	found, _ := r.Snapshots().Value().GPU(uuid)
	destroys := step.Action == inventory.MIGDestroyCompute || step.Action == inventory.MIGDestroyInstance
	ends := map[string]bool{uuid: true}
	for _, d := range found.MIGDevices {
		ends[d.UUID] = destroys && d.GI == step.GI
	}
	for id := range r.offered() {
		if ends[id] {
			r.t.Errorf("%s ends %s of GPU %d, which is offered", step.Action, id, found.Index)
		}
	}
	for id, pod := range r.pods {
		if ends[id] {
			r.t.Errorf("%s ends %s of GPU %d, which pod %s holds", step.Action, id, found.Index, pod)
		}
	}
	r.mu.Unlock()
	if before != nil {
		if err := before(uuid, step); err != nil {
			return 0, err
		}
	}
	id, err := r.Monitor.Repartition(ctx, uuid, step)
	if after != nil {
		if err := after(uuid, step); err != nil {
			return 0, err
		}
	}
	return id, err
}

// hold allocates a device to a pod, or releases it if pod is empty.
func (r *rig) hold(uuid, pod string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if pod == "" {
		delete(r.pods, uuid)
		return
	}
	r.pods[uuid] = pod
}

// give allocates a device to a pod if it is allocatable, and reports whether it is.
func (r *rig) give(uuid, pod string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, offered := r.offered()[uuid]
	if offered {
		r.pods[uuid] = pod
	}
	return offered
}

func (r *rig) inject(f simulator.Fault) {
	r.t.Helper()
	if err := r.node.Inject(f); err != nil {
		r.t.Fatal(err)
	}
}

// until waits for a Status for which ok returns true.
func (r *rig) until(what string, ok func(mig.Status) bool) mig.Status {
	r.t.Helper()
	deadline := time.After(10 * time.Minute)
	for {
		s, changed := r.controller.Status().Latest()
		if ok(s) {
			return s
		}
		select {
		case <-changed:
		case <-deadline:
			var phases []string
			for _, g := range s.GPUs {
				phases = append(phases, fmt.Sprintf("%d %s: %s", g.Index, g.Phase, g.Reason))
			}
			r.t.Fatalf("never %s; the state is %q: %s\n%q", what, s.State, s.Reason, phases)
		}
	}
}

// reaches waits for a state of the layout.
func (r *rig) reaches(state mig.ConfigState) mig.Status {
	r.t.Helper()
	desired := r.desired.Value()
	return r.until("reaches "+string(state), func(s mig.Status) bool {
		return s.State == state && s.Layout == desired.Layout && s.OrderNumber == desired.OrderNumber
	})
}

// makes applies a layout to all GPUs.
func (r *rig) makes(layout string) {
	r.t.Helper()
	r.desired.Publish(mig.DesiredLayout{Layout: layout})
	r.reaches(mig.StateSuccess)
}

// passes lets time pass in the bubble, with everything that happens in it.
func (r *rig) passes(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// done waits until GPUs have the layout.
func (r *rig) done(indexes ...int) {
	r.t.Helper()
	desired := r.desired.Value()
	r.until(fmt.Sprint("done: ", indexes), func(s mig.Status) bool {
		return s.Layout == desired.Layout && s.OrderNumber == desired.OrderNumber && !slices.ContainsFunc(indexes,
			func(i int) bool {
				return i >= len(s.GPUs) || s.GPUs[i].Phase != mig.PhaseDone
			})
	})
}

// devices returns the sorted sizes of the advertised MIG devices, by the index of the GPU; "GPU"
// for a whole GPU.
func (r *rig) devices() map[int][]string {
	sizes := map[int][]string{}
	offered := r.offered()
	for _, g := range r.Snapshots().Value().GPUs {
		if _, whole := offered[g.UUID]; whole {
			sizes[g.Index] = []string{"GPU"}
		}
		for _, d := range g.MIGDevices {
			if _, there := offered[d.UUID]; there {
				sizes[g.Index] = append(sizes[g.Index], d.Profile)
			}
		}
		slices.Sort(sizes[g.Index])
	}
	return sizes
}

// uuids returns the UUIDs of the MIG devices of a size on a GPU.
func (r *rig) uuids(index int, size string) []string {
	var uuids []string
	for _, g := range r.Snapshots().Value().GPUs {
		for _, d := range g.MIGDevices {
			if g.Index == index && d.Profile == size {
				uuids = append(uuids, d.UUID)
			}
		}
	}
	return uuids
}

// journal returns the text of the journal; empty if there is none.
func (r *rig) journal() string {
	text, _ := os.ReadFile(filepath.Join(r.dir, "mig.json"))
	return string(text)
}

// journalFile returns the present file of the journal.
func (r *rig) journalFile() os.FileInfo {
	r.t.Helper()
	info, err := os.Stat(filepath.Join(r.dir, "mig.json"))
	if err != nil {
		r.t.Fatal(err)
	}
	return info
}

// A mirror is a feed of Snapshots that lags behind the monitor: it keeps the first Snapshot until
// it is told otherwise.
type mirror struct {
	r *rig
	*feed.Feed[inventory.Snapshot]
}

func newMirror(r *rig) *mirror { return &mirror{r, feed.New(r.Snapshots().Value())} }

// show publishes the monitor's Snapshot without some MIG devices.
func (m *mirror) show(hides func(inventory.MIGDevice) bool) {
	s := m.r.Snapshots().Value()
	s.GPUs = slices.Clone(s.GPUs)
	for i := range s.GPUs {
		if hides != nil {
			s.GPUs[i].MIGDevices = slices.DeleteFunc(slices.Clone(s.GPUs[i].MIGDevices), hides)
		}
	}
	m.Publish(s)
}

// follow publishes each Snapshot of the monitor from now on.
func (m *mirror) follow() {
	ctx := m.r.t.Context()
	go func() {
		for {
			_, changed := m.r.Snapshots().Latest()
			m.show(nil)
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
		}
	}()
}

// parsed returns a parsed file of layouts.
func parsed(t *testing.T, text string) *layout.File {
	t.Helper()
	file, err := layout.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return &file
}
