package why

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// An allocation runs the scheduler's own allocator.
type allocation struct {
	o        Objects
	state    structured.AllocatedState
	cache    *cel.Cache
	maxSteps int // steps of one search

	allocator structured.Allocator // nil until needed
	pools     map[pool]*contents
	onNode    map[string][]*resourceapi.ResourceSlice // by node: slices of the newest generation of their pools
	holders   map[structured.DeviceID][]*resourceapi.ResourceClaim
	named     map[string][]reference // references in selector expressions
	// words are descriptions of the requests in claims created by the scheduler, by the name of the
	// request.
	words map[string]string
}

// features are the features that Kubernetes 1.36 and 1.37 enable by default.
var features = structured.Features{
	AdminAccess: true, PrioritizedList: true, PartitionableDevices: true, DeviceTaints: true,
	DeviceBindingAndStatus: true, ConsumableCapacity: true,
}

func newAllocation(o Objects) *allocation {
	a := &allocation{o: o, cache: cel.NewCache(256, cel.Features{EnableConsumableCapacity: true}),
		state: structured.AllocatedState{
			AllocatedDevices:         sets.New[structured.DeviceID](),
			AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
		}, holders: map[structured.DeviceID][]*resourceapi.ResourceClaim{}, words: map[string]string{},
		named: map[string][]reference{}}
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
	a.pools, a.onNode = newestSlices(o.Slices)
	a.maxSteps = max(minSteps, allSteps/max(1, len(a.onNode)))
	return a
}

// Get and List return classes.
func (a *allocation) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, c := range a.o.Classes {
		if c.Name == name {
			return c, nil
		}
	}
	return nil, fmt.Errorf("no DeviceClass is called %s", name)
}

func (a *allocation) List() ([]*resourceapi.DeviceClass, error) { return a.o.Classes, nil }

// possible reports whether the scheduler could allocate claims on a node. The error is errSteps if
// this takes too many steps to find out.
func (a *allocation) possible(ctx context.Context, n *corev1.Node, claims []*resourceapi.ResourceClaim) (bool, error) {
	if a.allocator == nil {
		allocator, err := structured.NewAllocator(ctx, features, a.state, a, a.o.Slices, a.cache)
		if err != nil {
			return false, err
		}
		a.allocator = allocator
	}
	limited := &steps{ctx, a.maxSteps}
	results, err := a.allocator.Allocate(limited, n, claims) //nolint:contextcheck // it has ctx
	if limited.left < 0 {
		err = errSteps
	}
	return err == nil && results != nil, err
}

// The limits of allocator steps for all nodes, and the minimum for one search. The allocator tries
// each combination of devices. The limit is a number of steps, because a time limit would give
// other sentences on other machines.
const (
	allSteps = 100_000
	minSteps = 1_000
)

var errSteps = errors.New("too many steps")

// steps is a context that ends after a number of allocator steps; the allocator calls Err in each
// step.
type steps struct {
	context.Context //nolint:containedctx // steps is a context
	left            int
}

func (s *steps) Err() error {
	if s.left--; s.left < 0 {
		return errSteps
	}
	return s.Context.Err()
}

// An offer is a node's offer for claims, and the reason why it is not enough.
type offer struct {
	node     *corev1.Node
	possible bool
	unknown  bool   // the search takes too many steps
	lacking  string // reason for the first request with too few devices
	requests int    // number of requests with too few devices
	devices  int    // devices left for all requests
}

// offerOf examines a node's devices for all claims together and, if they are not enough, for each
// request alone.
func (a *allocation) offerOf(
	ctx context.Context, n *corev1.Node, claims []*resourceapi.ResourceClaim,
) (of offer, err error) {
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
				of.lacking = fmt.Sprintf("No node has devices for %s; on node %s, %s",
					a.requestText(c, r.Name), n.Name, text)
			}
		}
	}
	return of, nil
}

