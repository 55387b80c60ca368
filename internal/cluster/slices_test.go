package cluster_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A change of health is one write, which leaves the generation as it is; several at once are one,
// too, in one slice.
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

// Slices have the name of the driver. While NVIDIA's driver, of another name, may give the GPUs, no
// device is in them.
func TestSlicesOfAnotherName(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{
			Startup: config.Startup{StateDir: s.TempDir(), DRADriver: "gpu.example.com"},
		}, snapshotOf(2)).publish()
		p.registered(1)
		s.untilPool("1: 0 1")
		if slice := s.server.Slices()[0]; slice.Spec.Driver != "gpu.example.com" ||
			slice.Name != nodeName+"-gpu.example.com-0" {
			s.Errorf("the slice %s of the driver %s", slice.Name, slice.Spec.Driver)
		}
		p.driver.Publish(draplugin.Status{Registered: true, Registrations: 1, CompetingDriver: "NVIDIA's driver runs"})
		s.untilPool("1: ")
		if published := p.devices.Published().Value(); len(published) > 0 {
			s.Errorf("GPUs count as published: %v", published)
		}
		p.registered(1)
		s.untilPool("1: 0 1")
	})
}

// Bad news is written at once, and good news a second after the last write.
func TestDeteriorationIsWrittenFirst(t *testing.T) {
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
		p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: s.TempDir()}}, first).publish()
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

// In hours of steady state nothing is written, also with devices that have taints, and whatever
// watches do; nor after a restart.
func TestSlicesInSteadyState(t *testing.T) {
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
			again := s.newPublisher(config.Config{Startup: config.Startup{StateDir: dir}}, p.Snapshots.Value()).publish()
			again.registered(1)
			s.pass(time.Hour)
		}); n != 0 || s.pool() != all {
			s.Errorf("%d writes in hours; pool %s", n, s.pool())
		}
	})
}

// Two slices that change at once begin a new generation: a scheduler sees none of the changes, or
// all.
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

// A kubelet that starts removes the slices of its node: they are back within three seconds, also if
// it does so again and again. What somebody else removes again and again comes back later and
// later, and at once again after a calm minute.
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
		for range 7 {
			back()
		}
		for i := range 3 {
			if last := back(); last < 59*time.Second || last > 61*time.Second {
				s.Errorf("time %d they are back after %v, want a minute", i+8, last)
			}
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

// replaceNode deletes the node, and makes another one of its name.
func (s *stage) replaceNode() {
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

// A Node that was deleted and created again takes its slices with it. New ones belong to the new Node,
// also while a watch of the Node is stuck.
func TestSlicesOfRecreatedNode(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{
			Startup: config.Startup{StateDir: s.TempDir()},
			Live:    config.Live{Features: config.Features{Events: true}},
		},
			snapshotOf(2)).publish()
		p.registered(1)
		s.untilPool("1: 0 1")
		s.stuckWatch()
		s.replaceNode()
		s.wipe()
		s.until("the slice is back", func() bool { return len(s.server.Slices()) == 1 })
		if owner := s.server.Slices()[0].OwnerReferences[0]; owner.UID != s.node().UID {
			s.Errorf("the slice belongs to the node %s, which is gone, and not to %s", owner.UID, s.node().UID)
		}
	})
}

// Slices of a Node that is gone are removed while others are written. The Node that is there now
// gets all.
func TestSlicesOfDeletedNode(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{
			Startup: config.Startup{StateDir: s.TempDir()},
			Live:    config.Live{Features: config.Features{Events: true}},
		},
			snapshotOf(17)).publish()
		s.until("the node is watched", func() bool { return strings.Contains(p.requests(), "WATCH nodes 200") })
		s.stuckWatch()
		before := s.node().UID
		s.replaceNode()
		removed := 0
		p.requested = func(verb, _ string, _ int) {
			if verb == "POST" && s.server.Slices()[0].OwnerReferences[0].UID == before {
				removed++
				s.wipe()
			}
		}
		p.registered(1)
		s.until("three slices", func() bool { return len(s.server.Slices()) == 3 })
		if removed < 1 || removed > 3 { // each at most once: the watch may tell of the first after the last was written
			s.Errorf("slices were written for the node that is gone %d times", removed)
		}
	})
}

// Nothing is asked of the API server before kubelet has registered the driver, nor in a mode
// without DRA that never was another one.
func TestNoRequestWithoutNeed(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: s.TempDir()}}, snapshotOf(2)).publish()
		off := s.newPublisher(config.Config{Startup: config.Startup{StateDir: s.TempDir()}}, snapshotOf(2))
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

// Without GPUs the pool is there, and empty. When the mode is left, GPUs are taken out one after
// the other, and with the last one the slices go; what is published is on disk before, and until it
// is certain that it is not.
func TestEmptyPoolAndModeLeft(t *testing.T) {
	onStage(t, func(s *stage) {
		dir := s.TempDir()
		p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: dir}}, inventory.Snapshot{Generation: 1,
			Driver: inventory.Driver{Version: "580.95.05"}}).publish()
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
		// its driver is not registered: removal needs no kubelet
		again := s.newPublisher(config.Config{Startup: config.Startup{StateDir: dir}}, snapshotOf(2))
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

// The lead goes over from one process to another with the same state directory, and back. Each
// writes what differs, and nothing else.
func TestSlicesWithChangeOfLeader(t *testing.T) {
	onStage(t, func(s *stage) {
		dir := s.TempDir()
		earlier := s.publisher(dir, 2)
		s.untilPool("1: 0 1")
		earlier.stop()
		if len(earlier.devices.Published().Value()) > 0 || s.pool() != "1: 0 1" {
			s.Errorf("a process that does not lead knows of %v; the pool is %s", earlier.devices.Published().Value(), s.pool())
		}
		for _, gpus := range []int{2, 3, 2} {
			var next *publisher
			n := s.sliceWrites(func() {
				next = s.publisher(dir, gpus)
				s.untilPool(map[int]string{2: "1: 0 1", 3: "1: 0 1 2"}[gpus])
				s.pass(time.Minute)
			})
			if want := map[int]int{2: 1, 3: 1}[gpus]; n > want {
				s.Errorf("%d GPUs: %d writes", gpus, n)
			}
			next.stop()
		}
	})
}

// Whatever the API server does meanwhile: afterwards the pool is as it is to be, and nothing more
// is written.
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

// While the watch of slices is stuck, each change is one write all the same: what a write returned
// counts.
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

// A GPU counts as published before the write whose answer may be lost, and nothing is taken for
// written that is not.
func TestPublishedGPUs(t *testing.T) {
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
func TestSlicesWithoutDisk(t *testing.T) {
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
