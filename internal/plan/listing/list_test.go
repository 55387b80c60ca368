package listing_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestDevicesThatAreNotOfThePlanArePreferredLast: they left it, or kubelet has not
// received the list that has them not.
func TestDevicesThatAreNotOfThePlanArePreferredLast(t *testing.T) {
	t.Parallel()
	c := newNode(t, 0)
	for i := range 3 {
		c.gpus = append(c.gpus, inventory.GPU{UUID: fmt.Sprint("GPU-", i), Index: i})
	}
	c.plan(1)
	for name, tt := range map[string]struct {
		available, required string
		size                int
		want                string // no answer can be right if it is empty
	}{
		"all are of the plan":                 {"GPU-0 GPU-1 GPU-2", "GPU-2", 2, "GPU-0 GPU-2"},
		"enough are of the plan":              {"GPU-x GPU-0 GPU-1", "", 2, "GPU-0 GPU-1"},
		"one too few":                         {"GPU-y GPU-x GPU-0", "", 2, "GPU-0 GPU-x"},
		"two too few":                         {"GPU-y GPU-x GPU-0", "", 3, "GPU-0 GPU-x GPU-y"},
		"three too few":                       {"GPU-y GPU-x GPU-0", "", 4, ""},
		"none is of the plan":                 {"GPU-y GPU-x", "", 1, "GPU-x"},
		"one that must be":                    {"GPU-x GPU-0 GPU-1", "GPU-x", 2, "GPU-0 GPU-x"},
		"one that must be, and too few":       {"GPU-x GPU-y GPU-0", "GPU-y", 3, "GPU-0 GPU-x GPU-y"},
		"the first that must be, and too few": {"GPU-x GPU-y GPU-0", "GPU-x", 3, "GPU-0 GPU-x GPU-y"},
		"as many that must be as wanted":      {"GPU-x GPU-y GPU-0", "GPU-y GPU-x", 2, "GPU-x GPU-y"},
		"one that is named twice":             {"GPU-0 GPU-0 GPU-x GPU-x", "", 2, "GPU-0 GPU-x"},
		"one that is required and free":       {"GPU-0 GPU-x", "GPU-0", 2, "GPU-0 GPU-x"},
	} {
		got, err := c.Latest().Lists[gpuName].Prefer(strings.Fields(tt.available), strings.Fields(tt.required), tt.size)
		slices.Sort(got)
		if text := strings.Join(got, " "); (err != nil) != (tt.want == "") || err == nil && text != tt.want {
			t.Errorf("%s: %q, %v, want %q", name, text, err, tt.want)
		}
	}
}

// excludeAll leaves every GPU out of the plan. The node has them all the same.
func (n *node) excludeAll() {
	n.planWith(resource.Options{Selectors: []resource.Selector{{Models: []resource.Pattern{"*"}, Exclude: true}}})
}

// TestAnUnreadableCheckpointHoldsADevice for ten seconds, which begin again once
// the checkpoint was read.
func TestAnUnreadableCheckpointHoldsADevice(t *testing.T) {
	t.Parallel()
	const second = time.Second
	type step struct {
		at   time.Duration
		held bool
	}
	for name, tt := range map[string]struct {
		named bool // after 9 s, the account names a pod
		steps []step
	}{
		"all the time": {false, []step{{10*second - 1, true}, {10 * second, false}}},
		"read between": {true, []step{{12 * second, true}, {22*second - 1, true}, {22 * second, false}}},
	} {
		c := newNode(t, 1)
		c.plan(1)
		c.excludeAll()
		began := c.now
		c.unreadable()
		c.lists("G0")
		if tt.named {
			c.now = began.Add(8 * second)
			c.holds("G0")
		}
		for _, step := range tt.steps {
			c.now = began.Add(step.at)
			c.unreadable()
			if held := len(c.healthy(gpuName)) == 1; held != step.held {
				t.Errorf("%s, after %v: held: %v", name, step.at, held)
			}
		}
	}
}

