package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draslices"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/handover"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A publisher is a process that publishes slices.
type publisher struct {
	*process
	owners    *feed.Feed[dra.Owners]
	divisions *feed.Feed[dra.Divisions]
	driver    *feed.Feed[draplugin.Status]
	devices   *draslices.Devices
}

// publisher starts a process with a state directory, whose driver kubelet has registered, with so many GPUs.
func (s *stage) publisher(stateDir string, gpus int) *publisher {
	s.Helper()
	p := s.newPublisher(config.Config{StateDir: stateDir}, snapshotOf(gpus)).publish()
	p.registered(1)
	return p
}

// newPublisher returns a process whose driver kubelet has not registered yet.
func (s *stage) newPublisher(c config.Config, first inventory.Snapshot) *publisher {
	c.DRA.Mode = config.DRAAll
	p := &publisher{
		process: s.new(c), owners: feed.New(dra.All(first.GPUs)), divisions: feed.New(dra.Divisions{}), driver: feed.New(draplugin.Status{}),
	}
	p.Snapshots.Publish(first)
	return p
}

// publish has it publish until stop is called, or the test ends.
func (p *publisher) publish() *publisher {
	ctx, cancel := context.WithCancel(p.logging())
	p.devices = draslices.New(ctx, draslices.Options{
		StateDir: p.Config.StateDir, Node: nodeName, Snapshots: p.Snapshots, Configs: p.Configs, Owners: p.owners, Divisions: p.divisions,
	})
	p.connect(ctx)
	p.cluster.Count(p.count)
	watchNode := p.cluster.Observation(p.Configs, "boot")[0]
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = watchNode.Run(ctx) })
	tasks.Go(func() { _ = p.devices.Run(ctx) })
	tasks.Go(func() { p.cluster.PublishSlices(ctx, p.devices, p.Config.StateDir, p.driver) })
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
					State: inventory.Unhealthy, XID: 79, Since: time.Unix(900_000_000, 0), Cure: inventory.CureReset,
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
				Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4}, Attributes: inventory.MIGAttributes{GISlices: 3, CISlices: 3},
			}}}
		}
		p.divisions.Publish(divisions)
	})
}

// share has GPUs be given in shares, to at most so many claims each.
func (p *publisher) share(most int) { p.configure(func(c *config.Config) { c.DRA.Shares = most }) }

func (p *publisher) told() draslices.Publication { return p.devices.Publication().Value() }

func (p *publisher) untilProblem(text string) {
	p.s.Helper()
	p.s.until(fmt.Sprintf("the problem is %q", text), func() bool {
		problem := p.told().Problem
		return strings.Contains(problem, text) && (text != "") == (problem != "")
	})
}