// requestText describes a request.
func (a *allocation) requestText(c *resourceapi.ResourceClaim, request string) string {
	return cmp.Or(a.words[request], fmt.Sprintf("request %s of claim %s", request, c.Name))
}

// reason says what excludes the devices of a node. It first checks each requirement for
// each device, and then looks for a single requirement that prevents the allocation.
func (a *allocation) reason(ctx context.Context, of offer, claims []*resourceapi.ResourceClaim) string {
	a.maxSteps = allSteps
	if of.unknown && of.lacking == "" {
		return fmt.Sprintf("Whether node %s has devices for its claims together takes too many steps to find out, "+
			"also for the scheduler, which gives up after 10 s: request fewer devices in a claim, or select them "+
			"more closely.", of.node.Name)
	}
	without := a.enoughWithout(ctx, of.node, claims)
	switch {
	case of.lacking != "" && without != "" && strings.Count(of.lacking, " excludes ") > 1:
		return of.lacking + "; it has enough without " + without + "."
	case of.lacking != "":
		return of.lacking + "."
	case without != "":
		return fmt.Sprintf("No node has devices for its claims with %s; node %s has enough without.", without,
			of.node.Name)
	}
	empty := newAllocation(Objects{Slices: a.o.Slices, Classes: a.o.Classes})
	empty.maxSteps = allSteps
	if possible, err := empty.possible(ctx, of.node, claims); err == nil && possible {
		return fmt.Sprintf("No node has enough devices, counters or memory free for its claims; node %s has when "+
			"other claims end.", of.node.Name)
	}
	return fmt.Sprintf("No node has devices for all requests of its claims together; node %s has some for each.",
		of.node.Name)
}

// noneFor says what excludes the devices of a node from a request with too few devices.
// Among several alternatives, the text is about the first. The text is empty if there are
// enough devices. most is the largest number of devices for an alternative.
func (a *allocation) noneFor(ctx context.Context, n *corev1.Node, r *resourceapi.DeviceRequest) (text string,
	most int) {
	alternatives := []resourceapi.ExactDeviceRequest{}
	if r.Exactly != nil {
		alternatives = append(alternatives, *r.Exactly)
	}
	for _, s := range r.FirstAvailable {
		alternatives = append(alternatives, resourceapi.ExactDeviceRequest{
			DeviceClassName: s.DeviceClassName, Selectors: s.Selectors, Count: s.Count, Tolerations: s.Tolerations,
			Capacity: s.Capacity,
		})
	}
	for i := range alternatives {
		reason, left := a.exclusions(ctx, n, &alternatives[i])
		most = max(most, left)
		if left > 0 && int64(left) >= alternatives[i].Count {
			return "", most
		}
		if left > 0 || reason == "" {
			reason = strings.TrimPrefix(reason+fmt.Sprintf("; it has %d of %d devices", left, alternatives[i].Count),
				"; ")
		}
		text = cmp.Or(text, reason)
	}
	return text, most
}

// exclusions describes the devices of a node excluded from a request, with reasons, and
// returns the number of devices left.
func (a *allocation) exclusions(ctx context.Context, n *corev1.Node, r *resourceapi.ExactDeviceRequest) (text string,
	left int) {
	var all []*exclusionGroup // by the excluding requirement, in the order of the first device
	for _, s := range a.onNode[n.Name] {
		for _, d := range s.Spec.Devices {
			reason := a.excludes(ctx, s, d, r)
			if reason.by == "" {
				left++
				continue
			}
			at := slices.IndexFunc(all, func(e *exclusionGroup) bool { return e.by == reason.by })
			if at < 0 {
				at = len(all)
				all = append(all, &exclusionGroup{by: reason.by, devices: map[string][]string{}})
			}
			name := d.Name
			if reason.by == anotherClaim {
				name += heldBy(a.holders[idOf(s, d)])
			}
			all[at].add(reason.values, name)
		}
	}
	var parts []string
	for _, e := range all {
		parts = append(parts, e.String())
	}
	return strings.Join(parts, "; "), left
}

