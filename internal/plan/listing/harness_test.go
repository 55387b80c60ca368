package listing_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	gpuName = "nvidia.com/gpu"
	inUnits = "volcano.sh/gpu-mem.1Gi"
	// growsAfter and blockedFor are the constants of the package.
	growsAfter = 500 * time.Millisecond
	blockedFor = 30 * time.Second
)

func keyOf(resource, id string) holders.Key { return holders.Key{Resource: resource, ID: id} }

// A node has a State, whose plan and accounts a test changes.
type node struct {
	*testing.T
	listing.State
	holders  *holders.Holders
	now      time.Time
	gpus     []inventory.GPU
	held     map[holders.Key]holders.Holder
	announce bool
	mayGive  func([]resource.Device) error
}

func newNode(t *testing.T, gpus int) *node {
	t.Helper()
	n := &node{T: t, holders: holders.New(), now: time.Unix(1_800_000_000, 0), held: map[holders.Key]holders.Holder{}}
	for i := range gpus {
		n.gpus = append(n.gpus, inventory.GPU{UUID: fmt.Sprintf("G%d", i), Index: i,
			Health: inventory.Health{State: inventory.Healthy}})
	}
	return n
}

// shared is a rule that shares all GPUs.
func shared(replicas int) resource.Sharing {
	return resource.Sharing{Mode: resource.TimeSliced,
		Rules: []resource.SharingRule{{Name: gpuName, Replicas: replicas}}}
}

// plan offers the GPUs with so many replicas; one: they are not shared.
func (n *node) plan(replicas int) {
	o := resource.Options{MIG: resource.MIGMixed}
	if replicas > 1 {
		o.Sharing = shared(replicas)
	}
	n.planWith(o)
}

func (n *node) planWith(o resource.Options) {
	n.apply(resource.New(inventory.Snapshot{GPUs: n.gpus}, o))
}

// planUnits offers each GPU in 4 units of its memory, less the reserve.
func (n *node) planUnits(reserve int) {
	o := resource.Options{Units: resource.Units{Name: inUnits, ReserveMiB: reserve << 10}}
	for i := range n.gpus {
		n.gpus[i].MemoryBytes = 4 << 30
		o.Selectors = append(o.Selectors,
			resource.Selector{Where: "x", Devices: []resource.Ref{resource.Ref(fmt.Sprint(i))}, Units: true})
	}
	n.planWith(o)
}

func (n *node) apply(plan resource.Plan) {
	for _, r := range plan.Resources {
		if !n.Has(r.Name) {
			n.State = n.Add(r.Name, false, n.holders, n.now)
		}
	}
	n.State = listing.Next(n.State, plan, listing.Options{AnnounceShrink: n.announce}, n.holders, n.now)
}

// allocate returns what a container gets for a device, or why it is refused.
func (n *node) allocate(id string) string { return n.allocateOf(gpuName, id) }

func (n *node) allocateOf(name string, ids ...string) string {
	next, answer := n.Allocate(name, [][]string{ids}, n.mayGive, n.holders, n.now)
	n.State = next
	devices, err := answer.Devices(ids)
	if err != nil {
		return "refused: " + err.Error()
	}
	return devices[0].UUID
}

// account is an account of the first kubelet, in which both sources name all holders.
func (n *node) account() holders.Account {
	return holders.Account{Kubelet: 1, Source: holders.Source{Incarnation: 1, Connections: 1}, Began: n.now, Held: n.held}
}

// read applies a reading, and reports whether the checkpoint may be outdated.
func (n *node) read(r listing.Reading) (outdated bool) {
	n.State, outdated = n.Read(r, n.holders, n.now)
	return outdated
}

// reads applies the account a second later.
func (n *node) reads() {
	n.now = n.now.Add(time.Second)
	n.read(listing.Reading{Account: n.account()})
}

// unreadable applies a reading of a damaged checkpoint.
func (n *node) unreadable() {
	damaged := holders.Account{Kubelet: 1, Began: n.now, UnknownBecause: "damaged", Unreadable: true}
	n.read(listing.Reading{Account: damaged})
}

func (n *node) holds(ids ...string) {
	n.held = map[holders.Key]holders.Holder{}
	for _, id := range ids {
		n.held[keyOf(gpuName, id)] = holders.Holder{Pod: "p"}
	}
	n.reads()
}

// healthy returns the IDs that a list has as Healthy, sorted.
func (n *node) healthy(name string) (ids []string) {
	for _, d := range n.Latest().Lists[name].Entries {
		if d.Healthy {
			ids = append(ids, d.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// lists fails the test if other devices are listed as Healthy.
func (n *node) lists(healthy ...string) {
	n.Helper()
	got := n.healthy(gpuName)
	if slices.Sort(healthy); !slices.Equal(got, healthy) {
		n.Errorf("Healthy are %q, want %q", got, healthy)
	}
}

// quiet fails the test if a reading that says the same makes another decision.
func (n *node) quiet(what string) {
	n.Helper()
	before := n.Latest()
	n.reads()
	if n.Latest() != before {
		n.Errorf("%s: there is another decision", what)
	}
}