// arbitrate decides the owners of the GPUs until the test ends. No claim is prepared. users is nil where there is no kubelet.
func (p *publisher) arbitrate(users handover.Users) {
	arbiter := handover.New(handover.Options{
		Configs: p.Configs, Snapshots: p.Snapshots, Users: users, Owners: p.owners, Offered: p.owners, Published: p.devices.Published(),
		Records: feed.New(map[string][]claims.Holder{}),
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

// pool is what a scheduler sees of the node: the devices of a pool that is complete, with their taints, and the generation in front.
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

// shared returns how many devices of the API server several claims can have, and the least that a claim gets of their memory.
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

// A change of health is one write, which leaves the generation as it is; several at once are one, too, in one slice.
func TestOneWriteForAChange(t *testing.T) {
	onStage(t, func(s *stage) {
		var p *publisher
		if n := s.sliceWrites(func() { p = s.publisher(s.TempDir(), 8); s.untilPool("1: 0 1 2 3 4 5 6 7") }); n != 1 {
			s.Errorf("%d writes to publish", n)
		}
		for _, change := range []struct {
			bad  []int
			want string
		}{{[]int{3}, "1: 0 1 2 3!xid 4 5 6 7"}, {[]int{1, 2}, "1: 0 1!xid 2!xid 3 4 5 6 7"}, {nil, "1: 0 1 2 3 4 5 6 7"}} {
			n := s.sliceWrites(func() { p.fault(change.bad...); s.untilPool(change.want); s.pass(time.Minute) })
			if n != 1 || s.pool() != change.want {
				s.Errorf("%v: %d writes, pool %s", change.bad, n, s.pool())
			}
		}
		owners := s.server.Slices()[0].OwnerReferences
		if len(owners) != 1 || owners[0].UID != s.node().UID || owners[0].Kind != "Node" {
			s.Errorf("the owners are %+v, want the node", owners)
		}
	})
}

// Bad news is written at once, and good news a second after the last write.
func TestBadNewsFirst(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.publisher(s.TempDir(), 2)
		s.untilPool("1: 0 1")
		s.pass(time.Minute)
		takes := func(want string, least, most time.Duration, bad ...int) {
			s.Helper()
			began := time.Now()
			p.fault(bad...)
			for s.pool() != want {
				s.pass(10 * time.Millisecond)
			}
			if took := time.Since(began); took < least || took > most {
				s.Errorf("%s after %v", want, took)
			}
		}
		takes("1: 0!xid 1", 0, 300*time.Millisecond, 0)
		takes("1: 0!xid 1!xid", 0, 300*time.Millisecond, 0, 1)
		takes("1: 0 1", 700*time.Millisecond, 1200*time.Millisecond)
	})
}

// The first slices wait for links that are due, and so there is one write. Later ones do not wait.
func TestFirstSlicesWaitForLinks(t *testing.T) {
	onStage(t, func(s *stage) {
		first := snapshotOf(2)
		first.LinksDue = true
		p := s.newPublisher(config.Config{StateDir: s.TempDir()}, first).publish()
		p.registered(1)
		p.untilProblem("the links between GPUs are not known yet")
		if n := s.sliceWrites(func() { s.pass(time.Minute) }); n != 0 {
			s.Errorf("%d writes while links are due", n)
		}
		known := snapshotOf(2)
		known.Generation = 2
		known.GPUs[0].Links = []inventory.Link{{Peer: "GPU-1", PeerIndex: 1, NVLinks: 18}}
		known.GPUs[1].Links = []inventory.Link{{Peer: "GPU-0", PeerIndex: 0, NVLinks: 18}}
		if n := s.sliceWrites(func() { p.Snapshots.Publish(known); s.untilPool("1: 0 1") }); n != 1 {
			s.Errorf("%d writes of slices with links", n)
		}
		for _, device := range s.server.Slices()[0].Spec.Devices {
			if device.Attributes[dra.Domain+"/linkGroup2"].StringValue == nil {
				s.Errorf("%s has no link group: %v", device.Name, device.Attributes)
			}
		}
		known.LinksDue = true
		p.Snapshots.Publish(known)
		p.fault(1)
		s.untilPool("1: 0 1!xid")
	})
}

// In hours of steady state nothing is written, also with devices that have taints, and whatever watches do; nor after a restart.
func TestNoSliceIsWrittenInSteadyState(t *testing.T) {
	onStage(t, func(s *stage) {
		dir := s.TempDir()
		p := s.publisher(dir, 16)
		const all = "1: 0 1 2 3 4 5!xid 6 7 8 9 10 11 12 13 14 15"
		p.fault(5)
		s.untilPool(all)
		if n := s.sliceWrites(func() {
			for range 6 {
				s.pass(30 * time.Minute)
				s.server.SendBookmark()
				s.server.DropWatches()
				p.Snapshots.Publish(p.Snapshots.Value())
			}
			p.stop()
			again := s.newPublisher(config.Config{StateDir: dir}, p.Snapshots.Value()).publish()
			again.registered(1)
			s.pass(time.Hour)
		}); n != 0 || s.pool() != all {
			s.Errorf("%d writes in hours; pool %s", n, s.pool())
		}
	})
}

// Two slices that change at once begin a new generation: a scheduler sees none of the changes, or all.
func TestSeveralSlices(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.publisher(s.TempDir(), 16)
		s.untilPool("1: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15")
		p.fault(0, 8)
		for strings.Count(s.pool(), "!") < 2 {
			if strings.Count(s.pool(), "!") == 1 {
				s.Fatalf("one of two changes is seen: %s", s.pool())
			}
			time.Sleep(time.Millisecond)
		}
		s.untilPool("2: 0!xid 1 2 3 4 5 6 7 8!xid 9 10 11 12 13 14 15")
		less := p.Snapshots.Value()
		less.GPUs, less.Generation = less.GPUs[:7], less.Generation+1
		p.Snapshots.Publish(less)
		s.untilPool("3: 0!xid 1 2 3 4 5 6")
		s.until("the second slice is gone", func() bool { return len(s.server.Slices()) == 1 })
	})
}

