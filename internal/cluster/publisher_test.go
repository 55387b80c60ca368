package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// A publisher is a process that publishes slices.
type publisher struct {
	*process
	owners    *feed.Feed[dra.Owners]
	divisions *feed.Feed[dra.Divisions]
	driver    *feed.Feed[draplugin.Status]
	devices   *pool.Devices
}

// publisher starts a process with a state directory, whose driver kubelet has registered, with so
// many GPUs.
func (s *stage) publisher(stateDir string, gpus int) *publisher {
	s.Helper()
	p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: stateDir}}, snapshotOf(gpus)).publish()
	p.registered(1)
	return p
}

// newPublisher returns a process whose driver kubelet has not registered yet.
func (s *stage) newPublisher(c config.Config, first inventory.Snapshot) *publisher {
	c.DRA.Mode = config.DRAAll
	p := &publisher{
		process: s.new(c), owners: feed.New(dra.All(first.GPUs)), divisions: feed.New(dra.Divisions{}),
		driver: feed.New(draplugin.Status{}),
	}
	p.Snapshots.Publish(first)
	return p
}

// publish has it publish until stop is called, or the test ends.
func (p *publisher) publish() *publisher {
	ctx, cancel := context.WithCancel(p.logging())
	p.devices = pool.New(pool.Options{
		StateDir: p.Startup.StateDir, Driver: p.Startup.DRADriver, Node: nodeName, Snapshots: p.Snapshots,
		Configs: p.Configs, Owners: p.owners, Divisions: p.divisions,
	})
	p.connect(ctx)
	p.cluster.Count(p.count)
	watchNode := p.cluster.Observation(p.Configs, "boot")[0]
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = watchNode.Run(ctx) })
	tasks.Go(func() { _ = p.devices.Run(ctx) })
	tasks.Go(func() { p.cluster.PublishSlices(ctx, p.devices, p.driver) })
	p.stop = sync.OnceFunc(func() { cancel(); tasks.Wait() })
	p.s.Cleanup(p.stop)
	return p
}

// registered has kubelet have registered the driver so often.
func (p *publisher) registered(n int) {
	p.driver.Publish(draplugin.Status{Registered: true, Registrations: n})
}

// own has these be the owners of the GPUs, and the configuration be without DRA.
func (p *publisher) off(owners dra.Owners) {
	p.configure(func(c *config.Config) { c.DRA.Mode = config.DRAOff })
	p.owners.Publish(owners)
}

// snapshotOf is a node with so many healthy GPUs.
func snapshotOf(n int) inventory.Snapshot {
	s := inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580.95.05", CUDA: "13.0"}}
	for i := range n {
		s.GPUs = append(s.GPUs, inventory.GPU{
			Index: i, Minor: i, UUID: fmt.Sprintf("GPU-%d", i), Model: "NVIDIA H100 80GB HBM3", MemoryBytes: 80 << 30,
			Health: inventory.Health{State: inventory.Healthy},
		})
	}
	return s
}

// look publishes another snapshot.
func (p *publisher) look(change func(gpus []inventory.GPU)) {
	snapshot := p.Snapshots.Value()
	snapshot.Generation++
	snapshot.GPUs = slices.Clone(snapshot.GPUs)
	change(snapshot.GPUs)
	p.Snapshots.Publish(snapshot)
}

// fault has GPUs report an XID, and the others be healthy.
func (p *publisher) fault(indices ...int) {
	p.look(func(gpus []inventory.GPU) {
		for i := range gpus {
			gpus[i].Health = inventory.Health{State: inventory.Healthy}
			if slices.Contains(indices, i) {
				gpus[i].Health = inventory.Health{
					State: inventory.Unhealthy, XID: 79, Since: time.Unix(900_000_000, 0), Remedy: inventory.RemedyReset,
				}
			}
		}
	})
}

