package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draslices"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/handover"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

// A driver is a process that publishes slices, as far as a publisher sees it.
type driver struct {
	s         *stage
	snapshots *feed.Feed[inventory.Snapshot]
	owners    *feed.Feed[dra.Owners]
	divisions *feed.Feed[dra.Divisions]
	configs   *feed.Feed[config.Config]
	driver    *feed.Feed[draplugin.Status]
	devices   *draslices.Devices
	publisher *publisher
	stop      func()

	mu     sync.Mutex // guards counts
	counts map[string]int
}

// startDriver starts a process with a state directory, whose driver kubelet has registered, with so many GPUs.
func (s *stage) startDriver(stateDir string, gpus int) *driver {
	s.t.Helper()
	d := s.newDriver(stateDir, snapshotOf(gpus))
	d.registered(1)
	return d
}

// arbitrate begins to decide the owners of the GPUs. No claim is prepared. users is nil where there is no kubelet.
func (d *driver) arbitrate(t *testing.T, users handover.Users) (end func()) {
	t.Helper()
	arbiter := handover.New(handover.Options{
		Configs: d.configs, Snapshots: d.snapshots, Users: users, Owners: d.owners, Offered: d.owners, Published: d.devices.Published(),
		Records: feed.New(map[string][]claims.Holder{}), Clock: d.s.clock,
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- arbiter.Run(ctx) }()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// newDriver starts a process whose driver kubelet has not registered yet.
func (s *stage) newDriver(stateDir string, first inventory.Snapshot) *driver {
	s.t.Helper()
	return s.newSpreadDriver(stateDir, first, s.clock, &spread{})
}

// newSpreadDriver starts one whose first requests are spread, by this clock.
func (s *stage) newSpreadDriver(stateDir string, first inventory.Snapshot, timer clock.Clock, turns *spread) *driver {
	s.t.Helper()
	d := &driver{
		s: s, snapshots: feed.New(first), owners: feed.New(dra.All(first.GPUs)),
		configs: feed.New(config.Config{DRA: config.DRA{Mode: config.DRAAll}}), driver: feed.New(draplugin.Status{}),
		divisions: feed.New(dra.Divisions{}), counts: map[string]int{},
	}
	ctx, cancel := context.WithCancel(context.Background())
	d.devices = draslices.New(ctx, draslices.Options{
		StateDir: stateDir, Node: nodeName, Snapshots: d.snapshots, Configs: d.configs, Owners: d.owners, Divisions: d.divisions,
		Clock: s.clock,
	})
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	client.Count(func(verb, resource string, code int) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.counts[fmt.Sprint(verb, " ", resource, " ", code)]++
	})
	d.publisher = newPublisher(client, d.devices, stateDir, d.driver, timer, turns)
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = d.devices.Run(ctx) })
	tasks.Go(func() { d.publisher.run(ctx) })
	d.stop = sync.OnceFunc(func() { cancel(); tasks.Wait() })
	s.t.Cleanup(d.stop)
	return d
}

// registered has kubelet have registered the driver so often.
func (d *driver) registered(n int) {
	status := d.driver.Value()
	status.Registered, status.Registrations = true, n
	d.driver.Publish(status)
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

// fault has GPUs report an XID, and the others be healthy.
func (d *driver) fault(indices ...int) {
	snapshot := d.snapshots.Value()
	snapshot.Generation++
	snapshot.GPUs = slices.Clone(snapshot.GPUs)
	for i := range snapshot.GPUs {
		snapshot.GPUs[i].Health = inventory.Health{State: inventory.Healthy}
		if slices.Contains(indices, i) {
			snapshot.GPUs[i].Health = inventory.Health{
				State: inventory.Unhealthy, XID: 79, Since: time.Unix(1_700_000_000, 0), Cure: inventory.CureReset,
			}
		}
	}
	d.snapshots.Publish(snapshot)
}

// sliceWrites are how many requests changed slices, or tried to.
func (s *stage) sliceWrites() int {
	n := 0
	for request, count := range s.server.Requests() {
		if request.Resource == "resourceslices" && request.IsWrite() {
			n += count
		}
	}
	return n
}

// requests says which requests were made, and how often.
func (d *driver) requests() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []string
	for _, request := range slices.Sorted(maps.Keys(d.counts)) {
		all = append(all, fmt.Sprint(request, ": ", d.counts[request]))
	}
	return strings.Join(all, ", ")
}