// A kubelet that starts removes the slices of its node: they are back within three seconds, also if it does so again and again. What somebody
// else removes again and again comes back later and later, and at once again after a calm minute.
func TestRemovedSlices(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.publisher(s.TempDir(), 16)
		const all = "1: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"
		s.untilPool(all)
		back := func() time.Duration {
			s.Helper()
			s.wipe()
			began := time.Now()
			s.untilPool(all)
			return time.Since(began)
		}
		for i := range 5 {
			p.registered(i + 2)
			if took := back(); took > 3*time.Second {
				s.Errorf("start %d of kubelet: the slices are back after %v", i, took)
			}
		}
		s.pass(2 * time.Minute)
		var last time.Duration
		for range 8 {
			last = back()
		}
		if last < 59*time.Second || last > 61*time.Second {
			s.Errorf("the eighth time they are back after %v, want a minute", last)
		}
		s.pass(2 * time.Minute)
		if took := back(); took > 3*time.Second {
			s.Errorf("after two calm minutes they are back after %v", took)
		}
	})
}

// stuckWatch has watches of the node tell nothing more.
func (s *stage) stuckWatch() {
	s.server.SetFault(apiserver.Fault{Delay: time.Hour, Only: func(r apiserver.Request) bool { return r.Verb == "watch" && r.Resource == "nodes" }})
	s.server.DropWatches()
	s.pass(5 * time.Second)
}

// anew deletes the node, and makes another one of its name.
func (s *stage) anew() {
	s.Helper()
	before := s.node().UID
	if err := s.server.DeleteNode(nodeName); err != nil {
		s.Fatal(err)
	}
	s.change(func(*corev1.Node) {})
	if s.node().UID == before {
		s.Fatal("the node is not another one")
	}
}

// A Node that was deleted and made anew takes its slices with it. New ones belong to the new Node, also while a watch of the Node is stuck.
func TestNodeMadeAnew(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{StateDir: s.TempDir(), Features: config.Features{Events: true}}, snapshotOf(2)).publish()
		p.registered(1)
		s.untilPool("1: 0 1")
		s.stuckWatch()
		s.anew()
		s.wipe()
		s.until("the slice is back", func() bool { return len(s.server.Slices()) == 1 })
		if owner := s.server.Slices()[0].OwnerReferences[0]; owner.UID != s.node().UID {
			s.Errorf("the slice belongs to the node %s, which is gone, and not to %s", owner.UID, s.node().UID)
		}
	})
}

// Slices of a Node that is gone are removed while others are written. The Node that is there now gets all.
func TestSlicesRemovedAtOnce(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{StateDir: s.TempDir(), Features: config.Features{Events: true}}, snapshotOf(17)).publish()
		s.until("the node is watched", func() bool { return strings.Contains(p.requests(), "WATCH nodes 200") })
		s.stuckWatch()
		before := s.node().UID
		s.anew()
		removed := 0
		p.requested = func(verb, resource string, code int) {
			if verb == "POST" && s.server.Slices()[0].OwnerReferences[0].UID == before {
				removed++
				s.wipe()
			}
		}
		p.registered(1)
		s.until("three slices", func() bool { return len(s.server.Slices()) == 3 })
		if removed < 1 || removed > 2 {
			s.Errorf("slices were written for the node that is gone %d times", removed)
		}
	})
}

// Nothing is asked of the API server before kubelet has registered the driver, nor in a mode without DRA that never was another one.
func TestNoRequestWithoutNeed(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{StateDir: s.TempDir()}, snapshotOf(2)).publish()
		off := s.newPublisher(config.Config{StateDir: s.TempDir()}, snapshotOf(2))
		off.off(dra.Owners{"GPU-0": dra.OwnedByPlugin, "GPU-1": dra.OwnedByPlugin})
		off.publish().registered(1)
		if s.pass(time.Hour); s.requests() != 0 {
			s.Errorf("requests %v", s.server.Requests())
		}
		p.registered(1)
		s.untilPool("1: 0 1")
		if published := off.devices.Published().Value(); published == nil || len(published) > 0 {
			s.Errorf("published %v", published)
		}
	})
}