// partition has the GPUs be in MIG mode, with two MIG devices each that can be made for claims.
func (p *publisher) partition() {
	divisions := dra.Divisions{}
	p.look(func(gpus []inventory.GPU) {
		for i := range gpus {
			gpus[i].MIG = inventory.MIGEnabled
			divisions[gpus[i].UUID] = dra.Divided{Profiles: []inventory.MIGProfile{{
				Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4}, Attributes: inventory.MIGAttributes{GISlices: 3,
					CISlices: 3},
			}}}
		}
		p.divisions.Publish(divisions)
	})
}

// share has GPUs be given in shares, to at most so many claims each.
func (p *publisher) share(most int) { p.configure(func(c *config.Config) { c.DRA.Shares = most }) }

func (p *publisher) told() pool.Publication { return p.devices.Publication().Value() }

func (p *publisher) untilProblem(text string) {
	p.s.Helper()
	p.s.until(fmt.Sprintf("the problem is %q", text), func() bool {
		problem := p.told().Problem
		return strings.Contains(problem, text) && (text != "") == (problem != "")
	})
}

// arbitrate decides the owners of the GPUs until the test ends. No claim is prepared. holders is
// nil without a kubelet.
func (p *publisher) arbitrate(holders kubelet.Holders) {
	arbiter := owner.New(owner.Options{
		Devices: p.devices, Holders: holders, Offered: p.owners, Records: feed.New(map[string][]claims.Holder{}),
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = arbiter.Run(ctx) })
	p.s.Cleanup(func() { cancel(); running.Wait() })
}

// sliceWrites counts the requests that changed slices, or tried to, while something is done.
func (s *stage) sliceWrites(while func()) int {
	count := func() (n int) {
		for request, made := range s.server.Requests() {
			if request.Resource == "resourceslices" && request.IsWrite() {
				n += made
			}
		}
		return n
	}
	before := count()
	while()
	return count() - before
}

// pool is what a scheduler sees of the node: the devices of a pool that is complete, with their
// taints, and the generation in front.
func (s *stage) pool() string {
	all := s.server.Slices()
	newest := int64(0)
	for _, slice := range all {
		newest = max(newest, slice.Spec.Pool.Generation)
	}
	var devices []string
	count, want := 0, int64(0)
	for _, slice := range all {
		if slice.Spec.Pool.Generation != newest {
			continue
		}
		count, want = count+1, slice.Spec.Pool.ResourceSliceCount
		for _, d := range slice.Spec.Devices {
			name := strings.TrimPrefix(d.Name, "gpu-")
			for _, taint := range d.Taints {
				name += "!" + strings.TrimPrefix(taint.Key, "gpu.nvidia.com/")
			}
			devices = append(devices, name)
		}
	}
	switch {
	case len(all) == 0:
		return "none"
	case int64(count) != want:
		return "incomplete"
	}
	return fmt.Sprintf("%d: %s", newest, strings.Join(devices, " "))
}

func (s *stage) untilPool(want string) {
	s.Helper()
	s.until("the pool is "+want, func() bool { return s.pool() == want })
}

// shared returns how many devices of the API server several claims can have, and the least that a
// claim gets of their memory.
func (s *stage) shared() (n int, least string) {
	for _, slice := range s.server.Slices() {
		for _, device := range slice.Spec.Devices {
			if ptr.Deref(device.AllowMultipleAllocations, false) {
				n, least = n+1, device.Capacity["memory"].RequestPolicy.ValidRange.Min.String()
			}
		}
	}
	return n, least
}

// wipe removes the slices, as the garbage collector and a kubelet that starts do.
func (s *stage) wipe() {
	s.Helper()
	if err := s.server.WipeSlices(nodeName); err != nil {
		s.Fatal(err)
	}
}

func (s *stage) changeSlice(name string, change func(*resourceapi.ResourceSlice)) {
	s.Helper()
	if err := s.server.ChangeSlice(name, change); err != nil {
		s.Fatal(err)
	}
}
