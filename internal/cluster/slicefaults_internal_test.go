package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// Whatever the API server does meanwhile: afterwards the pool is as it is to be, and nothing more is written.
func TestFaultsWhilePublishing(t *testing.T) {
	for _, fault := range apiserver.Faults() {
		t.Run(fault.Name, func(t *testing.T) {
			s := newStage(t)
			d := s.startDriver(t.TempDir(), 2)
			s.untilPool("1: 0 1")
			during := func(what func()) {
				t.Helper()
				if err := fault.Begin(s.server); err != nil {
					t.Fatal(err)
				}
				what()
				s.pass(time.Minute, time.Second)
				if err := fault.End(s.server); err != nil {
					t.Fatal(err)
				}
			}
			during(func() { d.fault(1) })
			s.untilPool("1: 0 1!xid")
			during(func() {
				if err := s.server.WipeSlices(nodeName); err != nil {
					t.Error(err)
				}
				d.fault()
			})
			s.untilPool("1: 0 1")
			s.until("no problem", func() bool { return d.devices.Publication().Value().Problem == "" })
			s.until("the watch has seen the last write", func() bool { // before what this process knows of it is too old
				seen := d.publisher.there.Value()
				return seen.ResourceVersion != "" && !seen.IsBefore(s.server.Slices()[0].ResourceVersion)
			})
			before := s.sliceWrites()
			s.pass(30*time.Minute, 5*time.Second)
			if n := s.sliceWrites() - before; n != 0 {
				t.Errorf("%d writes of nothing", n)
			}
		})
	}
}

// A process that starts and cannot read what was published asks the API server, and goes on from there: in the modes with slices nothing is
// written, and in the mode without any the device plugin gets the GPUs.
func TestDamagedPublished(t *testing.T) {
	for mode, want := range map[config.DRAMode]dra.Ownership{config.DRAAll: dra.OwnedByDRA, config.DRAOff: dra.OwnedByPlugin} {
		t.Run(mode.String(), func(t *testing.T) {
			s, dir := newStage(t), t.TempDir()
			if mode == config.DRAAll {
				before := s.startDriver(dir, 2)
				s.untilPool("1: 0 1")
				before.stop()
			}
			if err := os.WriteFile(filepath.Join(dir, "dra-published.json"), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			writes := s.sliceWrites()
			d := s.newDriver(dir, inventory.Snapshot{})
			d.configs.Publish(config.Config{DRA: config.DRA{Mode: mode}})
			d.owners.Publish(nil)
			defer d.arbitrate(t, nil)()
			d.snapshots.Publish(snapshotOf(2))
			s.until("each GPU has an owner", func() bool {
				owners := d.owners.Value()
				return owners["GPU-0"] == want && owners["GPU-1"] == want
			})
			d.registered(1)
			s.pass(time.Minute, time.Second)
			if n := s.sliceWrites() - writes; n != 0 {
				t.Errorf("%d writes; the pool is %s", n, s.pool())
			}
		})
	}
}

// An API server that drops taints shows no device that must not be given away; the others stay.
func TestDroppedTaints(t *testing.T) {
	s := newStage(t)
	s.server.SetDroppedFields("taints")
	d := s.startDriver(t.TempDir(), 3)
	s.untilPool("1: 0 1 2")
	d.fault(1)
	s.untilPool("1: 0 2")
	before := s.sliceWrites()
	d.fault(1, 2)
	s.untilPool("1: 0")
	s.pass(10*time.Minute, 5*time.Second)
	if n := s.sliceWrites() - before; n != 1 {
		t.Errorf("%d writes of a second fault", n)
	}
	if p := d.devices.Publication().Value(); !p.NoTaints || p.NoCounters {
		t.Errorf("it is told as %+v", p)
	}
	d.fault()
	s.untilPool("1: 0 1 2")
}

// partition has the GPUs be in MIG mode, with two MIG devices each that can be made for claims.
func (d *driver) partition() {
	snapshot, divisions := d.snapshots.Value(), dra.Divisions{}
	snapshot.Generation++
	snapshot.GPUs = slices.Clone(snapshot.GPUs)
	for i := range snapshot.GPUs {
		snapshot.GPUs[i].MIG = inventory.MIGEnabled
		divisions[snapshot.GPUs[i].UUID] = dra.Divided{Profiles: []inventory.MIGProfile{{
			Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4}, Attributes: inventory.MIGAttributes{GISlices: 3, CISlices: 3},
		}}}
	}
	d.divisions.Publish(divisions)
	d.snapshots.Publish(snapshot)
}