// Without GPUs the pool is there, and empty. When the mode is left, GPUs are taken out one after the other, and with the last one the slices
// go; what is published is on disk before, and until it is certain that it is not.
func TestEmptyPoolAndModeLeft(t *testing.T) {
	onStage(t, func(s *stage) {
		dir := s.TempDir()
		p := s.newPublisher(config.Config{StateDir: dir}, inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580.95.05"}}).publish()
		p.registered(1)
		s.untilPool("1: ")
		p.Snapshots.Publish(snapshotOf(2))
		p.owners.Publish(dra.Owners{"GPU-0": dra.OwnedByDRA, "GPU-1": dra.OwnedByDRA})
		s.untilPool("1: 0 1")
		published := func(p *publisher, want int) func() bool {
			return func() bool { return len(p.devices.Published().Value()) == want }
		}
		s.until("both are published", published(p, 2))
		p.off(dra.Owners{"GPU-0": dra.LeavesDRA, "GPU-1": dra.LeavesDRA})
		s.untilPool("1: 0!leaving 1!leaving")
		p.owners.Publish(dra.Owners{"GPU-1": dra.LeavesDRA})
		s.untilPool("1: 1!leaving")
		s.until("one is published", published(p, 1))
		p.stop()
		again := s.newPublisher(config.Config{StateDir: dir}, snapshotOf(2)) // its driver is not registered: removal needs no kubelet
		again.off(dra.Owners{})
		s.server.SetFault(apiserver.Fault{Status: 500})
		again.publish()
		if s.pass(10 * time.Minute); !again.devices.Published().Value()["GPU-1"] {
			s.Errorf("after a restart %v is published, and the API server cannot be asked", again.devices.Published().Value())
		}
		s.server.SetFault(apiserver.Fault{})
		s.untilPool("none")
		s.until("nothing is published", published(again, 0))
		before := s.requests()
		if s.pass(time.Hour); s.requests() != before {
			s.Errorf("%d requests afterwards", s.requests()-before)
		}
	})
}

// Two processes with one state directory, as in a roll-out: one publishes, and lets go when the later one is registered.
func TestOneProcessPublishes(t *testing.T) {
	onStage(t, func(s *stage) {
		dir := s.TempDir()
		var earlier, later *publisher
		if n := s.sliceWrites(func() {
			earlier = s.publisher(dir, 2)
			s.untilPool("1: 0 1")
			later = s.publisher(dir, 3)
			s.pass(time.Minute)
		}); n != 1 || s.pool() != "1: 0 1" {
			s.Errorf("two processes publish: %s", s.pool())
		}
		earlier.driver.Publish(draplugin.Status{Registered: true, Registrations: 1, Later: true})
		s.untilPool("1: 0 1 2")
		s.until("the earlier one knows what is published", func() bool { return len(earlier.devices.Published().Value()) == 3 })
		if n := s.sliceWrites(func() {
			later.stop() // it crashes, and the earlier one is still there
			earlier.registered(1)
			s.untilPool("1: 0 1")
			s.pass(time.Minute)
		}); n != 1 {
			s.Errorf("%d writes", n)
		}
	})
}

// Whatever the API server does meanwhile: afterwards the pool is as it is to be, and nothing more is written.
func TestFaultsWhilePublishing(t *testing.T) {
	throughFaults(t, func(s *stage, fault apiserver.NamedFault) {
		p := s.publisher(s.TempDir(), 2)
		s.untilPool("1: 0 1")
		s.during(fault, func() { p.fault(1) })
		s.untilPool("1: 0 1!xid")
		s.during(fault, func() { s.wipe(); p.fault() })
		s.untilPool("1: 0 1")
		p.untilProblem("")
		s.pass(5 * time.Minute) // until the watch has seen that
		if n := s.sliceWrites(func() { s.pass(time.Hour) }); n != 0 {
			s.Errorf("%d writes of nothing", n)
		}
	})
}

// While the watch of slices is stuck, each change is one write all the same: what a write returned counts.
func TestWritesWhileTheWatchIsStuck(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.publisher(s.TempDir(), 16)
		s.until("two slices", func() bool { return len(s.server.Slices()) == 2 })
		s.server.SetFault(apiserver.Fault{Delay: time.Hour, Only: func(r apiserver.Request) bool { return r.Verb == "watch" }})
		s.server.DropWatches()
		s.pass(5 * time.Second)
		if n := s.sliceWrites(func() {
			for _, bad := range [][]int{{0}, {0, 8}, {8}, nil} {
				p.fault(bad...)
				s.pass(20 * time.Second)
			}
		}); n != 4 || strings.Contains(s.pool(), "!") {
			s.Errorf("%d writes of four changes; pool %s", n, s.pool())
		}
	})
}

// A GPU counts as published before the write whose answer may be lost, and nothing is taken for written that is not.
func TestPublishedBeforeItIs(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetFault(apiserver.Fault{Status: 500, Only: apiserver.Request.IsWrite})
		p := s.publisher(s.TempDir(), 1)
		p.untilProblem("500")
		if published := p.devices.Published().Value(); !published["GPU-0"] || p.told().Slices != 0 {
			s.Errorf("published %v; %+v", published, p.told())
		}
	})
}

