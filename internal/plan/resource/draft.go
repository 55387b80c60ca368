package resource

import (
	"fmt"
	"math"
	"slices"
)

// MaxList is the largest list of devices that the kubelet accepts, in bytes: gRPC's
// default limit for a message.
const MaxList = 4 << 20

// A draft has the devices of one resource during the making of a plan. It holds no
// more than the kubelet accepts: too many replicas in the configuration cannot
// exhaust the memory.
type draft struct {
	devices []Device // with replicas, but only the first unit of a GPU; nil once the list is too long
	members []Device // without replicas
	// ids is the number of devices in the list, and bytes the length of the list.
	// Both stop at the highest int.
	ids, bytes int
	// fit is the number of devices, from the first, that the kubelet accepts.
	fit int
}

// add adds a device, or its replicas if it is shared.
func (g *draft) add(d Device, replicas int) {
	g.members = append(g.members, d)
	if d.Sharing == Unshared {
		g.count(1, listed(d))
	}
	// Replicas whose numbers have equally many digits take equally many bytes.
	for first, digits := 0, 10; d.Sharing != Unshared && first < replicas; digits = multiply(digits, 10) {
		d.ID = replicaID(d.UUID, first)
		g.count(min(digits, replicas)-first, listed(d))
		first = digits
	}
	if g.bytes > MaxList {
		g.devices = nil
		return
	}
	switch d.Sharing {
	case Unshared:
		g.devices = append(g.devices, d)
	case InUnits, InMPSUnits, InDriverUnits:
		d.ID = replicaID(d.UUID, 0)
		g.devices = append(g.devices, d)
	case TimeSliced, MPS, Percentage:
		g.devices = slices.Grow(g.devices, replicas)
		for n := range replicas {
			d.ID = replicaID(d.UUID, n)
			g.devices = append(g.devices, d)
		}
	}
}

// count adds n IDs with so many bytes each.
func (g *draft) count(n, bytes int) {
	if g.bytes <= MaxList {
		g.fit += min(n, (MaxList-g.bytes)/bytes)
	}
	g.ids = sum(g.ids, n)
	g.bytes = sum(g.bytes, multiply(n, bytes))
}

// sum and multiply take numbers of 0 or more. On overflow they return the highest
// int.
func sum(a, b int) int {
	if a > math.MaxInt-b {
		return math.MaxInt
	}
	return a + b
}

func multiply(a, b int) int {
	if a > math.MaxInt/b {
		return math.MaxInt
	}
	return a * b
}

// fits reports whether the kubelet accepts the list of a resource's devices.
// Otherwise it leaves the devices out.
func (p *planner) fits(name string) bool {
	g := p.resources[name]
	if g.bytes <= MaxList {
		return true
	}
	why := fmt.Sprintf("the list of its %d devices would have %d bytes, and the kubelet accepts %d; reduce the "+
		"replicas (%d devices fit), or share under several names", g.ids, g.bytes, MaxList, g.fit)
	p.warn("resource %s is not offered: %s", name, why)
	for _, d := range g.members {
		p.plan.LeftOut = append(p.plan.LeftOut,
			LeftOut{UUID: d.UUID, Index: d.Index, Reason: "its resource " + name + " is not offered: " + why,
				Refused: true})
	}
	return false
}

// listed returns the bytes of a device in a list while it is unhealthy.
func listed(d Device) int {
	if d.NUMANode < 0 {
		return ListBytes(d.ID, false, nil)
	}
	return ListBytes(d.ID, false, []int64{int64(d.NUMANode)})
}

// ListBytes returns the bytes of a device in a list: a message of ID, health and
// NUMA nodes, each field with its tag and length.
func ListBytes(id string, healthy bool, nodes []int64) int {
	health := len("Unhealthy")
	if healthy {
		health = len("Healthy")
	}
	size := 1 + varint(len(id)) + len(id) + 2 + health
	if len(nodes) > 0 {
		all := 0
		for _, node := range nodes {
			all += 2
			if node != 0 { // protobuf does not write a 0
				all += 1 + varint(int(node))
			}
		}
		size += 1 + varint(all) + all
	}
	return 1 + varint(size) + size
}

// varint returns the number of bytes of an encoded number.
func varint(n int) int {
	bytes := 1
	for ; n >= 1<<7; n >>= 7 {
		bytes++
	}
	return bytes
}
