package serve

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// oneGPU is a resource with one device.
func oneGPU() resource.Resource {
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "GPU-0",
		Health: inventory.Health{State: inventory.Healthy}}}}
	return resource.New(snapshot, resource.Options{}).Resources[0]
}

// A device that nobody asked for may be held while kubelet's checkpoint cannot be read, but not for
// longer than a moment.
func TestAnUnreadableCheckpointHoldsADeviceForTenSeconds(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	s := NewServers(Collaborators{Clock: c})
	s.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
	l := s.resources["nvidia.com/gpu"].list
	s.Apply(resource.Plan{}, Options{}, 1)
	began := c.Now()
	for _, at := range []time.Duration{0, 10*time.Second - 1, 10 * time.Second} {
		c.SetTime(began.Add(at))
		s.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.Now(), UnknownBecause: "damaged", Unreadable: true}}, c.Now())
		if got, want := l.retiring["GPU-0"].Counts(), at < 10*time.Second; got != want {
			t.Errorf("after %v: held = %v, want %v", at, got, want)
		}
	}
}

// The ten seconds begin anew when the checkpoint could be read meanwhile. Who waits is told when
// they are over, and what a device waits for.
func TestAnUnreadableCheckpointThatWasReadMeanwhile(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	s := NewServers(Collaborators{Clock: c})
	s.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
	l := s.resources["nvidia.com/gpu"].list
	s.Apply(resource.Plan{}, Options{}, 1)
	began, unread := c.Now(), evidence{Account: holders.Account{Kubelet: 1, UnknownBecause: "damaged", Unreadable: true}}
	for _, tt := range []struct {
		at                    time.Duration
		says                  evidence
		held, changed, damage bool
	}{
		{0, unread, true, false, true},
		{9 * time.Second, evidence{Account: holders.Account{Kubelet: 1, Held: map[holders.Key]holders.Holder{keyOf("nvidia.com/gpu", "GPU-0"): {Pod: "p"}}}}, true,
			false, false},
		{12 * time.Second, unread, true, false, true},
		{22 * time.Second, unread, false, true, true},
		{23 * time.Second, unread, false, false, true},
	} {
		c.SetTime(began.Add(tt.at))
		tt.says.Began = c.Now()
		if _, changed := s.update(tt.says, c.Now()); changed != tt.changed {
			t.Errorf("after %v: claims changed: %v, want %v", tt.at, changed, tt.changed)
		}
		s.drop(tt.says, c.Now())
		if d := l.retiringDevices()[0]; l.retiring["GPU-0"].Counts() != tt.held || (d.Waiting == "damaged") != tt.damage {
			t.Errorf("after %v: held = %v, want %v; it waits for %q", tt.at, !tt.held, tt.held, d.Waiting)
		}
	}
	holds := evidence{Account: holders.Account{Kubelet: 1, Held: map[holders.Key]holders.Holder{keyOf("nvidia.com/gpu", "GPU-0"): {Pod: "p"}}}}
	for i, want := range []bool{true, false} {
		if _, changed := l.drop(holds.Account, holders.New()); changed != want {
			t.Errorf("claims changed: %v, want %v, when kubelet says for the %d. time that a pod holds the device", changed,
				want, i+1)
		}
	}
	l.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.Now()}}.Account, holders.New())
	// What a device that nobody holds waits for is nobody's claim.
	if _, changed := l.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.Now()}}.Account, holders.New()); changed {
		t.Error("claims changed when nobody holds the device")
	}
	if got := l.retiringDevices()[0].Waiting; got != "no pod holds it; it is dropped after 10s" {
		t.Errorf("it waits for %q", got)
	}
}