// Without a disk nothing more is published.
func TestNothingIsPublishedWithoutADisk(t *testing.T) {
	onStage(t, func(s *stage) {
		dir := filepath.Join(s.TempDir(), "state")
		p := s.publisher(dir, 1)
		s.untilPool("1: 0")
		if err := errors.Join(os.RemoveAll(dir), os.Symlink("/dev/null", dir)); err != nil {
			s.Fatal(err)
		}
		p.owners.Publish(dra.Owners{"GPU-0": dra.OwnedByDRA, "GPU-1": dra.OwnedByDRA})
		p.Snapshots.Publish(snapshotOf(2))
		if s.pass(10 * time.Minute); s.pool() != "1: 0" {
			s.Errorf("the pool is %s", s.pool())
		}
	})
}

// A process that starts and cannot read what was published asks the API server, and goes on from there: in the modes with slices nothing is
// written, and in the mode without any the device plugin gets the GPUs.
func TestDamagedPublished(t *testing.T) {
	for mode, want := range map[config.DRAMode]dra.Ownership{config.DRAAll: dra.OwnedByDRA, config.DRAOff: dra.OwnedByPlugin} {
		t.Run(mode.String(), func(t *testing.T) {
			onStage(t, func(s *stage) {
				dir := s.TempDir()
				if mode == config.DRAAll {
					before := s.publisher(dir, 2)
					s.untilPool("1: 0 1")
					before.stop()
				}
				if err := os.WriteFile(filepath.Join(dir, "dra-published.json"), []byte("{"), 0o600); err != nil {
					s.Fatal(err)
				}
				if n := s.sliceWrites(func() {
					p := s.newPublisher(config.Config{StateDir: dir}, inventory.Snapshot{})
					p.configure(func(c *config.Config) { c.DRA.Mode = mode })
					p.owners.Publish(nil)
					p.publish().arbitrate(nil)
					p.Snapshots.Publish(snapshotOf(2))
					s.until("each GPU has an owner", func() bool {
						owners := p.owners.Value()
						return owners["GPU-0"] == want && owners["GPU-1"] == want
					})
					p.registered(1)
					s.pass(time.Minute)
				}); n != 0 {
					s.Errorf("%d writes; the pool is %s", n, s.pool())
				}
			})
		})
	}
}

// An API server that drops taints shows no device that must not be given away; the others stay.
func TestDroppedTaints(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetDroppedFields("taints")
		p := s.publisher(s.TempDir(), 3)
		s.untilPool("1: 0 1 2")
		p.fault(1)
		s.untilPool("1: 0 2")
		if n := s.sliceWrites(func() { p.fault(1, 2); s.untilPool("1: 0"); s.pass(10 * time.Minute) }); n != 1 {
			s.Errorf("%d writes of a second fault", n)
		}
		if told := p.told(); !told.NoTaints || told.NoCounters {
			s.Errorf("it is told as %+v", told)
		}
		p.fault()
		s.untilPool("1: 0 1 2")
	})
}

// versions are those of the API in which slices are published.
var versions = []string{"v1", "v1beta2", "v1beta1"}

// Devices with counters are published as they are to be, in any version of the API. One GPU that becomes ill is one write.
func TestCounters(t *testing.T) {
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			onStage(t, func(s *stage) {
				s.server.SetResourceVersions(version)
				p := s.publisher(s.TempDir(), 3)
				s.untilPool("1: 0 1 2")
				p.partition()
				const devices = "0-mig-3g40gb-9-0 0-mig-3g40gb-9-4 1-mig-3g40gb-9-0 1-mig-3g40gb-9-4 2-mig-3g40gb-9-0 2-mig-3g40gb-9-4"
				s.untilPool("2: " + devices)
				all := s.server.Slices()
				if sets := all[0].Spec.SharedCounters; len(all) != 3 || len(sets) != 3 || len(sets[2].Counters) != 8 || len(all[1].Spec.Devices[0].ConsumesCounters) != 1 {
					s.Fatalf("%d slices, counters %v", len(all), sets)
				}
				if n := s.sliceWrites(func() {
					p.fault(2)
					s.untilPool("2: " + strings.ReplaceAll(devices, "2-mig-3g40gb-9-0 2-mig-3g40gb-9-4", "2-mig-3g40gb-9-0!xid 2-mig-3g40gb-9-4!xid"))
					s.pass(10 * time.Minute)
				}); n != 1 {
					s.Errorf("%d writes of a fault", n)
				}
			})
		})
	}
}