func (d *driver) requestsMade() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, count := range d.counts {
		n += count
	}
	return n
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
	s.t.Helper()
	s.until("the pool is "+want+"; it is "+s.pool(), func() bool { return s.pool() == want })
}

// A change of health is one write, which leaves the generation as it is; several at once are one, too, in one slice.
func TestOneWriteForAChange(t *testing.T) {
	s := newStage(t)
	d := s.startDriver(t.TempDir(), 8)
	s.untilPool("1: 0 1 2 3 4 5 6 7")
	if n := s.sliceWrites(); n != 1 {
		t.Errorf("%d writes to publish", n)
	}
	for _, change := range []struct {
		bad  []int
		want string
	}{{[]int{3}, "1: 0 1 2 3!xid 4 5 6 7"}, {[]int{1, 2}, "1: 0 1!xid 2!xid 3 4 5 6 7"}, {nil, "1: 0 1 2 3 4 5 6 7"}} {
		before := s.sliceWrites()
		d.fault(change.bad...)
		s.untilPool(change.want)
		s.pass(time.Minute, time.Second)
		if n := s.sliceWrites() - before; n != 1 || s.pool() != change.want {
			t.Errorf("%v: %d writes, pool %s", change.bad, n, s.pool())
		}
	}
	slice := s.server.Slices()[0]
	node, err := s.server.Node(nodeName)
	if err != nil {
		t.Fatal(err)
	}
	if len(slice.OwnerReferences) != 1 || slice.OwnerReferences[0].UID != node.UID || slice.OwnerReferences[0].Kind != "Node" {
		t.Errorf("the owners are %+v, want the node", slice.OwnerReferences)
	}
}

// The first slices wait for links that are due, and so there is one write. Later ones do not wait.
func TestFirstSlicesWaitForLinks(t *testing.T) {
	s := newStage(t)
	first := snapshotOf(2)
	first.LinksDue = true
	d := s.newDriver(t.TempDir(), first)
	d.registered(1)
	s.until("status has the reason", func() bool { return d.devices.Publication().Value().Problem == errLinksDue.Error() })
	s.pass(10*time.Second, time.Second)
	if n := s.sliceWrites(); n != 0 {
		t.Errorf("%d writes while links are due", n)
	}
	known := snapshotOf(2)
	known.Generation = 2
	known.GPUs[0].Links = []inventory.Link{{Peer: "GPU-1", PeerIndex: 1, NVLinks: 18}}
	known.GPUs[1].Links = []inventory.Link{{Peer: "GPU-0", PeerIndex: 0, NVLinks: 18}}
	d.snapshots.Publish(known)
	s.untilPool("1: 0 1")
	for _, device := range s.server.Slices()[0].Spec.Devices {
		if device.Attributes[dra.Domain+"/linkGroup2"].StringValue == nil {
			t.Errorf("%s has no link group: %v", device.Name, device.Attributes)
		}
	}
	if n := s.sliceWrites(); n != 1 {
		t.Errorf("%d writes of slices with links", n)
	}
	known.LinksDue = true
	d.snapshots.Publish(known)
	d.fault(1)
	s.untilPool("1: 0 1!xid")
}

// In an hour of steady state nothing is written, also with devices that have taints, and whatever watches do.
func TestNoWriteInAnHour(t *testing.T) {
	s := newStage(t)
	d := s.startDriver(t.TempDir(), 16)
	d.fault(5)
	s.untilPool("1: 0 1 2 3 4 5!xid 6 7 8 9 10 11 12 13 14 15")
	before := s.sliceWrites()
	for range 6 {
		s.pass(10*time.Minute, 5*time.Second)
		s.server.SendBookmark()
		s.server.DropWatches()
		d.snapshots.Publish(d.snapshots.Value())
	}
	if n := s.sliceWrites() - before; n != 0 {
		t.Errorf("%d writes in an hour", n)
	}
}

