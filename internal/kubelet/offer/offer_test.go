package offer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A resource whose devices disappear keeps its server for the day they return. One that the
// configuration no longer has loses it.
func TestOnlyAConfigurationRetiresAResource(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	mark := n.Mark()
	n.snapshots.Publish(inventory.Snapshot{Generation: 2})
	n.until(t, " | ", gpu)
	n.snapshots.Publish(inventory.Snapshot{Generation: 3, GPUs: gpus().GPUs})
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	for _, e := range n.Events(mark) {
		if e.Kind == standin.StreamEnded || e.Kind == standin.Registered {
			t.Errorf("%v although the configuration is the same", e)
		}
	}
	n.configs.Publish(shared(gpu + ".shared"))
	n.until(t, "GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 | ", gpu, gpu+".shared")
	retired := func(left int) func() bool {
		return func() bool { n.clock.Step(time.Second); return len(n.daemon.Status()) == left }
	}
	poll.Until(t, "the resource that the configuration no longer has is retired", retired(1))
	n.snapshots.Publish(inventory.Snapshot{Generation: 4})
	n.until(t, " | ", gpu+".shared")
	c := shared(gpu + ".shared")
	c.DRA.Mode = config.DRASplit
	n.configs.Publish(c)
	poll.Until(t, "the resource that has no devices with the configuration's new mode is retired", retired(0))
	if w := n.daemon.Offered().Value().Warnings; slices.ContainsFunc(w,
		func(w string) bool { return strings.Contains(w, "it is not known") }) {
		t.Errorf("warnings %q although kubelet's checkpoint can be read", w)
	}
}

// A slowDisk writes no file before it is released.
type slowDisk struct {
	release chan struct{}
	mu      sync.Mutex
	written map[string]bool
}

func (d *slowDisk) Apply(_ inventory.Snapshot, p resource.Plan, _ config.Config) error {
	<-d.release
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range p.Resources {
		for _, device := range r.Devices {
			d.written[device.UUID] = true
		}
	}
	return nil
}

func (d *slowDisk) Lacks(_ inventory.Snapshot, p resource.Plan, _ config.Config) (lacks []resource.Hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range p.Resources {
		for _, device := range r.Devices {
			if !d.written[device.UUID] {
				lacks = append(lacks, resource.Hold{UUID: device.UUID, Reason: "no file", Hidden: true})
			}
		}
	}
	return lacks
}

func TestNewDevicesWaitForTheirCDISpecsAndHealthDoesNot(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	disk := &slowDisk{release: make(chan struct{}, 2), written: map[string]bool{"GPU-0": true}}
	t.Cleanup(func() { close(disk.release) })
	n.specs = disk
	c := whole()
	c.Edits.Strategies = []containeredits.Strategy{containeredits.CDICRI}
	n.configs.Publish(c)
	n.start(t)
	n.await(t, "GPU-0 | ", gpu)
	sick := gpus()
	sick.Generation = 2
	sick.GPUs[0].Health = inventory.Health{State: inventory.Unhealthy, Reason: "XID 48"}
	n.snapshots.Publish(sick)
	n.await(t, " | GPU-0", gpu)
	disk.release <- struct{}{}
	disk.release <- struct{}{}
	n.await(t, "GPU-1 | GPU-0", gpu)
}

// A fullDisk refuses to write files while it is full.
type fullDisk struct {
	slowDisk
	full atomic.Bool
}

func (d *fullDisk) Apply(s inventory.Snapshot, p resource.Plan, c config.Config) error {
	if d.full.Load() {
		return errors.New("no space left on device")
	}
	return d.slowDisk.Apply(s, p, c)
}