// An API server that drops counters is never shown a device that needs some: the scheduler would give the same part of a GPU twice.
func TestDroppedCounters(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetDroppedFields("sharedCounters", "consumesCounters")
		p := s.publisher(s.TempDir(), 3)
		s.untilPool("1: 0 1 2")
		if n := s.sliceWrites(func() {
			p.partition()
			s.until("an empty pool", func() bool { return strings.HasSuffix(s.pool(), ": ") })
			s.pass(10 * time.Minute)
		}); n != 2 {
			s.Errorf("%d writes, want one of counters, and one of the empty slice: no device may be shown in between", n)
		}
		if told := p.told(); !told.NoCounters || told.NoTaints {
			s.Errorf("it is told as %+v", told)
		}
	})
}

// GPUs are given in shares and whole again by one write each, in any version of the API, and a further process finds nothing to write. What
// another program makes of the rules of shares is undone.
func TestShares(t *testing.T) {
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			onStage(t, func(s *stage) {
				s.server.SetResourceVersions(version)
				dir := s.TempDir()
				p := s.publisher(dir, 3)
				s.untilPool("1: 0 1 2")
				given := func(want int) func() bool { return func() bool { n, _ := s.shared(); return n == want } }
				var next *publisher
				if n := s.sliceWrites(func() {
					p.share(4)
					s.until("three shared GPUs", given(3))
					p.stop()
					next = s.newPublisher(config.Config{StateDir: dir}, p.Snapshots.Value())
					next.share(4)
					next.publish().registered(1)
					s.pass(time.Minute)
				}); n != 1 {
					s.Errorf("%d writes of shares by two processes", n)
				}
				if _, least := s.shared(); least != "20Gi" || s.pool() != "1: 0 1 2" || next.told().Problem != "" {
					s.Errorf("the least share is %s, the pool %s; %+v", least, s.pool(), next.told())
				}
				s.changeSlice(s.server.Slices()[0].Name, func(slice *resourceapi.ResourceSlice) {
					memory := slice.Spec.Devices[0].Capacity["memory"]
					memory.RequestPolicy = nil
					slice.Spec.Devices[0].Capacity["memory"] = memory
				})
				s.until("the rules of shares are back", func() bool { return s.server.Slices()[0].Spec.Devices[0].Capacity["memory"].RequestPolicy != nil })
				next.share(0)
				s.until("no shared GPU", given(0))
				s.untilPool("1: 0 1 2")
			})
		})
	}
}

// An API server that does not know devices for several claims gives GPUs whole from the one write on, and that is told.
func TestDroppedShares(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetDroppedFields("allowMultipleAllocations", "requestPolicy")
		p := s.publisher(s.TempDir(), 3)
		s.untilPool("1: 0 1 2")
		if n := s.sliceWrites(func() {
			p.share(4)
			s.until("it is told", func() bool { return p.told().NoShares })
			p.fault(1)
			s.untilPool("1: 0 1!xid 2")
			p.fault()
			s.untilPool("1: 0 1 2")
			s.pass(10 * time.Minute)
			if n, _ := s.shared(); n != 0 || p.told().Problem != "" {
				s.Errorf("%d shared GPUs; %+v", n, p.told())
			}
			p.share(0)
			s.until("it is not told where no shares are wanted", func() bool { return !p.told().NoShares })
		}); n != 3 {
			s.Errorf("%d writes, want one that is not kept and two of health", n)
		}
	})
}

