package listing

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Decision is what pods may get now. It is immutable.
type Decision struct {
	// Plan is the plan with all holds.
	Plan resource.Plan
	// Lists are the lists of all resources, by name.
	Lists map[string]List
	// Pending is the number of the change that removes devices and waits for Approve; 0 for none.
	Pending uint64
	// Again is when the next reading of the accounts changes the Decision even if
	// the accounts say the same; zero for never.
	Again time.Time
}

const (
	// growsAfter is the time between the last offer of a GPU in its old form and
	// the offer of more devices of this GPU than before. By then the kubelet has
	// received the list, and has finished the calls for devices chosen earlier.
	growsAfter = 500 * time.Millisecond
	// blockedFor is how long a resource must have nothing to give before that
	// counts. A starting daemon knows after unservedFor which forms pods hold.
	blockedFor = 30 * time.Second
)

// A step is the making of one Decision.
type step struct {
	State
	holders *holders.Holders
	now     time.Time
}

// Next returns the State with the Decision about a plan: which devices retire,
// which of them count as held, and which planned devices are withheld for them.
// Each resource of the plan must have a list.
func Next(s State, plan resource.Plan, o Options, h *holders.Holders, now time.Time) State {
	n := step{s.clone(), h, now}
	n.plan, n.options, n.uuids = plan, o, map[string]bool{}
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			n.uuids[d.UUID], n.uuids[d.GPU] = true, true
		}
	}
	for name, l := range n.lists {
		n.replace(name, l)
	}
	n.held, n.unserved = nil, n.findUnserved(h)
	n.keepUntilApproved()
	n.findHeldForms()
	n.latest = n.decide()
	return n.State
}

// decide returns the Decision about the plan, after all forms that count as held are known.
func (n *step) decide() *Decision {
	withheld := map[string]map[string]bool{}
	holds := n.plan.Conflicts(n.held)
	for _, h := range holds {
		if withheld[h.Resource] == nil {
			withheld[h.Resource] = map[string]bool{}
		}
		withheld[h.Resource][h.UUID] = true
	}
	d := &Decision{Plan: n.plan.Under(holds).Under(n.limitGrowth()), Lists: map[string]List{}}
	if why := n.holders.Silence(); why != "" {
		d.Plan.Warnings = append(slices.Clone(d.Plan.Warnings),
			"it is not known which devices pods hold: a GPU whose name or sharing "+
				"changed is offered, although a pod may hold it in its old form: "+why)
	}
	if n.blocked.Counts() {
		d.Plan.Warnings = append(slices.Clone(d.Plan.Warnings),
			"a GPU whose resource has another name now is offered, although a pod may hold it "+
				"under the old name: "+n.blocked.Reason)
	}
	for name, l := range n.lists {
		r, planned := d.Plan.Resource(name)
		if !planned {
			r.Name = name
		}
		d.Lists[name] = n.list(name, l, r, withheld[name])
	}
	for _, name := range slices.Sorted(maps.Keys(n.lists)) {
		d.Plan.Holds = append(slices.Clip(d.Plan.Holds), n.holdsOnUnits(name, n.lists[name])...)
	}
	if !n.shrink.since.IsZero() {
		d.Pending = n.shrink.number
	}
	d.Again = n.whenAgain(n.now)
	return d
}

// whenAgain returns when time alone changes the Decision.
func (s State) whenAgain(now time.Time) (again time.Time) {
	times := []time.Time{s.growsAt, s.shrink.overAt(), s.drain.dueAt(), s.blocked.DueAt(blockedFor)}
	if s.drain.next != "" && s.shrink.since.IsZero() {
		times = append(times, now)
	}
	for _, at := range times {
		if again.IsZero() || !at.IsZero() && at.Before(again) {
			again = at
		}
	}
	return again
}