// Two slices that change at once begin a new generation: a scheduler sees none of the changes, or all.
func TestSeveralSlices(t *testing.T) {
	s := newStage(t)
	d := s.startDriver(t.TempDir(), 16)
	s.untilPool("1: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15")
	d.fault(0, 8)
	s.until("both are tainted", func() bool {
		now := s.pool()
		if strings.Count(now, "!") == 1 {
			t.Errorf("one of two changes is seen: %s", now)
		}
		return now == "2: 0!xid 1 2 3 4 5 6 7 8!xid 9 10 11 12 13 14 15"
	})
	less := d.snapshots.Value()
	less.GPUs, less.Generation = less.GPUs[:7], less.Generation+1
	d.snapshots.Publish(less)
	s.untilPool("3: 0!xid 1 2 3 4 5 6")
	s.until("the second slice is gone", func() bool { return len(s.server.Slices()) == 1 })
}

// A kubelet that starts removes the slices of its node: they are back within three seconds, also if it does so again and again.
func TestWipedSlices(t *testing.T) {
	s := newStage(t)
	d := s.startDriver(t.TempDir(), 16)
	const all = "1: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"
	s.untilPool(all)
	for i := range 5 {
		if err := s.server.WipeSlices(nodeName); err != nil {
			t.Fatal(err)
		}
		d.registered(i + 2)
		left := 3 * time.Second // of the clock that pauses go by
		for deadline := time.Now().Add(patience); s.pool() != all; {
			if time.Now().After(deadline) {
				t.Fatalf("restart %d: the slices are not back: %s", i, s.pool())
			}
			<-time.After(10 * time.Millisecond)
			if left > 0 && time.Now().After(deadline.Add(-patience/2)) {
				s.clock.Step(time.Second)
				left -= time.Second
			}
		}
	}
}

// A Node that was deleted and made anew takes its slices with it. New ones belong to the new Node, also while a watch of the Node is stuck.
func TestNodeMadeAnew(t *testing.T) {
	s := newStage(t)
	d := s.newDriver(t.TempDir(), snapshotOf(2))
	before, err := s.server.Node(nodeName)
	if err != nil {
		t.Fatal(err)
	}
	d.publisher.client.Nodes().Publish(kubeapi.Node{Name: nodeName, UID: string(before.UID), ResourceVersion: before.ResourceVersion})
	d.registered(1)
	s.untilPool("1: 0 1")
	if err := s.server.DeleteNode(nodeName); err != nil {
		t.Fatal(err)
	}
	s.change(func(*corev1.Node) {})
	after, err := s.server.Node(nodeName)
	if err != nil || after.UID == before.UID {
		t.Fatalf("the node is not another one: %v", err)
	}
	if err := s.server.WipeSlices(nodeName); err != nil { // as the garbage collector does
		t.Fatal(err)
	}
	s.until("the slice is back", func() bool { return len(s.server.Slices()) == 1 })
	if owner := s.server.Slices()[0].OwnerReferences[0]; owner.UID != after.UID {
		t.Errorf("the slice belongs to the node %s, which is gone, and not to %s", owner.UID, after.UID)
	}
}