// One device under a resource that this program does not serve is enough: kubelet writes its
// checkpoint when it receives a list.
func TestADeviceUnderAnotherResourceAsksForANewCheckpoint(t *testing.T) {
	t.Parallel()
	s := NewServers(Collaborators{Clock: clocktesting.NewFakeClock(time.Now())})
	s.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
	for resource, want := range map[string]bool{"nvidia.com/gpu": false, "nvidia.com/other": true} {
		held := map[holders.Key]holders.Holder{keyOf(resource, "GPU-0"): {Pod: "p"}}
		if got := s.drop(evidence{Account: holders.Account{Kubelet: 1, Held: held}}, time.Now()); got != want {
			t.Errorf("a pod holds a device of %s: the checkpoint may be outdated: %v, want %v", resource, got, want)
		}
	}
}

func TestTheListIsSentAgainWhileTheCheckpointMayBeOutdated(t *testing.T) {
	t.Parallel()
	key := keyOf("nvidia.com/gpu", "GPU-0")
	var afresh resendPacing
	for i, outdated := range []bool{true, true, false, true} {
		if got, want := afresh.due(time.Unix(1, 0), outdated), i == 0 || i == 3; got != want {
			t.Errorf("reading %d: the list is sent again: %v, want %v", i, got, want)
		}
	}
	tests := map[string]struct {
		says evidence
		at   []int // the seconds at which the list is sent again
	}{
		"PodResources names the pod, too": {evidence{Account: holders.Account{Kubelet: 1, Held: map[holders.Key]holders.Holder{key: {Pod: "p"}}}}, nil},
		"no holder":                       {evidence{Account: holders.Account{Kubelet: 1}}, nil},
		"only the checkpoint names one": {
			evidence{Account: holders.Account{Kubelet: 1, Held: map[holders.Key]holders.Holder{key: {Pod: "p", CheckpointOnly: true}}}}, []int{0, 1, 3, 7, 15, 31,
				61, 91},
		},
		"the checkpoint cannot be read": {evidence{Account: holders.Account{Kubelet: 1, UnknownBecause: "damaged", Unreadable: true}},
			[]int{0, 1, 3, 7, 15, 31, 61, 91}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, r := clocktesting.NewFakeClock(time.Now()), oneGPU()
			s := NewServers(Collaborators{Clock: c})
			l := s.add(r.Name).list
			l.replace(r, holders.New())
			l.publish(r, Options{}, nil)
			l.replace(resource.Resource{Name: r.Name}, holders.New())
			var pacing resendPacing
			var at []int
			for second := range 100 {
				if pacing.due(c.Now(), s.drop(test.says, c.Now())) {
					at = append(at, second)
				}
				c.Step(time.Second)
			}
			if !slices.Equal(at, test.at) {
				t.Errorf("sent again at %v, want %v", at, test.at)
			}
		})
	}
}

// Node 0 is a NUMA node as any other; a device may have none, and an adopted one has those that
// kubelet noted.
func TestNUMANodesOfAListedDevice(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		node  int
		noted []int64
		want  []int64
	}{{0, nil, []int64{0}}, {1, nil, []int64{1}}, {inventory.NoNUMANode, nil, nil}, {1, []int64{0, 2}, []int64{0, 2}}} {
		var got []int64
		for _, n := range near(resource.Device{ID: "GPU-0", NUMANode: tt.node}, tt.noted).GetNodes() {
			got = append(got, n.GetID())
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("node %d, noted %v: %v, want %v", tt.node, tt.noted, got, tt.want)
		}
	}
}

// TestADeviceThatLeavesThePlanAgain: while it is back, it may not be offered. Whether a pod may
// hold it then is as before.
func TestADeviceThatLeavesThePlanAgain(t *testing.T) {
	t.Parallel()
	for _, free := range []bool{false, true} {
		c, r := clocktesting.NewFakeClock(time.Now()), oneGPU()
		gone := resource.Resource{Name: r.Name}
		l := newList(r.Name, c)
		l.replace(r, holders.New())
		l.publish(r, Options{}, nil)
		l.replace(gone, holders.New())
		if free {
			c.Step(time.Hour)
			l.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.Now()}}.Account, holders.New())
		}
		l.replace(r, holders.New())
		l.publish(r, Options{}, map[string]bool{"GPU-0": true})
		l.replace(gone, holders.New())
		if got := l.retiring["GPU-0"]; got.CannotBeHeld() != free || got.Counts() == free {
			t.Errorf("free before: %v; afterwards it cannot be held: %v, counts %v", free, got.CannotBeHeld(), got.Counts())
		}
	}
}