// exclusionGroup is a requirement with its excluded devices, grouped by value.
type exclusionGroup struct {
	by      string
	values  []string            // in the order of the first device
	devices map[string][]string // by value
}

func (e *exclusionGroup) add(values, device string) {
	if e.devices[values] == nil {
		e.values = append(e.values, values)
	}
	e.devices[values] = append(e.devices[values], device)
}

// maxValues is the number of values for which a sentence lists the devices.
const maxValues = 4

func (e *exclusionGroup) String() string {
	var groups []string
	more := 0
	for i, values := range e.values {
		switch {
		case i >= maxValues:
			more += len(e.devices[values])
		case values == "":
			groups = append(groups, inventory.Few(e.devices[values]))
		default:
			groups = append(groups, fmt.Sprintf("%s (%s)", inventory.Few(e.devices[values]), values))
		}
	}
	text := fmt.Sprintf("%s excludes %s", e.by, strings.Join(groups, ", "))
	if more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// An exclusion is what excludes a device from a request.
type exclusion struct {
	by     string // empty for a device that is not excluded
	values string // the device's values for a selector
}

// excludes says what excludes a device from a request: a selector of the class or the request, a
// taint, or another claim.
func (a *allocation) excludes(
	ctx context.Context, s *resourceapi.ResourceSlice, d resourceapi.Device, r *resourceapi.ExactDeviceRequest,
) exclusion {
	class, err := a.Get(r.DeviceClassName)
	if err != nil {
		return exclusion{by: "that " + err.Error()}
	}
	for _, from := range []struct {
		what      string
		selectors []resourceapi.DeviceSelector
	}{{"the class " + class.Name, class.Spec.Selectors}, {"the request", r.Selectors}} {
		for _, selector := range from.selectors {
			if selector.CEL == nil {
				continue
			}
			expression := selector.CEL.Expression
			compiled := a.cache.GetOrCompile(expression)
			if compiled.Error != nil {
				return exclusion{by: fmt.Sprintf("the selector %q of %s, which is wrong,", expression, from.what)}
			}
			matches, _, err := compiled.DeviceMatches(ctx, cel.Device{
				Driver: s.Spec.Driver, Attributes: d.Attributes, Capacity: d.Capacity,
				AllowMultipleAllocations: d.AllowMultipleAllocations,
			})
			if err != nil || !matches {
				return exclusion{fmt.Sprintf("the selector %q of %s", expression, from.what),
					a.valuesOf(expression, s.Spec.Driver, d)}
			}
		}
	}
	for _, t := range d.Taints {
		tolerated := slices.ContainsFunc(r.Tolerations, func(by resourceapi.DeviceToleration) bool {
			return resourceclaim.ToleratesTaint(by, t)
		})
		if t.Effect != resourceapi.DeviceTaintEffectNone && !tolerated {
			return exclusion{by: fmt.Sprintf("the taint %s=%s:%s", t.Key, t.Value, t.Effect)}
		}
	}
	if p := a.pools[poolOf(s)]; int64(len(p.slices)) != s.Spec.Pool.ResourceSliceCount {
		return exclusion{by: fmt.Sprintf("its pool, of which %d of %d slices is there,", len(p.slices),
			s.Spec.Pool.ResourceSliceCount)}
	}
	if ptr.Deref(r.AdminAccess, false) {
		return exclusion{} // also while another claim has the device
	}
	id := idOf(s, d)
	if a.state.AllocatedDevices.Has(id) {
		return exclusion{by: anotherClaim}
	}
	return exclusion{by: cmp.Or(a.capacityOf(id, d, r), a.counterOf(s, d))}
}

// anotherClaim is the exclusion of a device that another claim has.
const anotherClaim = "another claim"