// An API server is asked once in an hour whether it keeps what it did not keep, without a slice that is changed by that, and has all of it as
// soon as it does, without a restart of the process.
func TestGatesThatAreSwitchedOn(t *testing.T) {
	for name, tt := range map[string]struct {
		fields  []string
		begin   func(*publisher)
		without string // the pool meanwhile
		told    func(draslices.Publication) bool
		there   func(*stage) bool
		writes  int
	}{
		"taints": {
			[]string{"taints"}, func(p *publisher) { p.fault(1) }, "1: 0 2", func(p draslices.Publication) bool { return p.NoTaints },
			func(s *stage) bool { return s.pool() == "1: 0 1!xid 2" }, 1,
		},
		"counters": {
			[]string{"sharedCounters", "consumesCounters"}, (*publisher).partition, "1: ",
			func(p draslices.Publication) bool { return p.NoCounters },
			func(s *stage) bool { return strings.Contains(s.pool(), ": 0-mig-3g40gb-9-0 ") }, 3,
		},
		"shares": {
			[]string{"allowMultipleAllocations", "requestPolicy"}, func(p *publisher) { p.share(4) }, "1: 0 1 2",
			func(p draslices.Publication) bool { return p.NoShares }, func(s *stage) bool { n, _ := s.shared(); return n == 3 }, 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				s.server.SetDroppedFields(tt.fields...)
				p := s.publisher(s.TempDir(), 3)
				s.untilPool("1: 0 1 2")
				tt.begin(p)
				s.until("it is told", func() bool { return tt.told(p.told()) && strings.HasSuffix(s.pool(), tt.without[1:]) })
				before := s.server.Slices()
				for range 2 {
					quiet, asked := s.sliceWrites(func() { s.pass(58 * time.Minute) }), s.sliceWrites(func() { s.pass(2*time.Minute + time.Second) })
					if quiet != 0 || asked != 1 {
						s.Errorf("%d requests in 58 minutes, %d after an hour", quiet, asked)
					}
				}
				if after := s.server.Slices(); !reflect.DeepEqual(before, after) || !tt.told(p.told()) {
					s.Errorf("by a question %+v became %+v", before, after)
				}
				s.server.SetDroppedFields()
				if n := s.sliceWrites(func() {
					s.pass(50 * time.Minute)
					s.until("all is kept", func() bool { return tt.there(s) && !tt.told(p.told()) })
					s.pass(4 * time.Hour)
				}); n != 1+tt.writes {
					s.Errorf("%d requests, want a question and %d writes", n, tt.writes)
				}
			})
		})
	}
}

// users takes note of what kubelet is asked. No pod has a GPU.
type users chan []string

func (u users) Users(_ context.Context, uuids []string) ([]kubelet.HeldDevice, error) {
	u <- uuids
	return nil, nil
}

// Where the API server keeps no taints, a GPU that is ill leaves its slice, kubelet is asked whether a pod has it, and it stays the GPU of
// claims: it is never the device plugin's, and in its slice again as soon as it is well.
func TestIllWithoutTaints(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetDroppedFields("taints")
		p := s.publisher(s.TempDir(), 2)
		s.untilPool("1: 0 1")
		asked := make(users, 100)
		p.arbitrate(asked)
		p.fault(1)
		s.untilPool("1: 0")
		s.until("kubelet is asked", func() bool { return len(asked) > 0 })
		s.until("it is the GPU of claims still", func() bool {
			owner := p.owners.Value()["GPU-1"]
			if owner == dra.OwnedByPlugin {
				s.Fatal("the device plugin has it")
			}
			return owner == dra.OwnedByDRA
		})
		s.pass(10 * time.Minute)
		const seconds = 10 // that it is left to a process that may have taken it out
		if n := len(asked); n > seconds+2 || s.pool() != "1: 0" {
			s.Errorf("kubelet was asked %d times; the pool is %s", n, s.pool())
		}
		for range len(asked) {
			if uuids := <-asked; !slices.Equal(uuids, []string{"GPU-1"}) {
				s.Errorf("kubelet was asked about %v", uuids)
			}
		}
		p.fault()
		s.untilPool("1: 0 1")
	})
}

// An API server that serves an older version alone gets that; one that changes to another version, that one.
func TestOlderVersions(t *testing.T) {
	for _, version := range versions[1:] {
		t.Run(version, func(t *testing.T) {
			onStage(t, func(s *stage) {
				s.server.SetResourceVersions(version)
				if n := s.sliceWrites(func() {
					p := s.publisher(s.TempDir(), 2)
					s.untilPool("1: 0 1")
					p.fault(0)
					s.untilPool("1: 0!xid 1")
					s.pass(10 * time.Minute)
				}); n < 2 || n > 4 { // the first one is tried in each version
					s.Errorf("%d writes", n)
				}
				s.server.SetResourceVersions("v1")
				s.server.DropWatches()
				s.wipe()
				s.untilPool("1: 0!xid 1")
			})
		})
	}
	t.Run("none", func(t *testing.T) {
		onStage(t, func(s *stage) {
			s.server.SetResourceVersions()
			p := s.publisher(s.TempDir(), 2)
			p.untilProblem("resource.k8s.io")
			s.server.SetResourceVersions("v1")
			s.untilPool("1: 0 1")
			p.untilProblem("")
		})
	})
}