// Slices of a Node that is gone are removed while others are written. The Node that is there now gets all.
func TestSlicesRemovedAtOnce(t *testing.T) {
	s := newStage(t)
	d := s.newDriver(t.TempDir(), snapshotOf(17))
	d.publisher.client.Nodes().Publish(kubeapi.Node{Name: nodeName, UID: "gone", ResourceVersion: "1"})
	d.registered(1)
	for deadline := time.Now().Add(patience); len(s.server.Slices()) < 3; s.clock.Step(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the slices are not there: %s", d.requests())
		}
		for _, slice := range s.server.Slices() {
			if slice.OwnerReferences[0].UID != "gone" {
				continue
			}
			if err := s.server.WipeSlices(nodeName); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Nothing is asked of the API server before kubelet has registered the driver, nor in a mode without DRA that never was another one.
func TestNoRequestWithoutNeed(t *testing.T) {
	s := newStage(t)
	d := s.newDriver(t.TempDir(), snapshotOf(2))
	off := s.newDriver(t.TempDir(), snapshotOf(2))
	off.configs.Publish(config.Config{})
	off.owners.Publish(dra.Owners{"GPU-0": dra.OwnedByPlugin, "GPU-1": dra.OwnedByPlugin})
	off.registered(1)
	s.pass(10*time.Minute, 5*time.Second)
	if n := d.requestsMade() + off.requestsMade(); n != 0 {
		t.Errorf("%d requests", n)
	}
	d.registered(1)
	s.untilPool("1: 0 1")
	if published := off.devices.Published().Value(); published == nil || len(published) > 0 {
		t.Errorf("published %v", published)
	}
}

// Without GPUs the pool is there, and empty. When the mode is left, GPUs are taken out one after the other, and with the last one the slices
// go; what is published is on disk before, and until it is certain that it is not.
func TestEmptyPoolAndModeLeft(t *testing.T) {
	s := newStage(t)
	dir := t.TempDir()
	d := s.newDriver(dir, inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580.95.05"}})
	d.registered(1)
	s.untilPool("1: ")
	d.snapshots.Publish(snapshotOf(2))
	d.owners.Publish(dra.Owners{"GPU-0": dra.OwnedByDRA, "GPU-1": dra.OwnedByDRA})
	s.untilPool("1: 0 1")
	s.until("both are published", func() bool { return len(d.devices.Published().Value()) == 2 })
	d.configs.Publish(config.Config{})
	d.owners.Publish(dra.Owners{"GPU-0": dra.LeavesDRA, "GPU-1": dra.LeavesDRA})
	s.untilPool("1: 0!leaving 1!leaving")
	d.owners.Publish(dra.Owners{"GPU-1": dra.LeavesDRA})
	s.untilPool("1: 1!leaving")
	s.until("one is published", func() bool { return len(d.devices.Published().Value()) == 1 })
	d.stop()
	again := s.newDriver(dir, snapshotOf(2)) // its driver is not registered: removal needs no kubelet
	again.configs.Publish(config.Config{})
	again.owners.Publish(dra.Owners{})
	if !again.devices.Published().Value()["GPU-1"] {
		t.Errorf("after a restart %v is published", again.devices.Published().Value())
	}
	s.untilPool("none")
	s.until("nothing is published", func() bool { return len(again.devices.Published().Value()) == 0 })
	before := again.requestsMade()
	s.pass(10*time.Minute, 5*time.Second)
	if n := again.requestsMade() - before; n > 0 {
		t.Errorf("%d requests afterwards", n)
	}
}

// Two processes with one state directory, as in a roll-out: one publishes, and lets go when the later one is registered.
func TestOneProcessPublishes(t *testing.T) {
	s := newStage(t)
	dir := t.TempDir()
	earlier := s.startDriver(dir, 2)
	s.untilPool("1: 0 1")
	later := s.startDriver(dir, 3)
	s.pass(time.Minute, time.Second)
	if s.pool() != "1: 0 1" || s.sliceWrites() != 1 {
		t.Errorf("two processes publish: %s", s.pool())
	}
	earlier.driver.Publish(draplugin.Status{Registered: true, Registrations: 1, Later: true})
	s.untilPool("1: 0 1 2")
	s.until("the earlier one knows what is published", func() bool { return len(earlier.devices.Published().Value()) == 3 })
	later.stop() // it crashes, and the earlier one is still there
	earlier.driver.Publish(draplugin.Status{Registered: true, Registrations: 1})
	s.untilPool("1: 0 1")
	if n := s.sliceWrites(); n != 3 {
		t.Errorf("%d writes", n)
	}
}