// replace applies the plan to a list. Devices missing from the plan begin to
// retire. No retiring device is offered.
func (n *step) replace(name string, l *list) {
	r, _ := n.plan.Resource(name)
	for device := range l.resource.Without(r) {
		ever, key := l.everOffered[device.UUID], holders.Key{Resource: name, ID: device.ID}
		l.retiring[device.ID] = retiring{device: device, State: n.holders.Leaves(key, ever), gpuReassigned: !ever,
			wasOffered: ever && device.Healthy && (l.units.gpu == "" || l.units.gpu == device.UUID),
			reason:     "the device is not on this node any more, or the configuration no longer offers it"}
	}
	offered := map[string]bool{}
	for _, device := range r.Devices {
		if l.everOffered[device.UUID] && !l.resource.Lacks(device.ID) {
			offered[device.UUID] = true
		}
	}
	for id, d := range l.retiring {
		if device, returns := r.Device(id); returns {
			if !d.CannotBeHeld() {
				offered[device.UUID] = true
			}
			delete(l.retiring, id)
			continue
		}
		if d.offered {
			d.lastOffered = n.now
		}
		d.device, d.offered = n.onNode(name, d.device), false
		l.retiring[id] = d
	}
	l.resource, l.everOffered = r, offered
}

// onNode returns a retiring device of a resource with the node's current data. The
// device is not offered.
func (n *step) onNode(name string, left resource.Device) resource.Device {
	device, there := n.plan.NodeDevice(left.UUID)
	if !there {
		device = left
	}
	device.ID, device.Resource, device.Sharing, device.Healthy = left.ID, name, left.Sharing, false
	return device
}

// limitGrowth returns holds on devices of GPUs that have just changed their form, beyond the number
// offered in the old form. The kubelet may allocate such a GPU once more in its old form, and then
// the devices in the new form are withheld. The count must not rise before that and then fall,
// because the scheduler would send pods for missing devices.
func (n *step) limitGrowth() []resource.Hold {
	before := map[resource.Hold]int{}
	n.growsAt = time.Time{}
	for name, l := range n.lists {
		// a unit that left and is given once more takes the place of a free unit of its GPU
		r, _ := n.plan.Resource(name)
		for _, d := range l.retiring {
			if at := d.lastOffered.Add(growsAfter); !d.offered && n.now.Before(at) {
				if n.growsAt.IsZero() || at.Before(n.growsAt) {
					n.growsAt = at
				}
				if !r.InUnits() {
					before[resource.Hold{Resource: name, UUID: d.device.UUID, Row: resource.RowGrowth,
						Reason: "its GPU was offered in another form a moment ago"}]++
				}
			}
		}
	}
	holds := make([]resource.Hold, 0, len(before))
	for h, count := range before {
		h.Spared = count
		holds = append(holds, h)
	}
	return holds
}

// An oldForm is a retiring device in one form, with all its replicas.
type oldForm struct {
	name      string // of the resource
	list      *list
	device    resource.Device // one of them
	isKept    bool            // all of them stay offered for now
	lastGrant time.Time       // the last grant of one of them since they retired; zero for none
	held      []string        // the IDs that count as held
	others    []string        // the other IDs
}

// findHeldForms finds the forms in which GPUs count as held, and decides which
// retiring devices are offered.
func (n *step) findHeldForms() {
	old := map[resource.Device]*oldForm{}
	for name, l := range n.lists {
		containers := n.holders.Containers(name)
		for _, id := range slices.Sorted(maps.Keys(l.retiring)) {
			d := l.retiring[id]
			form := resource.Device{Resource: d.device.Resource, UUID: d.device.UUID, Sharing: d.device.Sharing}
			f := old[form]
			if f == nil {
				f = &oldForm{name: name, list: l, device: d.device}
				old[form] = f
			}
			if d.lastGrant.After(f.lastGrant) {
				f.lastGrant = d.lastGrant
			}
			if !d.Counts() || n.isFree(name, l, d, containers) {
				f.others = append(f.others, id)
				continue
			}
			if f.held == nil { // one for all replicas
				n.held = append(n.held, d.heldForm())
			}
			f.held, f.isKept = append(f.held, id), f.isKept || d.isKept
		}
	}
	for _, c := range n.unserved {
		r, _ := n.plan.Resource(c.Resource)
		if r.Lacks(c.ID) {
			n.held = append(n.held, c)
		}
	}
	gpus := n.unblockable()
	n.blocked.Update(len(gpus) > 0, n.now, blockedFor,
		"there is no PodResources socket of the kubelet, and the end of that pod is seen when another one gets a GPU")
	if n.blocked.Counts() {
		n.held = slices.DeleteFunc(n.held, func(h resource.HeldShape) bool { return gpus[h.GPU] })
		maps.DeleteFunc(old, func(_ resource.Device, f *oldForm) bool { return gpus[f.device.GPU] })
	}
	order.Sort(n.held, compareForms)
	n.withdraw(old)
	for _, f := range old {
		n.offer(f)
	}
}