// TestWhatADeviceWaitsFor, and that the same reading makes no other decision.
func TestWhatADeviceWaitsFor(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	c.excludeAll()
	waits := func(want string) {
		t.Helper()
		if got := c.Retiring(gpuName)[0]; got.Waiting != want || !strings.Contains(got.Reason, "no longer offers it") {
			t.Errorf("%+v, want that it waits for %q", got, want)
		}
	}
	waits("the kubelet's checkpoint was not read since the device left the plan")
	c.unreadable()
	waits("damaged")
	c.holds("G0")
	waits("pod p holds it")
	c.quiet("the same pod")
	c.holds()
	c.reads() // the GPU was offered until the last reading
	c.quiet("nobody")
	waits("no pod holds it; it is dropped after 10s")
	c.holds("G0")
	c.lists("G0")
}

// TestWhenTheCheckpointMayBeOutdated: only the checkpoint names the pod of a
// retiring device or of a device without a list, or it cannot be read.
func TestWhenTheCheckpointMayBeOutdated(t *testing.T) {
	t.Parallel()
	held := func(name string, checkpointOnly bool) map[holders.Key]holders.Holder {
		return map[holders.Key]holders.Holder{keyOf(name, "G0"): {Pod: "p", CheckpointOnly: checkpointOnly}}
	}
	for name, tt := range map[string]struct {
		account holders.Account
		want    bool
	}{
		"PodResources names the pod":   {holders.Account{Held: held(gpuName, false)}, false},
		"only the checkpoint names it": {holders.Account{Held: held(gpuName, true)}, true},
		"no holder":                    {holders.Account{}, false},
		"under another resource":       {holders.Account{Held: held("nvidia.com/other", false)}, true},
		"unreadable":                   {holders.Account{UnknownBecause: "damaged", Unreadable: true}, true},
	} {
		c := newNode(t, 1)
		c.plan(1)
		c.excludeAll()
		c.plan(1)
		c.excludeAll()
		if tt.account.Held[keyOf("nvidia.com/other", "G0")].Pod != "" {
			c.plan(1)
		}
		if got := c.read(listing.Reading{Account: tt.account}); got != tt.want {
			t.Errorf("%s: outdated: %v", name, got)
		}
	}
}

// TestOneDeviceOfSeveralIsEnough for the list to change, and for a new checkpoint to say more.
func TestOneDeviceOfSeveralIsEnough(t *testing.T) {
	t.Parallel()
	for round := range 20 { // devices come in any order
		c := newNode(t, 3)
		c.plan(1)
		c.excludeAll()
		c.holds("G0", "G2")
		c.held[keyOf(gpuName, "G1")] = holders.Holder{Pod: "p", CheckpointOnly: true}
		before := c.Latest()
		if outdated := c.read(listing.Reading{Account: c.account()}); !outdated || c.Latest() == before {
			t.Fatalf("round %d: outdated %v, another decision %v, want both", round, outdated, c.Latest() != before)
		}
	}
}

// TestADeviceThatLeavesThePlanAgain: while it is back, it may not be offered.
// Whether a pod may hold it then is as before.
func TestADeviceThatLeavesThePlanAgain(t *testing.T) {
	t.Parallel()
	for _, free := range []bool{false, true} {
		c := newNode(t, 1)
		c.plan(1)
		c.excludeAll()
		if free {
			c.now = c.now.Add(time.Hour)
			c.holds()
		}
		c.held = map[holders.Key]holders.Holder{}
		other := listing.Reading{Account: c.account()}
		other.Listed = map[string][]string{"nvidia.com/other": {"G0"}}
		if !free {
			other.UnknownBecause = "damaged" // so that nothing is known of the device itself
		}
		c.read(other)
		c.plan(1)
		c.excludeAll()
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now, UnknownBecause: "damaged"}})
		if held := len(c.healthy(gpuName)) == 1; held == free {
			t.Errorf("free before %v: it counts as held: %v", free, held)
		}
	}
}