// What another program changes is set right; one that does so three times in ten minutes is left alone for ten, and that is told.
func TestOtherPublisher(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.publisher(s.TempDir(), 2)
		s.untilPool("1: 0 1")
		generation := int64(7)
		change := func() {
			generation++
			s.changeSlice(s.server.Slices()[0].Name, func(slice *resourceapi.ResourceSlice) {
				slice.Spec.Devices, slice.Spec.Pool.Generation = slice.Spec.Devices[:1], generation
			})
			s.pass(5 * time.Second)
		}
		for range 5 { // not often enough
			change()
			s.untilPool(fmt.Sprintf("%d: 0 1", generation))
			s.pass(6 * time.Minute)
		}
		s.pass(10 * time.Minute)
		for range 3 {
			s.untilPool(fmt.Sprintf("%d: 0 1", generation))
			change()
		}
		p.untilProblem("another program")
		theirs := fmt.Sprintf("%d: 0", generation)
		if n := s.sliceWrites(func() { s.pass(9 * time.Minute) }); n != 0 || s.pool() != theirs {
			s.Errorf("%d writes, pool %s", n, s.pool())
		}
		s.untilPool(theirs + " 1")
		p.untilProblem("")
	})
}

// Writes whose answers are lost are no changes by another program, also when the pool is another one by then.
func TestLostAnswers(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.publisher(s.TempDir(), 2)
		s.untilPool("1: 0 1")
		lost := apiserver.Fault{Status: 500, Late: true, Only: func(r apiserver.Request) bool {
			return r.Resource == "resourceslices" && r.IsWrite()
		}}
		for _, change := range []struct {
			bad  []int
			want string
		}{{[]int{0}, "1: 0!xid 1"}, {[]int{1}, "1: 0 1!xid"}, {nil, "1: 0 1"}, {[]int{0}, "1: 0!xid 1"}} {
			s.wipe()
			s.server.SetFault(lost)
			p.fault(change.bad...)
			s.until("something is written", func() bool { return s.pool() != "none" })
			p.fault()
			s.pass(time.Minute)
			p.fault(change.bad...)
			s.server.SetFault(apiserver.Fault{})
			s.untilPool(change.want)
		}
		p.untilProblem("")
		if n := p.logged("Another program changed a slice"); n != 0 {
			s.Errorf("%d own writes count as those of another program", n)
		}
	})
}

// Slices that another driver of this name has left are removed, those of other nodes and drivers are not.
func TestLeftSlices(t *testing.T) {
	onStage(t, func(s *stage) {
		slice := func(name, driver, node, pool string) {
			s.changeSlice(name, func(slice *resourceapi.ResourceSlice) {
				slice.Spec = resourceapi.ResourceSliceSpec{
					Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: pool, Generation: 4, ResourceSliceCount: 1},
					Devices: []resourceapi.Device{{Name: "gpu-0"}},
				}
			})
		}
		slice("a", dra.Driver, nodeName, nodeName)
		slice("b", dra.Driver, nodeName, "another-pool")
		slice("c", dra.Driver, "node-2", "node-2")
		slice("d", "compute-domain.nvidia.com", nodeName, nodeName)
		s.publisher(s.TempDir(), 2)
		s.until("only theirs are left", func() bool {
			var names []string
			for _, slice := range s.server.Slices() {
				names = append(names, slice.Name)
			}
			return slices.Equal(names, []string{"c", "d", nodeName + "-gpu.nvidia.com-0"})
		})
	})
}

// While a driver of another program has the name, nothing is written; without a Node nothing is published, and soon after there is one it
// is.
func TestWaits(t *testing.T) {
	onStage(t, func(s *stage) {
		if err := s.server.DeleteNode(nodeName); err != nil {
			s.Fatal(err)
		}
		p := s.newPublisher(config.Config{StateDir: s.TempDir()}, snapshotOf(1)).publish()
		p.driver.Publish(draplugin.Status{Registered: true, Registrations: 1, Foreign: filepath.Join("x", "gpu.nvidia.com.sock")})
		if s.pass(time.Minute); s.requests() != 0 {
			s.Errorf("%v requests beside another driver", s.server.Requests())
		}
		p.registered(1)
		p.untilProblem("no Node")
		s.change(func(*corev1.Node) {})
		began := time.Now()
		s.untilPool("1: 0")
		if took := time.Since(began); took > 6*time.Second {
			s.Errorf("after %v", took)
		}
	})
}