// TestADeviceThatWasOnOfferMayBeHeld, also if it was withheld when it left the plan.
func TestADeviceThatWasOnOfferMayBeHeld(t *testing.T) {
	t.Parallel()
	r := oneGPU()
	l := newList(r.Name, clocktesting.NewFakeClock(time.Now()))
	for _, withheld := range []bool{false, true} {
		l.replace(r, holders.New())
		l.publish(r, Options{}, map[string]bool{"GPU-0": withheld})
	}
	l.replace(resource.Resource{Name: r.Name}, holders.New())
	if got := l.retiring["GPU-0"]; got.CannotBeHeld() || !got.Counts() {
		t.Errorf("it cannot be held: %v, counts %v, want that it counts as held", got.CannotBeHeld(), got.Counts())
	}
}

// TestOneDeviceOfSeveralIsEnough for the list to change, and for a new checkpoint to say more.
func TestOneDeviceOfSeveralIsEnough(t *testing.T) {
	t.Parallel()
	for round := range 20 { // devices come in any order
		c := clocktesting.NewFakeClock(time.Now())
		l := newList(gpuName, c)
		l.adopt(map[string][]int64{"GPU-0": nil, "GPU-1": nil, "GPU-2": nil})
		said := evidence{Account: holders.Account{Kubelet: 1, Held: map[holders.Key]holders.Holder{keyOf(gpuName, "GPU-0"): {Pod: "p"},
			keyOf(gpuName, "GPU-2"): {Pod: "p"}}}}
		l.drop(said.Account, holders.New())
		said.Held[keyOf(gpuName, "GPU-1")] = holders.Holder{Pod: "p", CheckpointOnly: true}
		if outdated, changed := l.drop(said.Account, holders.New()); !outdated || !changed {
			t.Fatalf("round %d: outdated %v, changed %v, want both", round, outdated, changed)
		}
	}
}

// TestAListThatSaysTheSameIsKept: streams send what is another response.
func TestAListThatSaysTheSameIsKept(t *testing.T) {
	t.Parallel()
	device := func(id string, healthy bool, node int) resource.Device {
		return resource.Device{ID: id, UUID: id, Healthy: healthy, NUMANode: node}
	}
	before := device("GPU-0", true, 1)
	for name, tt := range map[string]struct {
		now  []resource.Device
		kept bool
	}{
		"the same":        {[]resource.Device{before}, true},
		"another ID":      {[]resource.Device{device("GPU-1", true, 1)}, false},
		"Unhealthy":       {[]resource.Device{device("GPU-0", false, 1)}, false},
		"of another node": {[]resource.Device{device("GPU-0", true, 0)}, false},
		"of no node":      {[]resource.Device{device("GPU-0", true, inventory.NoNUMANode)}, false},
		"one more":        {[]resource.Device{before, device("GPU-1", true, 1)}, false},
	} {
		l := newList(gpuName, clocktesting.NewFakeClock(time.Now()))
		l.publish(resource.Resource{Devices: []resource.Device{before}}, Options{}, nil)
		first := l.views.Value().response
		l.publish(resource.Resource{Devices: tt.now}, Options{}, nil)
		if kept := l.views.Value().response == first; kept != tt.kept {
			t.Errorf("%s: the response is kept: %v, want %v", name, kept, tt.kept)
		}
	}
}