// Devices with counters are published as they are to be, in any version of the API. One GPU that becomes ill is one write.
func TestCounters(t *testing.T) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			s := newStage(t)
			s.server.SetResourceVersions(version)
			d := s.startDriver(t.TempDir(), 3)
			s.untilPool("1: 0 1 2")
			d.partition()
			const devices = "0-mig-3g40gb-9-0 0-mig-3g40gb-9-4 1-mig-3g40gb-9-0 1-mig-3g40gb-9-4 2-mig-3g40gb-9-0 2-mig-3g40gb-9-4"
			s.untilPool("2: " + devices)
			all := s.server.Slices()
			if sets := all[0].Spec.SharedCounters; len(all) != 3 || len(sets) != 3 || len(sets[2].Counters) != 8 || len(all[1].Spec.Devices[0].ConsumesCounters) != 1 {
				t.Fatalf("%d slices, counters %v", len(all), sets)
			}
			before := s.sliceWrites()
			d.fault(2)
			s.untilPool("2: " + strings.ReplaceAll(devices, "2-mig-3g40gb-9-0 2-mig-3g40gb-9-4", "2-mig-3g40gb-9-0!xid 2-mig-3g40gb-9-4!xid"))
			s.pass(10*time.Minute, 5*time.Second)
			if n := s.sliceWrites() - before; n != 1 {
				t.Errorf("%d writes of a fault", n)
			}
		})
	}
}

// An API server that drops counters is never shown a device that needs some: the scheduler would give the same part of a GPU twice.
func TestDroppedCounters(t *testing.T) {
	s := newStage(t)
	s.server.SetDroppedFields("sharedCounters", "consumesCounters")
	d := s.startDriver(t.TempDir(), 3)
	s.untilPool("1: 0 1 2")
	before := s.sliceWrites()
	d.partition()
	s.until("an empty pool", func() bool { p := s.pool(); return strings.HasSuffix(p, ": ") })
	s.pass(10*time.Minute, 5*time.Second)
	if n := s.sliceWrites() - before; n != 2 {
		t.Errorf("%d writes, want one of counters, and one of the empty slice: no device may be shown in between", n)
	}
	if p := d.devices.Publication().Value(); !p.NoCounters || p.NoTaints {
		t.Errorf("it is told as %+v", p)
	}
}

// share has GPUs be given in shares, to at most so many claims each.
func (d *driver) share(most int) {
	c := d.configs.Value()
	c.DRA.Shares = most
	d.configs.Publish(c)
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

// TestShares: GPUs are given in shares and whole again by one write each, in any version of the API, and a further process finds nothing to
// write. What another program makes of the rules of shares is undone.
func TestShares(t *testing.T) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			s := newStage(t)
			s.server.SetResourceVersions(version)
			dir := t.TempDir()
			d := s.startDriver(dir, 3)
			s.untilPool("1: 0 1 2")
			before := s.sliceWrites()
			d.share(4)
			given := func(want int) func() bool { return func() bool { n, _ := s.shared(); return n == want } }
			s.until("three shared GPUs", given(3))
			if _, least := s.shared(); least != "20Gi" || s.pool() != "1: 0 1 2" {
				t.Errorf("the least share is %s, and the pool %s", least, s.pool())
			}
			d.stop()
			next := s.newDriver(dir, d.snapshots.Value())
			next.share(4)
			s.until("a pool with shares", func() bool {
				pool := next.devices.Pools().Value()
				return len(pool.Slices) == 1 && pool.Slices[0].Shared()
			})
			next.registered(1)
			s.until("no problem", func() bool { return next.devices.Publication().Value().Slices == 1 })
			if n := s.sliceWrites() - before; n != 1 {
				t.Errorf("%d writes of shares by two processes", n)
			}
			err := s.server.ChangeSlice(s.server.Slices()[0].Name, func(slice *resourceapi.ResourceSlice) {
				memory := slice.Spec.Devices[0].Capacity["memory"]
				memory.RequestPolicy = nil
				slice.Spec.Devices[0].Capacity["memory"] = memory
			})
			if err != nil {
				t.Fatal(err)
			}
			s.until("the rules of shares are back", func() bool { return s.server.Slices()[0].Spec.Devices[0].Capacity["memory"].RequestPolicy != nil })
			next.share(0)
			s.until("no shared GPU", given(0))
			if s.pool() != "1: 0 1 2" {
				t.Errorf("the pool is %s", s.pool())
			}
		})
	}
}

