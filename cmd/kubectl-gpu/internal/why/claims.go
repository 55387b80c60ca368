package why

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// An allocation asks the scheduler's own allocator.
type allocation struct {
	o     Objects
	state structured.AllocatedState
	cache *cel.Cache
}

// features are those that Kubernetes 1.36 and 1.37 have on by default.
var features = structured.Features{
	AdminAccess: true, PrioritizedList: true, PartitionableDevices: true, DeviceTaints: true,
	DeviceBindingAndStatus: true, ConsumableCapacity: true,
}

func newAllocation(o Objects) *allocation {
	a := &allocation{o: o, cache: cel.NewCache(256, cel.Features{EnableConsumableCapacity: true}), state: structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}}
	for _, c := range o.Claims {
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			switch {
			case r.AdminAccess != nil && *r.AdminAccess:
			case r.ShareID != nil:
				a.state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
				a.state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
			default:
				a.state.AllocatedDevices.Insert(id)
			}
		}
	}
	return a
}

// Get and List are those of the classes.
func (a *allocation) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, c := range a.o.Classes {
		if c.Name == name {
			return c, nil
		}
	}
	return nil, fmt.Errorf("no DeviceClass is called %s", name)
}

func (a *allocation) List() ([]*resourceapi.DeviceClass, error) { return a.o.Classes, nil }

// possible reports whether the scheduler could allocate claims on a node.
func (a *allocation) possible(ctx context.Context, n *corev1.Node, claims []*resourceapi.ResourceClaim) (bool, error) {
	allocator, err := structured.NewAllocator(ctx, features, a.state, a, a.o.Slices, a.cache)
	if err != nil {
		return false, err
	}
	results, err := allocator.Allocate(ctx, n, claims)
	return err == nil && results != nil, err
}

// explainClaims says why no node can give the claims of the pod; empty if one can, or nothing is to be allocated.
func explainClaims(ctx context.Context, o Objects) string {
	var claims []*resourceapi.ResourceClaim
	for _, name := range slices.Sorted(maps.Keys(o.Own)) {
		if c := o.Own[name]; c.Status.Allocation == nil {
			claims = append(claims, c)
		}
	}
	if len(claims) == 0 {
		return ""
	}
	a := newAllocation(o)
	var nearest *corev1.Node
	for i := range o.Nodes {
		n := &o.Nodes[i]
		if !slices.ContainsFunc(o.Slices, func(s *resourceapi.ResourceSlice) bool { return ptr.Deref(s.Spec.NodeName, "") == n.Name }) {
			continue
		}
		possible, err := a.possible(ctx, n, claims)
		if err != nil {
			return fmt.Sprintf("The scheduler cannot use its claims: %s.", strings.TrimSuffix(err.Error(), "."))
		}
		excluded := excludedBy(n, o.Pod)
		if possible && excluded == "" {
			return ""
		}
		if possible {
			return fmt.Sprintf("Node %s has devices for its claims, and %s.", n.Name, excluded)
		}
		if nearest == nil {
			nearest = n
		}
	}
	if nearest == nil {
		return "No node has devices in ResourceSlices: kubectl gpu status NODE says which GPUs are given by claims."
	}
	return a.reason(ctx, nearest, claims)
}

// reason says what excludes the devices of a node: first what each selector says, then which one requirement, left out, makes it possible.
func (a *allocation) reason(ctx context.Context, n *corev1.Node, claims []*resourceapi.ResourceClaim) string {
	for _, c := range claims {
		for i := range c.Spec.Devices.Requests {
			r := &c.Spec.Devices.Requests[i]
			if text := a.noneFor(ctx, n, r); text != "" {
				return fmt.Sprintf("No node has devices for request %s of claim %s; on node %s, %s.", r.Name, c.Name, n.Name, text)
			}
		}
	}
	for at, c := range claims {
		for i, constraint := range c.Spec.Devices.Constraints {
			without := slices.Clone(claims)
			without[at] = c.DeepCopy()
			without[at].Spec.Devices.Constraints = slices.Delete(without[at].Spec.Devices.Constraints, i, i+1)
			if possible, err := a.possible(ctx, n, without); err == nil && possible && constraint.MatchAttribute != nil {
				return fmt.Sprintf("No node has devices that satisfy the constraint matchAttribute %s of claim %s; node %s has enough without it.",
					*constraint.MatchAttribute, c.Name, n.Name)
			}
		}
	}
	empty := newAllocation(Objects{Slices: a.o.Slices, Classes: a.o.Classes})
	if possible, err := empty.possible(ctx, n, claims); err == nil && possible {
		return fmt.Sprintf("No node has enough devices, counters or memory free for its claims; node %s has when other claims end.", n.Name)
	}
	return fmt.Sprintf("No node has devices for all requests of its claims together; node %s has some for each.", n.Name)
}

