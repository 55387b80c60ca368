package why

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// A pool identifies a pool of a driver.
type pool struct{ driver, name string }

func poolOf(s *resourceapi.ResourceSlice) pool { return pool{s.Spec.Driver, s.Spec.Pool.Name} }

func idOf(s *resourceapi.ResourceSlice, d resourceapi.Device) structured.DeviceID {
	return structured.MakeDeviceID(s.Spec.Driver, s.Spec.Pool.Name, d.Name)
}

// contents are the slices and counters of a pool.
type contents struct {
	generation int64
	slices     []*resourceapi.ResourceSlice
	counters   map[string]*counter // by "NAME of SET"; nil until needed
}

// A counter is the rest of a counter, and the claims that use the counter.
type counter struct {
	left   resource.Quantity
	claims []*resourceapi.ResourceClaim
}

// newestSlices returns the slices of the newest generation of each pool, by pool and by node.
func newestSlices(all []*resourceapi.ResourceSlice) (map[pool]*contents, map[string][]*resourceapi.ResourceSlice) {
	pools, onNode := map[pool]*contents{}, map[string][]*resourceapi.ResourceSlice{}
	for _, s := range all {
		p := pools[poolOf(s)]
		if p == nil || p.generation < s.Spec.Pool.Generation {
			p = &contents{generation: s.Spec.Pool.Generation}
			pools[poolOf(s)] = p
		}
		if p.generation == s.Spec.Pool.Generation {
			p.slices = append(p.slices, s)
		}
	}
	for _, s := range all {
		if node := ptr.Deref(s.Spec.NodeName, ""); node != "" && s.Spec.Pool.Generation == pools[poolOf(s)].generation {
			onNode[node] = append(onNode[node], s)
		}
	}
	return pools, onNode
}

// capacityOf names a capacity with too little left on the device for a request; empty if
// there is enough.
func (a *allocation) capacityOf(id structured.DeviceID, d resourceapi.Device,
	r *resourceapi.ExactDeviceRequest) string {
	if r.Capacity == nil {
		return ""
	}
	for _, name := range slices.Sorted(maps.Keys(r.Capacity.Requests)) {
		wanted, left := r.Capacity.Requests[name], d.Capacity[name].Value.DeepCopy()
		if consumed := a.state.AggregatedCapacity[id][name]; consumed != nil {
			left.Sub(*consumed)
		}
		if wanted.Cmp(left) > 0 {
			return fmt.Sprintf("the capacity %s, of which %s is left%s,", name, left.String(), heldBy(a.holders[id]))
		}
	}
	return ""
}

// counterOf names a counter with too little left in the device's pool, and the claims that
// use the counter; empty if there is enough.
func (a *allocation) counterOf(s *resourceapi.ResourceSlice, d resourceapi.Device) string {
	if len(d.ConsumesCounters) == 0 {
		return ""
	}
	counters := a.counters(poolOf(s))
	for _, consumed := range d.ConsumesCounters {
		for _, name := range slices.Sorted(maps.Keys(consumed.Counters)) {
			key, value := name+" of "+consumed.CounterSet, consumed.Counters[name].Value
			if c := counters[key]; c != nil && value.Cmp(c.left) > 0 {
				return fmt.Sprintf("the counter %s, of which %s is left%s,", key, c.left.String(), heldBy(c.claims))
			}
		}
	}
	return ""
}

// counters returns the counters of a pool.
func (a *allocation) counters(of pool) map[string]*counter {
	p := a.pools[of]
	if p.counters != nil {
		return p.counters
	}
	p.counters = map[string]*counter{}
	at := func(set, name string) *counter {
		key := name + " of " + set
		if p.counters[key] == nil {
			p.counters[key] = &counter{}
		}
		return p.counters[key]
	}
	for _, s := range p.slices {
		for _, set := range s.Spec.SharedCounters {
			for name, c := range set.Counters {
				at(set.Name, name).left.Add(c.Value)
			}
		}
		for _, d := range s.Spec.Devices {
			if id := idOf(s, d); a.state.AllocatedDevices.Has(id) {
				for _, consumed := range d.ConsumesCounters {
					for name, c := range consumed.Counters {
						of := at(consumed.CounterSet, name)
						of.left.Sub(c.Value)
						of.claims = append(of.claims, a.holders[id]...)
					}
				}
			}
		}
	}
	return p.counters
}

// heldBy returns the names of claims and their users in brackets; empty without claims.
func heldBy(claims []*resourceapi.ResourceClaim) string {
	var names []string
	for _, c := range claims {
		var users []string
		for _, u := range c.Status.ReservedFor {
			users = append(users, strings.TrimSuffix(u.Resource, "s")+" "+u.Name)
		}
		if users == nil {
			users = []string{"no pod"}
		}
		// one claim may have several devices
		if name := c.Namespace + "/" + c.Name + " of " + firstThree(users, ", "); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if names == nil {
		return ""
	}
	return " (" + firstThree(names, "; ") + ")"
}

// firstThree joins the first three names, and adds the number of the others.
func firstThree(names []string, separator string) string {
	const most = 3
	if len(names) <= most {
		return strings.Join(names, separator)
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], separator), len(names)-most)
}