// TestDroppedShares: an API server that does not know devices for several claims gives GPUs whole from the one write on, and that is told.
func TestDroppedShares(t *testing.T) {
	s := newStage(t)
	s.server.SetDroppedFields("allowMultipleAllocations", "requestPolicy")
	d := s.startDriver(t.TempDir(), 3)
	s.untilPool("1: 0 1 2")
	before := s.sliceWrites()
	d.share(4)
	s.until("it is told", func() bool { return d.devices.Publication().Value().NoShares })
	d.fault(1)
	s.untilPool("1: 0 1!xid 2")
	d.fault()
	s.untilPool("1: 0 1 2")
	s.pass(10*time.Minute, 5*time.Second)
	n, _ := s.shared()
	if writes := s.sliceWrites() - before; n != 0 || writes != 3 || d.devices.Publication().Value().Problem != "" {
		t.Errorf("%d shared GPUs, %d writes, want one that is not kept and two of health; %+v", n, writes, d.devices.Publication().Value())
	}
	d.share(0)
	s.until("it is not told where no shares are wanted", func() bool { return !d.devices.Publication().Value().NoShares })
	if n := s.sliceWrites() - before; n != 3 {
		t.Errorf("%d writes", n)
	}
}

// An API server that serves an older version alone gets that; one that changes to another version, that one.
func TestOlderVersions(t *testing.T) {
	for _, version := range []string{"v1beta2", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			s := newStage(t)
			s.server.SetResourceVersions(version)
			d := s.startDriver(t.TempDir(), 2)
			s.untilPool("1: 0 1")
			d.fault(0)
			s.untilPool("1: 0!xid 1")
			s.pass(10*time.Minute, 5*time.Second)
			if n := s.sliceWrites(); n < 2 || n > 4 { // the first one is tried in each version
				t.Errorf("%d writes", n)
			}
			s.server.SetResourceVersions("v1")
			s.server.DropWatches()
			if err := s.server.WipeSlices(nodeName); err != nil {
				t.Fatal(err)
			}
			s.untilPool("1: 0!xid 1")
		})
	}
	t.Run("none", func(t *testing.T) {
		s := newStage(t)
		s.server.SetResourceVersions()
		d := s.startDriver(t.TempDir(), 2)
		s.until("a problem", func() bool { return strings.Contains(d.devices.Publication().Value().Problem, "resource.k8s.io") })
		s.server.SetResourceVersions("v1")
		s.untilPool("1: 0 1")
	})
}

// What another program changes is set right; one that does so again and again is left alone, and that is told.
func TestOtherPublisher(t *testing.T) {
	s := newStage(t)
	d := s.startDriver(t.TempDir(), 2)
	s.untilPool("1: 0 1")
	name := s.server.Slices()[0].Name
	change := func(to int64) {
		t.Helper()
		if err := s.server.ChangeSlice(name, func(slice *resourceapi.ResourceSlice) {
			slice.Spec.Devices, slice.Spec.Pool.Generation = slice.Spec.Devices[:1], to
		}); err != nil {
			t.Fatal(err)
		}
	}
	soon := func(what string, is func() bool) { // the clock that changes are counted by moves by seconds, however slow the machine is
		t.Helper()
		left := time.Minute
		for deadline := time.Now().Add(patience); !is(); left -= time.Second {
			if time.Now().After(deadline) {
				t.Fatalf("never: %s; the pool is %s", what, s.pool())
			}
			if <-time.After(10 * time.Millisecond); left > 0 {
				s.clock.Step(time.Second)
			}
		}
	}
	told := func() bool { return strings.Contains(d.devices.Publication().Value().Problem, "another program") }
	// A change that comes before the answer to our own write may count as that write. So there may be some more than three.
	generation := int64(7)
	change(generation)
	soon("that is told", func() bool {
		if !told() && s.pool() == fmt.Sprintf("%d: 0 1", generation) {
			generation++
			change(generation)
		}
		return told()
	})
	if generation < 9 || generation > 15 {
		t.Errorf("the slices are left alone after %d changes", generation-6)
	}
	before := s.sliceWrites()
	s.pass(9*time.Minute, 5*time.Second)
	if n := s.sliceWrites() - before; n != 0 || s.pool() != fmt.Sprintf("%d: 0", generation) {
		t.Errorf("%d writes, pool %s", n, s.pool())
	}
	s.untilPool(fmt.Sprintf("%d: 0 1", generation))
	s.until("no problem", func() bool { return d.devices.Publication().Value().Problem == "" })
}

