package why

import (
	"cmp"
	"context"
	"errors"
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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// An allocation asks the scheduler's own allocator.
type allocation struct {
	o     Objects
	state structured.AllocatedState
	cache *cel.Cache
	most  int // steps of one search

	allocator structured.Allocator // nil until it is asked
	pools     map[pool]*contents
	onNode    map[string][]*resourceapi.ResourceSlice // by its name: those of the newest generation of their pools
	holders   map[structured.DeviceID][]*resourceapi.ResourceClaim
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
	}, holders: map[structured.DeviceID][]*resourceapi.ResourceClaim{}}
	for i := range o.Claims {
		c := &o.Claims[i]
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			if ptr.Deref(r.AdminAccess, false) {
				continue
			}
			a.holders[id] = append(a.holders[id], c)
			if r.ShareID == nil {
				a.state.AllocatedDevices.Insert(id)
				continue
			}
			a.state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			a.state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
	a.pools, a.onNode = newest(o.Slices)
	a.most = max(minSteps, allSteps/max(1, len(a.onNode)))
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

// possible reports whether the scheduler could allocate claims on a node. Its error is errSteps where that takes too many steps to find
// out.
func (a *allocation) possible(ctx context.Context, n *corev1.Node, claims []*resourceapi.ResourceClaim) (bool, error) {
	if a.allocator == nil {
		allocator, err := structured.NewAllocator(ctx, features, a.state, a, a.o.Slices, a.cache)
		if err != nil {
			return false, err
		}
		a.allocator = allocator
	}
	limited := &steps{ctx, a.most}
	results, err := a.allocator.Allocate(limited, n, claims) //nolint:contextcheck // it has ctx
	if limited.left < 0 {
		err = errSteps
	}
	return err == nil && results != nil, err
}

// Steps of the allocator in the searches of all nodes, and in one search at least. It tries each combination of devices. A count bounds it:
// a time would give other sentences on other machines.
const (
	allSteps = 100_000
	minSteps = 1_000
)

var errSteps = errors.New("too many steps")

// steps is a context that ends after a number of steps of the allocator, which asks for its error in each.
type steps struct {
	context.Context //nolint:containedctx // it is one
	left            int
}

func (s *steps) Err() error {
	if s.left--; s.left < 0 {
		return errSteps
	}
	return s.Context.Err()
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
	var nearest *offer
	for i := range o.Nodes {
		n := &o.Nodes[i]
		if len(a.onNode[n.Name]) == 0 {
			continue
		}
		of, err := a.offerOf(ctx, n, claims)
		if err != nil {
			return fmt.Sprintf("The scheduler cannot use its claims: %s.", strings.TrimSuffix(err.Error(), "."))
		}
		of.excluded = excludedBy(n, o.Pod)
		if of.possible && of.excluded == "" {
			return ""
		}
		if nearest == nil || of.nearer(*nearest) {
			nearest = &of
		}
	}
	switch {
	case nearest == nil:
		return "No node has devices in ResourceSlices: kubectl gpu status NODE says which GPUs are given by claims."
	case nearest.possible:
		return fmt.Sprintf("Node %s has devices for its claims, and %s.", nearest.node.Name, nearest.excluded)
	}
	text := a.reason(ctx, *nearest, claims)
	if nearest.excluded != "" {
		text = strings.TrimSuffix(text, ".") + "; and " + nearest.excluded + "."
	}
	return text
}

// An offer is what a node has for claims, and why it is none for them.
type offer struct {
	node     *corev1.Node
	possible bool
	unknown  bool   // whether it is possible takes too many steps to find out
	excluded string // why the pod cannot go there, whatever devices there are
	lacking  string // what excludes the devices of the first request that has too few of them
	requests int    // how many have too few
	devices  int    // left for the requests together
}

// offerOf looks at what a node has for the claims together and, where that is too little, for each request by itself.
func (a *allocation) offerOf(ctx context.Context, n *corev1.Node, claims []*resourceapi.ResourceClaim) (of offer, err error) {
	of.node = n
	of.possible, err = a.possible(ctx, n, claims)
	if of.unknown = errors.Is(err, errSteps); err != nil && !of.unknown || of.possible {
		return of, err
	}
	for _, c := range claims {
		for i := range c.Spec.Devices.Requests {
			r := &c.Spec.Devices.Requests[i]
			text, left := a.noneFor(ctx, n, r)
			of.devices += left
			if text == "" {
				continue
			}
			if of.requests++; of.lacking == "" {
				of.lacking = fmt.Sprintf("No node has devices for request %s of claim %s; on node %s, %s", r.Name, c.Name, n.Name, text)
			}
		}
	}
	return of, nil
}

// nearer reports whether a node is nearer to what is wanted than another one.
func (o offer) nearer(than offer) bool {
	if o.possible != than.possible {
		return o.possible
	}
	if o.requests != than.requests {
		return o.requests < than.requests
	}
	if (o.excluded == "") != (than.excluded == "") {
		return o.excluded == ""
	}
	return o.devices > than.devices
}

// reason says what excludes the devices of a node: first what each requirement says of each device, then which one requirement, left out,
// makes it possible.
func (a *allocation) reason(ctx context.Context, of offer, claims []*resourceapi.ResourceClaim) string {
	a.most = allSteps
	if of.unknown && of.lacking == "" {
		return fmt.Sprintf("Whether node %s has devices for its claims together takes too many steps to find out, also for the scheduler, "+
			"which gives up after 10 s: ask for fewer devices in a claim, or select them more closely.", of.node.Name)
	}
	without := a.enoughWithout(ctx, of.node, claims)
	switch {
	case of.lacking != "" && without != "" && strings.Count(of.lacking, " excludes ") > 1:
		return of.lacking + "; it has enough without " + without + "."
	case of.lacking != "":
		return of.lacking + "."
	case without != "":
		return fmt.Sprintf("No node has devices for its claims with %s; node %s has enough without.", without, of.node.Name)
	}
	empty := newAllocation(Objects{Slices: a.o.Slices, Classes: a.o.Classes})
	empty.most = allSteps
	if possible, err := empty.possible(ctx, of.node, claims); err == nil && possible {
		return fmt.Sprintf("No node has enough devices, counters or memory free for its claims; node %s has when other claims end.", of.node.Name)
	}
	return fmt.Sprintf("No node has devices for all requests of its claims together; node %s has some for each.", of.node.Name)
}

// noneFor says what excludes the devices of a node from a request that has too few of them; of several alternatives, from the first. It is
// empty if there are enough. Most is how many there are for the alternative that has the most.
func (a *allocation) noneFor(ctx context.Context, n *corev1.Node, r *resourceapi.DeviceRequest) (text string, most int) {
	alternatives := []resourceapi.ExactDeviceRequest{}
	if r.Exactly != nil {
		alternatives = append(alternatives, *r.Exactly)
	}
	for _, s := range r.FirstAvailable {
		alternatives = append(alternatives, resourceapi.ExactDeviceRequest{
			DeviceClassName: s.DeviceClassName, Selectors: s.Selectors, Count: s.Count, Tolerations: s.Tolerations, Capacity: s.Capacity,
		})
	}
	for i := range alternatives {
		reason, left := a.excluded(ctx, n, &alternatives[i])
		most = max(most, left)
		if left > 0 && int64(left) >= alternatives[i].Count {
			return "", most
		}
		if left > 0 || reason == "" {
			reason = strings.TrimPrefix(reason+fmt.Sprintf("; it has %d of %d devices", left, alternatives[i].Count), "; ")
		}
		text = cmp.Or(text, reason)
	}
	return text, most
}

// excluded says what excludes which devices of a node from a request, and how many devices are left.
func (a *allocation) excluded(ctx context.Context, n *corev1.Node, r *resourceapi.ExactDeviceRequest) (text string, left int) {
	by := map[string][]string{} // the devices, by what excludes them
	var reasons []string
	for _, s := range a.onNode[n.Name] {
		for _, d := range s.Spec.Devices {
			reason := a.excludes(ctx, s, d, r)
			if reason == "" {
				left++
				continue
			}
			if by[reason] == nil {
				reasons = append(reasons, reason)
			}
			name := d.Name
			if reason == taken {
				name += heldBy(a.holders[idOf(s, d)])
			}
			by[reason] = append(by[reason], name)
		}
	}
	var parts []string
	for _, reason := range reasons {
		parts = append(parts, fmt.Sprintf("%s excludes %s", reason, inventory.Few(by[reason])))
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
	if p := a.pools[poolOf(s)]; int64(len(p.slices)) != s.Spec.Pool.ResourceSliceCount {
		return fmt.Sprintf("its pool, of which %d of %d slices is there,", len(p.slices), s.Spec.Pool.ResourceSliceCount)
	}
	if ptr.Deref(r.AdminAccess, false) {
		return "" // whoever has it
	}
	id := idOf(s, d)
	if a.state.AllocatedDevices.Has(id) {
		return taken
	}
	return cmp.Or(a.capacityOf(id, d, r), a.counterOf(s, d))
}

// taken is what excludes a device that another claim has.
const taken = "another claim"

func tolerates(by resourceapi.DeviceToleration, t resourceapi.DeviceTaint) bool {
	return (by.Effect == "" || by.Effect == t.Effect) && (by.Key == "" || by.Key == t.Key) &&
		(by.Operator == resourceapi.DeviceTolerationOpExists || by.Value == t.Value)
}