// TestADiskThatRefusesFilesTakesNoDeviceAway: a device list strategy whose files cannot be written
// leaves the one before in force.
func TestADiskThatRefusesFilesTakesNoDeviceAway(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	disk := &fullDisk{slowDisk: slowDisk{release: closed(), written: map[string]bool{}}}
	disk.full.Store(true)
	n.specs = disk
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	mark := n.Mark()
	c := whole()
	c.Edits.Strategies = []containeredits.Strategy{containeredits.CDICRI}
	n.configs.Publish(c)
	refused := func(p resource.Plan) bool {
		return slices.ContainsFunc(p.Warnings, func(w string) bool { return strings.HasSuffix(w, "by the new one: no file") })
	}
	n.offers(t, refused)
	disk.full.Store(false)
	c.Edits.GDRCopy = containeredits.Always // another request, which is tried at once
	n.configs.Publish(c)
	n.offers(t, func(p resource.Plan) bool { return len(p.Resources) == 1 && !refused(p) })
	for _, e := range n.Events(mark) {
		if e.Kind == standin.Listed && len(e.Devices) != 2 {
			t.Errorf("a device was taken away: %v", e.Devices)
		}
	}
}

// daemons are MPS control daemons, which are asked for the resources that are followed.
type daemons struct {
	followed *feed.Feed[[]string]
	unready  *feed.Feed[map[string]string]
	asked    atomic.Bool
}

func (d *daemons) Follow(resources []string)              { d.followed.Publish(resources) }
func (d *daemons) HasResult(string) bool                  { return d.asked.Load() }
func (d *daemons) Unready() *feed.Feed[map[string]string] { return d.unready }

// A device shared by MPS is hidden until its control daemon was asked, and Healthy while that
// answers. Other resources are not asked for.
func TestSharedByMPSFollowsItsControlDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	mps := &daemons{followed: feed.New([]string(nil)), unready: feed.New(map[string]string{gpu +
		".shared": "it was not asked yet"})}
	n.mps = mps
	c := shared(gpu + ".shared")
	c.Resource.Sharing.Mode = resource.MPS
	c.Resource.Sharing.Rules[0].Devices = []resource.Ref{"0"}
	n.configs.Publish(c)
	n.start(t)
	n.await(t, "GPU-1 | ", gpu, gpu+".shared")
	if got := mps.followed.Value(); !slices.Equal(got, []string{gpu + ".shared"}) {
		t.Errorf("control daemons of %q are asked", got)
	}
	mps.asked.Store(true)
	mps.unready.Publish(map[string]string{gpu + ".shared": "it does not answer"})
	n.await(t, "GPU-1 | GPU-0::0 GPU-0::1", gpu, gpu+".shared")
	mps.unready.Publish(nil)
	n.await(t, "GPU-0::0 GPU-0::1 GPU-1 | ", gpu, gpu+".shared")
	n.configs.Publish(whole())
	n.until(t, "GPU-0 GPU-1 | ", gpu, gpu+".shared")
	if got := mps.followed.Value(); len(got) > 0 {
		t.Errorf("control daemons of %q are asked although nothing is shared", got)
	}
}

// TestGPUsThatAreDivided: one is offered once it is decided how it is to be divided, and not given
// out while that is done.
func TestGPUsThatAreDivided(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	n.mig = feed.New(map[string]resource.GPUHold{"GPU-0": {}})
	n.start(t)
	n.await(t, "GPU-0 | ", gpu)
	n.mig.Publish(map[string]resource.GPUHold{"GPU-0": {}, "GPU-1": {Reason: "it is divided again"}})
	n.await(t, "GPU-0 | GPU-1", gpu)
	n.mig.Publish(map[string]resource.GPUHold{"GPU-0": {}, "GPU-1": {}})
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 3 { // also while nothing happens
		if err := n.pulse.Check(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNothingIsPlannedBeforeTheFirstLook: a node that nobody has looked at is not one without GPUs.
func TestNothingIsPlannedBeforeTheFirstLook(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	n.snapshots = feed.New(inventory.Snapshot{})
	mps := &daemons{followed: feed.New([]string(nil)), unready: feed.New(map[string]string(nil))}
	n.mps = mps
	_, followed := mps.followed.Latest()
	n.start(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 3 {
		if err := n.pulse.Check(ctx); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-followed:
		t.Error("a plan was made")
	default:
	}
	n.snapshots.Publish(gpus())
	n.await(t, "GPU-0 GPU-1 | ", gpu)
}
