package cluster_test

import (
	"context"
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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A process that starts and cannot read what was published asks the API server, and goes on from
// there: in the modes with slices nothing is written, and in the mode without any the device plugin
// gets the GPUs.
func TestDamagedPublished(t *testing.T) {
	for mode, want := range map[config.DRAMode]dra.Ownership{config.DRAAll: dra.OwnedByDRA,
		config.DRAOff: dra.OwnedByPlugin} {
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
					p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: dir}}, inventory.Snapshot{})
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

// A process that starts beside an ill GPU asks first whether the API server keeps taints. So a GPU is
// never shown as one without a fault, not even for a moment, and where taints are kept it is one
// write. A process that may not ask writes, and sees it in the answer.
func TestUnhealthyGPUFromTheStart(t *testing.T) {
	refuses := apiserver.Fault{Status: 403, Path: "dryRun="}
	for name, tt := range map[string]struct {
		drops  []string
		fault  apiserver.Fault
		want   string
		writes int
	}{
		"kept":                     {nil, apiserver.Fault{}, "1: 0 1!xid", 2},
		"dropped":                  {[]string{"taints"}, apiserver.Fault{}, "1: 0", 2},
		"dropped, and no question": {[]string{"taints"}, refuses, "1: 0", 3},
		"kept, and no question":    {nil, apiserver.Fault{Status: 409, Path: "dryRun="}, "1: 0 1!xid", 2},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				s.server.SetDroppedFields(tt.drops...)
				s.server.SetFault(tt.fault)
				first := snapshotOf(2)
				first.GPUs[1].Health = inventory.Health{State: inventory.Unhealthy, XID: 79, Remedy: inventory.RemedyReset}
				p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: s.TempDir()}}, first)
				var mu sync.Mutex
				shown := map[string]bool{}
				p.requested = func(string, string, int) {
					mu.Lock()
					defer mu.Unlock()
					shown[s.pool()] = true
				}
				p.publish()
				if n := s.sliceWrites(func() {
					p.registered(1)
					s.untilPool(tt.want)
					s.pass(10 * time.Minute)
				}); n != tt.writes {
					s.Errorf("%d requests, want %d", n, tt.writes)
				}
				if p.told().NoTaints != (tt.drops != nil) || p.told().Problem != "" {
					s.Errorf("it is told as %+v", p.told())
				}
				mu.Lock()
				defer mu.Unlock()
				if exposed := tt.drops != nil && tt.fault.Status != 0; shown["1: 0 1"] != exposed || !shown[tt.want] {
					s.Errorf("the pools were %v", shown)
				}
			})
		})
	}
}

// An API server of Kubernetes 1.34 with the gate for counters has other rules for them, and refuses
// the slices. No MIG devices are made for claims then, the other GPUs are given, and an hour later
// the refusal is no error.
func TestRefusedCounters(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetCountersBesideDevices(true)
		p := s.publisher(s.TempDir(), 3)
		s.untilPool("1: 0 1 2")
		p.partition()
		s.until("an empty pool, and it is told", func() bool { return strings.HasSuffix(s.pool(), ": ") && p.told().NoCounters })
		if told := p.told(); told.Problem != "" {
			s.Errorf("it is told as %+v", told)
		}
		if n := s.sliceWrites(func() { s.pass(2*time.Hour + time.Minute) }); n != 2 {
			s.Errorf("%d questions in two hours", n)
		}
		if n := p.logged("Cannot check whether"); n != 0 {
			s.Errorf("%d errors of a question", n)
		}
		s.server.SetCountersBesideDevices(false) // an upgrade
		s.pass(40 * time.Minute)
		s.until("all is kept", func() bool { return strings.Contains(s.pool(), ": 0-mig-3g40gb-9-0 ") && !p.told().NoCounters })
	})
}

// versions are those of the API in which slices are published.
var versions = []string{"v1", "v1beta2", "v1beta1"}

// Devices with counters are published as they are to be, in any version of the API. One GPU that
// becomes ill is one write.
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
				if sets := all[0].Spec.SharedCounters; len(all) != 3 || len(sets) != 3 || len(sets[2].Counters) != 8 ||
					len(all[1].Spec.Devices[0].ConsumesCounters) != 1 {
					s.Fatalf("%d slices, counters %v", len(all), sets)
				}
				if n := s.sliceWrites(func() {
					p.fault(2)
					s.untilPool("2: " + strings.ReplaceAll(devices, "2-mig-3g40gb-9-0 2-mig-3g40gb-9-4",
						"2-mig-3g40gb-9-0!xid 2-mig-3g40gb-9-4!xid"))
					s.pass(10 * time.Minute)
				}); n != 1 {
					s.Errorf("%d writes of a fault", n)
				}
			})
		})
	}
}