// TestNUMANodes: node 0 is a NUMA node like any other; a device may have none, and
// an adopted device has the nodes in the checkpoint.
func TestNUMANodes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		node  int
		noted []int64
		want  []int64
	}{{0, nil, []int64{0}}, {1, nil, []int64{1}}, {inventory.NoNUMANode, nil, nil}, {1, []int64{2, 0}, []int64{0, 2}}} {
		c := newNode(t, 1)
		c.gpus[0].NUMANode = tt.node
		c.holders.Begin(holders.Account{Nodes: map[holders.Key][]int64{keyOf(gpuName, "G0::1"): tt.noted}})
		c.plan(1)
		planned := tt.want
		if tt.noted != nil {
			planned = []int64{int64(tt.node)}
		}
		for i, want := range [][]int64{planned, tt.want} {
			if got := c.Latest().Lists[gpuName].Entries[i].Nodes; !slices.Equal(got, want) {
				t.Errorf("node %d, noted %v: entry %d has %v, want %v", tt.node, tt.noted, i, got, want)
			}
		}
	}
}

// TestWhatIsAdopted: devices that neither are planned nor retire already.
func TestWhatIsAdopted(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	for _, tt := range []struct {
		known   []string
		changed bool
		retire  string
	}{{nil, false, ""}, {[]string{"G0"}, false, ""}, {[]string{"G0", "G1"}, true, "G1"}, {[]string{"G1"}, false, "G1"}} {
		known := map[string][]int64{}
		for _, id := range tt.known {
			known[id] = nil
		}
		before := c.Latest()
		c.State = c.Adopt(gpuName, known, c.holders, c.now)
		var retire []string
		for _, d := range c.Retiring(gpuName) {
			retire = append(retire, d.ID)
		}
		if changed := c.Latest() != before; changed != tt.changed || strings.Join(retire, ",") != tt.retire {
			t.Errorf("the kubelet knows %q: changed %v; %q retire", tt.known, changed, retire)
		}
	}
	if got := c.Adopt("nvidia.com/other", map[string][]int64{"G0": nil}, c.holders, c.now); got.Latest() != c.Latest() {
		t.Error("a device is adopted without a list")
	}
}

// TestWhatFitsIntoAList: planned devices that the kubelet does not have leave room
// for retiring devices, the last first, and only as many as must.
func TestWhatFitsIntoAList(t *testing.T) {
	t.Parallel()
	size := func(id string, health string) int {
		return proto.Size(&pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{{ID: id, Health: health}}})
	}
	each := size("G0", pluginapi.Healthy)
	for name, tt := range map[string]struct {
		excess int
		listed []string
		want   string
	}{
		"it just fits":                      {0, nil, "G0 G1 G2"},
		"a byte too much":                   {1, nil, "G0 G1"},
		"one device too much":               {each, nil, "G0 G1"},
		"and a byte more":                   {each + 1, nil, "G0"},
		"the kubelet has the last":          {1, []string{"G2"}, "G0 G2"},
		"the kubelet has all but the first": {each, []string{"G1", "G2"}, "G1 G2"},
		"the kubelet has all":               {each, []string{"G0", "G1", "G2"}, "G0 G1 G2"},
		"all must go":                       {3 * each, nil, ""},
	} {
		c := newNode(t, 3)
		for i := range c.gpus {
			c.gpus[i].NUMANode = inventory.NoNUMANode
		}
		filling := strings.Repeat("x", resource.MaxList/2)
		room := resource.MaxList + tt.excess - 3*each - size(filling, pluginapi.Unhealthy)
		filling += strings.Repeat("x", room)
		c.holders.Begin(holders.Account{Listed: map[string][]string{gpuName: append(tt.listed, filling)}})
		c.plan(1)
		var got []string
		for _, d := range c.Latest().Lists[gpuName].Entries {
			if d.ID != filling {
				got = append(got, d.ID)
			}
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s: planned devices %q stay, want %q", name, got, tt.want)
		}
		c.plan(1) // what the kubelet has in its list stays
		if left := len(c.Latest().Lists[gpuName].Entries); left != len(got)+1 {
			t.Errorf("%s: %d devices are listed afterwards", name, left)
		}
	}
}