// Writes whose answers are lost are no changes by another program, also when the pool is another one by then.
func TestLostAnswers(t *testing.T) {
	s := newStage(t)
	d := s.startDriver(t.TempDir(), 2)
	s.untilPool("1: 0 1")
	lost := apiserver.Fault{Status: 500, Late: true, Only: func(r apiserver.Request) bool {
		return r.Resource == "resourceslices" && r.IsWrite()
	}}
	for _, change := range []struct {
		bad  []int
		want string
	}{{[]int{0}, "1: 0!xid 1"}, {[]int{1}, "1: 0 1!xid"}, {nil, "1: 0 1"}, {[]int{0}, "1: 0!xid 1"}} {
		if err := s.server.WipeSlices(nodeName); err != nil {
			t.Fatal(err)
		}
		s.server.SetFault(lost)
		d.fault(change.bad...)
		s.until("something is written", func() bool { return s.pool() != "none" })
		d.fault()
		s.pass(time.Minute, time.Second)
		d.fault(change.bad...)
		s.server.SetFault(apiserver.Fault{})
		s.untilPool(change.want)
	}
	s.until("no problem", func() bool { return d.devices.Publication().Value().Problem == "" })
	d.stop()
	if l := d.publisher.ledger; len(l.struck) > 0 || !l.leave.IsZero() {
		t.Errorf("own writes count as those of another program at %v", l.struck)
	}
}

// Slices that another driver of this name has left are removed, those of other nodes and drivers are not.
func TestLeftSlices(t *testing.T) {
	s := newStage(t)
	slice := func(name, driver, node, pool string) {
		t.Helper()
		if err := s.server.ChangeSlice(name, func(slice *resourceapi.ResourceSlice) {
			slice.Spec = resourceapi.ResourceSliceSpec{
				Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: pool, Generation: 4, ResourceSliceCount: 1},
				Devices: []resourceapi.Device{{Name: "gpu-0"}},
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	slice("a", dra.Driver, nodeName, nodeName)
	slice("b", dra.Driver, nodeName, "another-pool")
	slice("c", dra.Driver, "node-2", "node-2")
	slice("d", "compute-domain.nvidia.com", nodeName, nodeName)
	s.startDriver(t.TempDir(), 2)
	s.until("only theirs are left", func() bool {
		var names []string
		for _, slice := range s.server.Slices() {
			names = append(names, slice.Name)
		}
		return slices.Equal(names, []string{"c", "d", nodeName + "-gpu.nvidia.com-0"})
	})
}

// While a driver of another program has the name, nothing is written; without a Node nothing is published, and soon after there is one it
// is.
func TestWaits(t *testing.T) {
	s := newStage(t)
	if err := s.server.DeleteNode(nodeName); err != nil {
		t.Fatal(err)
	}
	d := s.newDriver(t.TempDir(), snapshotOf(1))
	d.driver.Publish(draplugin.Status{Foreign: filepath.Join("x", "gpu.nvidia.com.sock")})
	d.registered(1)
	s.pass(time.Minute, time.Second)
	if n := d.requestsMade(); n != 0 {
		t.Errorf("%d requests beside another driver", n)
	}
	d.driver.Publish(draplugin.Status{Registered: true, Registrations: 1})
	s.until("a problem", func() bool { return strings.Contains(d.devices.Publication().Value().Problem, "no Node") })
	s.change(func(*corev1.Node) {})
	s.untilPool("1: 0")
}