func compareForms(a, b resource.HeldShape) int {
	return cmp.Or(strings.Compare(a.Resource, b.Resource), strings.Compare(a.ID, b.ID))
}

// unblockable returns GPUs whose held forms cease to count after blockedFor: one GPU for each
// resource of the plan without a free device, where all devices wait for pods that hold them under
// other names. Without PodResources, the kubelet notices the end of such a pod only when it gives a
// device to another pod. That would never happen.
func (n *step) unblockable() map[string]bool {
	gpus := map[string]bool{}
	if !n.holders.NoPodResources() {
		return gpus
	}
	for _, r := range n.plan.Resources {
		gpu := ""
		free := slices.ContainsFunc(r.Devices, func(d resource.Device) bool {
			waits, pods := false, true
			for _, c := range n.held {
				if c.Conflicts(d) {
					named := n.holders.IsNamed(holders.Key{Resource: c.Resource, ID: c.ID})
					waits, pods = true, pods && (n.Has(c.Resource) || named) // otherwise another plugin offers it
				}
			}
			if waits && pods && d.Healthy && gpu == "" {
				gpu = d.GPU
			}
			return d.Healthy && !waits
		})
		// pods still request the resource
		same := slices.ContainsFunc(n.held, func(c resource.HeldShape) bool { return c.Resource == r.Name })
		if !free && !same && gpu != "" {
			gpus[gpu] = true
		}
	}
	return gpus
}

// offer decides which devices of an old form are offered. If the GPU is healthy and no other form
// of it counts as held, these are the devices that count as held. If more devices count as held
// than planned devices wait for them, only as many are offered as wait: first the free devices, and
// then the devices without a known pod, as after a start. The scheduler uses the old count for some
// seconds, and must learn the new count before the pods end.
func (n *step) offer(f *oldForm) {
	now, there := n.plan.NodeDevice(f.device.UUID)
	well := there && now.Healthy && !n.contests(f.device)
	waiting := n.waitFor(f)
	first, last := len(f.others), len(f.others)+len(f.held)
	switch {
	case n.drain.withdraws(f.device.GPU):
		last = first
	case 0 < waiting && waiting < len(f.held) && !f.isKept:
		first, last = 0, waiting
		known := func(id string) int {
			if n.holders.IsHeld(holders.Key{Resource: f.name, ID: id}) {
				return 1
			}
			return 0
		}
		slices.SortStableFunc(f.held, func(a, b string) int { return known(a) - known(b) })
	}
	for i, id := range slices.Concat(f.others, f.held) {
		d := f.list.retiring[id]
		d.device.Healthy, d.offered = well && d.Counts(), well && first <= i && i < last
		f.list.retiring[id] = d
	}
}

// contests reports whether the GPU of a device counts as held in another form.
func (s State) contests(device resource.Device) bool {
	return slices.ContainsFunc(s.held, func(c resource.HeldShape) bool { return c.Conflicts(device) })
}

// waitFor returns how many devices of the plan wait for an old form.
func (n *step) waitFor(f *oldForm) int {
	form := resource.HeldShape{Resource: f.device.Resource, ID: f.device.ID, GPU: f.device.GPU}
	waiting := 0
	for _, r := range n.plan.Resources {
		for d := range r.All() {
			if form.Conflicts(d) {
				waiting++
			}
		}
	}
	return waiting
}
