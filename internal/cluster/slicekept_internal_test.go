package cluster

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draslices"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// TestGatesThatAreSwitchedOn: an API server is asked once in an hour whether it keeps what it did not keep, without a slice that is changed
// by that, and has all of it as soon as it does, without a restart of the daemon.
func TestGatesThatAreSwitchedOn(t *testing.T) {
	for name, test := range map[string]struct {
		fields  []string
		begin   func(*driver)
		without string // the pool meanwhile
		told    func(draslices.Publication) bool
		there   func(*stage) bool
		writes  int
	}{
		"taints": {
			[]string{"taints"}, func(d *driver) { d.fault(1) }, "1: 0 2", func(p draslices.Publication) bool { return p.NoTaints },
			func(s *stage) bool { return s.pool() == "1: 0 1!xid 2" }, 1,
		},
		"counters": {
			[]string{"sharedCounters", "consumesCounters"}, func(d *driver) { d.partition() }, "1: ",
			func(p draslices.Publication) bool { return p.NoCounters },
			func(s *stage) bool { return strings.Contains(s.pool(), ": 0-mig-3g40gb-9-0 ") }, 3,
		},
		"shares": {
			[]string{"allowMultipleAllocations", "requestPolicy"}, func(d *driver) { d.share(4) }, "1: 0 1 2",
			func(p draslices.Publication) bool { return p.NoShares }, func(s *stage) bool { n, _ := s.shared(); return n == 3 }, 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			s.server.SetDroppedFields(test.fields...)
			d := s.startDriver(t.TempDir(), 3)
			s.untilPool("1: 0 1 2")
			test.begin(d)
			s.until("it is told", func() bool {
				return test.told(d.devices.Publication().Value()) && strings.HasSuffix(s.pool(), test.without[1:])
			})
			writes, before := s.sliceWrites(), s.server.Slices()
			requests := func(want int) func() bool { return func() bool { return s.sliceWrites()-writes == want } }
			for asked := range 2 {
				if s.pass(gateInterval-time.Minute, 10*time.Second); !requests(asked)() {
					t.Errorf("%d requests after %d questions, less than an hour after the last", s.sliceWrites()-writes, asked)
				}
				s.until("a question", requests(asked+1))
			}
			if after := s.server.Slices(); !reflect.DeepEqual(before, after) || !test.told(d.devices.Publication().Value()) {
				t.Errorf("by a question %+v became %+v", before, after)
			}
			s.server.SetDroppedFields()
			s.pass(gateInterval-time.Minute, 10*time.Second)
			s.until("all is kept", func() bool { return test.there(s) && !test.told(d.devices.Publication().Value()) })
			s.until("the watch has seen that", func() bool { // before what this process knows of it is too old
				seen := d.publisher.there.Value()
				return seen.ResourceVersion != "" && !slices.ContainsFunc(s.server.Slices(), func(slice *resourceapi.ResourceSlice) bool {
					return seen.IsBefore(slice.ResourceVersion)
				})
			})
			s.pass(3*time.Hour, 10*time.Second)
			if !requests(3 + test.writes)() {
				t.Errorf("%d requests, want three questions and %d writes", s.sliceWrites()-writes, test.writes)
			}
		})
	}
}

// TestIllWithoutTaints: where the API server keeps no taints, a GPU that is ill leaves its slice, kubelet is asked whether a pod has it, and it
// stays the GPU of claims: it is never the device plugin's, and in its slice again as soon as it is well.
func TestIllWithoutTaints(t *testing.T) {
	s := newStage(t)
	s.server.SetDroppedFields("taints")
	d := s.startDriver(t.TempDir(), 2)
	s.untilPool("1: 0 1")
	d.configs.Publish(config.Config{DRA: config.DRA{Mode: config.DRAAll}})
	asked := make(users, 100)
	defer d.arbitrate(t, asked)()
	d.fault(1)
	s.untilPool("1: 0")
	s.until("kubelet is asked", func() bool { return len(asked) > 0 })
	s.until("it is the GPU of claims still", func() bool {
		owner := d.owners.Value()["GPU-1"]
		if owner == dra.OwnedByPlugin {
			t.Fatal("the device plugin has it")
		}
		return owner == dra.OwnedByDRA
	})
	s.pass(10*time.Minute, 5*time.Second)
	const seconds = 10 // that it is left to a process that may have taken it out
	if n := len(asked); n > seconds+2 || s.pool() != "1: 0" {
		t.Errorf("kubelet was asked %d times; the pool is %s", n, s.pool())
	}
	for range len(asked) {
		if uuids := <-asked; !slices.Equal(uuids, []string{"GPU-1"}) {
			t.Errorf("kubelet was asked about %v", uuids)
		}
	}
	d.fault()
	s.untilPool("1: 0 1")
}

// users takes note of what kubelet is asked. No pod has a GPU.
type users chan []string

func (u users) Users(_ context.Context, uuids []string) ([]kubelet.HeldDevice, error) {
	u <- uuids
	return nil, nil
}