// noneFor says what excludes the devices of a node from a request that has too few of them; of several alternatives, from the first. It is
// empty if there are enough.
func (a *allocation) noneFor(ctx context.Context, n *corev1.Node, r *resourceapi.DeviceRequest) (text string) {
	alternatives := []resourceapi.ExactDeviceRequest{}
	if r.Exactly != nil {
		alternatives = append(alternatives, *r.Exactly)
	}
	for _, s := range r.FirstAvailable {
		alternatives = append(alternatives, resourceapi.ExactDeviceRequest{
			DeviceClassName: s.DeviceClassName, Selectors: s.Selectors, Count: s.Count, Tolerations: s.Tolerations,
		})
	}
	for i := range alternatives {
		reason, left := a.excluded(ctx, n, &alternatives[i])
		if left > 0 && int64(left) >= alternatives[i].Count {
			return ""
		}
		if text == "" && reason == "" {
			reason = fmt.Sprintf("there are %d devices of %d", left, alternatives[i].Count)
		}
		text = cmp.Or(text, reason)
	}
	return text
}

// excluded says what excludes which devices of a node from a request, and how many devices are left.
func (a *allocation) excluded(ctx context.Context, n *corev1.Node, r *resourceapi.ExactDeviceRequest) (text string, left int) {
	by := map[string][]string{} // the devices, by what excludes them
	var reasons []string
	newest := map[string]int64{}
	for _, s := range a.o.Slices {
		newest[s.Spec.Driver+"/"+s.Spec.Pool.Name] = max(newest[s.Spec.Driver+"/"+s.Spec.Pool.Name], s.Spec.Pool.Generation)
	}
	for _, s := range a.o.Slices {
		if s.Spec.NodeName == nil || *s.Spec.NodeName != n.Name || s.Spec.Pool.Generation < newest[s.Spec.Driver+"/"+s.Spec.Pool.Name] {
			continue
		}
		for _, d := range s.Spec.Devices {
			reason := a.excludes(ctx, s, d, r)
			if reason == "" {
				left++
				continue
			}
			if by[reason] == nil {
				reasons = append(reasons, reason)
			}
			by[reason] = append(by[reason], d.Name)
		}
	}
	var parts []string
	for _, reason := range reasons {
		parts = append(parts, fmt.Sprintf("%s excludes %s", reason, names(by[reason])))
	}
	return strings.Join(parts, "; "), left
}

// excludes says what excludes a device from a request: a selector of the class or the request, a taint, or another claim; empty if
// nothing does.
func (a *allocation) excludes(
	ctx context.Context, s *resourceapi.ResourceSlice, d resourceapi.Device, r *resourceapi.ExactDeviceRequest,
) string {
	class, err := a.Get(r.DeviceClassName)
	if err != nil {
		return "that " + err.Error()
	}
	for _, from := range []struct {
		what      string
		selectors []resourceapi.DeviceSelector
	}{{"the class " + class.Name, class.Spec.Selectors}, {"the request", r.Selectors}} {
		for _, selector := range from.selectors {
			if selector.CEL == nil {
				continue
			}
			compiled := a.cache.GetOrCompile(selector.CEL.Expression)
			if compiled.Error != nil {
				return fmt.Sprintf("the selector %q of %s, which is wrong,", selector.CEL.Expression, from.what)
			}
			matches, _, err := compiled.DeviceMatches(ctx, cel.Device{
				Driver: s.Spec.Driver, Attributes: d.Attributes, Capacity: d.Capacity, AllowMultipleAllocations: d.AllowMultipleAllocations,
			})
			if err != nil || !matches {
				return fmt.Sprintf("the selector %q of %s", selector.CEL.Expression, from.what)
			}
		}
	}
	for _, t := range d.Taints {
		tolerated := slices.ContainsFunc(r.Tolerations, func(by resourceapi.DeviceToleration) bool { return tolerates(by, t) })
		if t.Effect != resourceapi.DeviceTaintEffectNone && !tolerated {
			return fmt.Sprintf("the taint %s=%s:%s", t.Key, t.Value, t.Effect)
		}
	}
	if id := structured.MakeDeviceID(s.Spec.Driver, s.Spec.Pool.Name, d.Name); a.state.AllocatedDevices.Has(id) {
		return "another claim"
	}
	return ""
}

func tolerates(by resourceapi.DeviceToleration, t resourceapi.DeviceTaint) bool {
	return (by.Effect == "" || by.Effect == t.Effect) && (by.Key == "" || by.Key == t.Key) &&
		(by.Operator == resourceapi.DeviceTolerationOpExists || by.Value == t.Value)
}

// names returns names for people. There may be very many.
func names(all []string) string {
	const most = 8
	if len(all) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(all[:most], ", "), len(all)-most)
	}
	return strings.Join(all, ", ")
}