// An API server that drops counters is never shown a device that needs some: the scheduler would
// give the same part of a GPU twice.
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

// GPUs are given in shares and whole again by one write each, in any version of the API, and a
// further process finds nothing to write. What another program makes of the rules of shares is
// undone.
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
					next = s.newPublisher(config.Config{Startup: config.Startup{StateDir: dir}}, p.Snapshots.Value())
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

// An API server that does not know devices for several claims gives GPUs whole from the one write
// on, and that is told.
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

// An API server is asked once in an hour whether it keeps what it did not keep, without a slice
// that is changed by that, and has all of it as soon as it does, without a restart of the process.
func TestEnabledFeatureGates(t *testing.T) {
	for name, tt := range map[string]struct {
		fields  []string
		begin   func(*publisher)
		without string // the pool meanwhile
		told    func(pool.Publication) bool
		there   func(*stage) bool
		writes  int
	}{
		"taints": {
			[]string{"taints"}, func(p *publisher) { p.fault(1) }, "1: 0 2",
			func(p pool.Publication) bool { return p.NoTaints },
			func(s *stage) bool { return s.pool() == "1: 0 1!xid 2" }, 1,
		},
		"counters": {
			[]string{"sharedCounters", "consumesCounters"}, (*publisher).partition, "1: ",
			func(p pool.Publication) bool { return p.NoCounters },
			func(s *stage) bool { return strings.Contains(s.pool(), ": 0-mig-3g40gb-9-0 ") }, 3,
		},
		"shares": {
			[]string{"allowMultipleAllocations", "requestPolicy"}, func(p *publisher) { p.share(4) }, "1: 0 1 2",
			func(p pool.Publication) bool { return p.NoShares },
			func(s *stage) bool { n, _ := s.shared(); return n == 3 }, 1,
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

// podHolders records the queries for holders. No pod holds a GPU.
type podHolders chan []string

func (u podHolders) Holders(_ context.Context, uuids []string) ([]kubelet.HeldDevice, error) {
	u <- uuids
	return nil, nil
}

// Where the API server keeps no taints, a GPU that is ill leaves its slice. It stays the GPU of
// claims: it is never the device plugin's, and in its slice again as soon as it is well.
func TestUnhealthyGPUWithoutTaints(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetDroppedFields("taints")
		p := s.publisher(s.TempDir(), 2)
		s.untilPool("1: 0 1")
		asked := make(podHolders, 100)
		p.arbitrate(asked)
		p.fault(1)
		s.untilPool("1: 0")
		s.pass(10 * time.Minute)
		if owner := p.owners.Value()["GPU-1"]; owner != dra.OwnedByDRA || len(asked) > 0 || s.pool() != "1: 0" {
			s.Errorf("the GPU is %s; kubelet was asked %d times; the pool is %s", owner, len(asked), s.pool())
		}
		p.fault()
		s.untilPool("1: 0 1")
	})
}

// An API server that serves an older version alone gets that; one that changes to another version,
// that one.
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

// What another program changes is set right; one that does so three times in ten minutes is left
// alone for ten, and that is told.
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

// Writes whose answers are lost are no changes by another program, also when the pool is another
// one by then.
func TestLostAnswers(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.publisher(s.TempDir(), 2)
		s.untilPool("1: 0 1")
		p.fault(0)
		s.untilPool("1: 0!xid 1") // the API server keeps taints: no more dry runs
		p.fault()
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

// Slices that another driver of this name has left are removed, those of other nodes and drivers
// are not.
func TestLeftoverSlices(t *testing.T) {
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

// While a driver of another program has the name, nothing is written; without a Node nothing is
// published, and soon after there is one it is.
func TestPublishingWaits(t *testing.T) {
	onStage(t, func(s *stage) {
		if err := s.server.DeleteNode(nodeName); err != nil {
			s.Fatal(err)
		}
		p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: s.TempDir()}}, snapshotOf(1)).publish()
		p.driver.Publish(draplugin.Status{Registered: true, Registrations: 1,
			NameConflict: filepath.Join("x", "gpu.nvidia.com.sock")})
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