// TestWhatFitsIntoAList: planned devices that kubelet does not have leave room for retiring ones,
// the last first, and only as many as must.
func TestWhatFitsIntoAList(t *testing.T) {
	t.Parallel()
	planned := func() []*pluginapi.Device {
		var all []*pluginapi.Device
		for _, id := range []string{"a", "b", "c"} {
			all = append(all, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
		}
		return all
	}
	size := func(all ...*pluginapi.Device) int { return proto.Size(&pluginapi.ListAndWatchResponse{Devices: all}) }
	each := size(planned()[0])
	filled := func(excess int) *pluginapi.Device { // a device with which the list is so much too long
		d := &pluginapi.Device{ID: strings.Repeat("x", resource.MaxList/2)}
		more := resource.MaxList + excess - size(planned()...) - size(d)
		d.ID += strings.Repeat("x", more)
		return d
	}
	for name, tt := range map[string]struct {
		excess int
		listed string
		want   string
	}{
		"it just fits":                  {0, "", "abc"},
		"a byte too much":               {1, "", "ab"},
		"one device too much":           {each, "", "ab"},
		"and a byte more":               {each + 1, "", "a"},
		"kubelet has the last":          {1, "c", "ac"},
		"kubelet has all but the first": {each, "bc", "bc"},
		"kubelet has all":               {each, "abc", "abc"},
		"all must go":                   {3 * each, "", ""},
	} {
		got := ""
		for _, d := range leaveRoom(planned(), []*pluginapi.Device{filled(tt.excess)},
			func(id string) bool { return strings.Contains(tt.listed, id) }) {
			got += d.GetID()
		}
		if got != tt.want {
			t.Errorf("%s: planned devices %q stay, want %q", name, got, tt.want)
		}
	}
}

// TestWhatKubeletHasInItsListStays: what this process listed last, or what another one did since.
func TestWhatKubeletHasInItsListStays(t *testing.T) {
	t.Parallel()
	l := newList(gpuName, clocktesting.NewFakeClock(time.Now()))
	l.publish(resource.Resource{Devices: []resource.Device{{ID: "GPU-0"}}}, Options{}, nil)
	has := func(want ...string) {
		t.Helper()
		listed := l.listedBefore()
		for _, id := range []string{"GPU-0", "GPU-1", "GPU-2"} {
			if listed(id) != slices.Contains(want, id) {
				t.Errorf("kubelet has %s: %v, want %q", id, listed(id), want)
			}
		}
	}
	has("GPU-0")
	l.adopt(map[string][]int64{"GPU-1": nil, "GPU-2": nil})
	has("GPU-1", "GPU-2")
	l.publish(resource.Resource{}, Options{}, nil)
	has("GPU-1", "GPU-2") // they depart
	delete(l.retiring, "GPU-2")
	l.publish(resource.Resource{}, Options{}, nil)
	has("GPU-1")
}

// TestWhatIsAdopted: devices that neither are of the plan nor depart already.
func TestWhatIsAdopted(t *testing.T) {
	t.Parallel()
	l := newList(gpuName, clocktesting.NewFakeClock(time.Now()))
	l.replace(oneGPU(), holders.New())
	l.publish(oneGPU(), Options{}, nil)
	for _, tt := range []struct {
		known   []string
		changed bool
		departs string
	}{{nil, false, ""}, {[]string{"GPU-0"}, false, ""}, {[]string{"GPU-0", "GPU-1"}, true, "GPU-1"}, {[]string{"GPU-1"},
		false, "GPU-1"}} {
		known := map[string][]int64{}
		for _, id := range tt.known {
			known[id] = []int64{int64(len(tt.known))}
		}
		changed := l.adopt(known)
		departs := strings.Join(slices.Sorted(maps.Keys(l.retiring)), ",")
		if changed != tt.changed || departs != tt.departs {
			t.Errorf("kubelet knows %q: changed %v, want %v; %q depart, want %q", tt.known, changed, tt.changed, departs,
				tt.departs)
		}
	}
	if d := l.retiring["GPU-1"]; !slices.Equal(d.nodes, []int64{2}) || !d.Counts() || d.WaitsFor() != "kubelet's checkpoint was not read since the device left the plan" {
		t.Errorf("the adopted device: %+v", d)
	}
}
