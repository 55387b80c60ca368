package serve

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// unreadableFor is how long kubelet's checkpoint must be unreadable, while kubelet runs, before a
// device no longer counts as held although nothing is known about it.
const unreadableFor = 10 * time.Second

// unservedFor is how long it must be known that no plugin serves a resource, before this one does
// so for the pods that hold its devices. A plugin that starts again, or registers with a new
// kubelet, takes less. Kubelet goes without a server for so long.
const unservedFor = 10 * time.Second

// refresh makes all lists say what the plan and the evidence say: which devices depart, which of
// them count as held, and which devices of the plan are withheld because of those. It publishes the
// plan with its holds.
func (s *Set) refresh() {
	for name, entry := range s.resources {
		r, _ := s.asked.plan.Resource(name)
		entry.list.replace(r)
		for id, d := range entry.list.departing {
			if d.offered {
				d.withdrawn = s.collaborators.Clock.Now()
			}
			d.device, d.offered = s.onNode(name, d.device), false
			entry.list.departing[id] = d
		}
	}
	s.forms.held, s.told.foreign = nil, s.foreignForms()
	s.keep()
	s.findHeldForms()
	withheld := map[string]map[string]bool{}
	holds := s.asked.plan.Conflicts(s.forms.held)
	for _, h := range holds {
		if withheld[h.Resource] == nil {
			withheld[h.Resource] = map[string]bool{}
		}
		withheld[h.Resource][h.UUID] = true
	}
	plan := s.grow(s.asked.plan.Under(holds))
	if why := s.told.silence.reason; why != "" {
		plan.Warnings = append(slices.Clone(plan.Warnings), "it is not known which devices pods hold: a GPU whose name or sharing "+
			"changed is offered, although a pod may hold it in its old form: "+why)
	}
	if s.forms.stuck.counts() {
		plan.Warnings = append(slices.Clone(plan.Warnings), "a GPU whose resource has another name now is offered, although a pod may hold it "+
			"under the old name: "+s.forms.stuck.reason)
	}
	for name, entry := range s.resources {
		r, planned := plan.Resource(name)
		if !planned {
			r.Name = name
		}
		s.offerUnits(entry.list, r)
		entry.list.publish(r, s.asked.options, withheld[name])
	}
	s.offered.Publish(plan)
}

// growsAfter is how long after the last offer of a GPU in its old form more devices of it are on
// offer than there were: kubelet has received the list by then, and has made the calls for devices
// that it chose before.
const growsAfter = 500 * time.Millisecond

// grow withholds devices of GPUs that have just changed their form, beyond as many as were on offer
// in the old form. Kubelet may give such a GPU once more in its old form. Its devices in the new
// form are withheld then. The count must not rise before that and then fall: the scheduler would
// send pods for devices that do not exist.
func (s *Set) grow(plan resource.Plan) resource.Plan {
	type devices struct{ resource, uuid string }
	before, now := map[devices]int{}, s.collaborators.Clock.Now()
	s.forms.grows = time.Time{}
	for name, entry := range s.resources {
		for _, d := range entry.list.departing {
			if at := d.withdrawn.Add(growsAfter); !d.offered && now.Before(at) {
				before[devices{name, d.device.UUID}]++
				s.forms.grows = at
			}
		}
	}
	if len(before) == 0 {
		return plan
	}
	plan.Resources = slices.Clone(plan.Resources)
	for i, r := range plan.Resources {
		if r.InUnits() {
			continue // a unit that left and is given once more takes the place of a free one of its GPU
		}
		all := slices.Clone(r.Devices)
		for j, d := range all {
			of := devices{r.Name, d.UUID}
			switch left, limited := before[of]; {
			case !limited || !d.Healthy:
			case left > 0:
				before[of]--
			default:
				all[j].Healthy, all[j].Reason = false, "its GPU was on offer in another form a moment ago"
			}
		}
		plan.Resources[i].Devices = all
	}
	return plan
}

// onNode returns a departing device of a resource as the node has it now. It is not on offer.
func (s *Set) onNode(name string, departing resource.Device) resource.Device {
	device, there := s.asked.plan.NodeDevice(departing.UUID)
	if !there {
		device = departing
	}
	device.ID, device.Resource, device.Sharing, device.Healthy = departing.ID, name, departing.Sharing, false
	return device
}

// An oldForm is a departing device in one form, with all its replicas.
type oldForm struct {
	list   *list
	device resource.Device // one of them
	kept   bool            // all of them stay on offer for now
	given  time.Time       // when one was given last since they left the plan; zero if none was
	held   []string        // the IDs that count as held
	others []string        // the other IDs
}

// findHeldForms finds the forms in which GPUs count as held, and decides which departing devices
// are on offer.
func (s *Set) findHeldForms() {
	old := map[resource.Device]*oldForm{}
	for _, entry := range s.resources {
		containers := s.unitContainers(entry.list)
		for _, id := range slices.Sorted(maps.Keys(entry.list.departing)) {
			d := entry.list.departing[id]
			form := resource.Device{Resource: d.device.Resource, UUID: d.device.UUID, Sharing: d.device.Sharing}
			f := old[form]
			if f == nil {
				f = &oldForm{list: entry.list, device: d.device}
				old[form] = f
			}
			if d.given.After(f.given) {
				f.given = d.given
			}
			if !d.counts() || s.isFree(entry.list, d, containers) {
				f.others = append(f.others, id)
				continue
			}
			if f.held == nil { // one for all replicas
				s.forms.held = append(s.forms.held, d.heldForm())
			}
			f.held, f.kept = append(f.held, id), f.kept || d.kept
		}
	}
	for _, c := range s.told.foreign {
		r, _ := s.asked.plan.Resource(c.Resource)
		if _, offered := r.Device(c.ID); !offered {
			s.forms.held = append(s.forms.held, c)
		}
	}
	gpus := s.stuck()
	s.forms.stuck.see(len(gpus) > 0, s.collaborators.Clock.Now(), stuckFor,
		"there is no PodResources socket of the kubelet, and the end of that pod is seen when another one gets a GPU")
	if s.forms.stuck.counts() {
		s.forms.held = slices.DeleteFunc(s.forms.held, func(h resource.HeldShape) bool { return gpus[s.gpuOf(h)] })
		maps.DeleteFunc(old, func(_ resource.Device, f *oldForm) bool { return gpus[f.device.GPU] })
	}
	slices.SortFunc(s.forms.held, func(a, b resource.HeldShape) int {
		return cmp.Or(strings.Compare(a.Resource, b.Resource), strings.Compare(a.ID, b.ID))
	})
	s.withdraw(old)
	for _, f := range old {
		s.offer(f)
	}
}

// stuckFor is how long a resource must have nothing to give before that counts. A daemon that
// starts knows after unservedFor which forms pods hold.
const stuckFor = 30 * time.Second

// stuck returns GPUs whose held forms do not count once that has lasted for stuckFor: one for each
// resource of the plan that has nothing to give because all of its devices wait for pods which hold
// them under other names. Where PodResources cannot be asked, kubelet sees that such a pod has
// ended only when it gives a device to another one, which would never come.
func (s *Set) stuck() map[string]bool {
	gpus := map[string]bool{}
	if !s.told.unasked {
		return gpus
	}
	for _, r := range s.asked.plan.Resources {
		gpu := ""
		free := slices.ContainsFunc(r.Devices, func(d resource.Device) bool {
			waits, pods := false, true
			for _, c := range s.forms.held {
				c.GPU = s.gpuOf(c)
				if c.Conflicts(d) {
					_, served := s.resources[c.Resource]
					_, held := s.told.evidence.held[deviceKey{c.Resource, c.ID}]
					waits, pods = true, pods && (served || held) // otherwise another plugin offers it
				}
			}
			if waits && pods && d.Healthy && gpu == "" {
				gpu = d.GPU
			}
			return d.Healthy && !waits
		})
		// pods still ask for it
		same := slices.ContainsFunc(s.forms.held, func(c resource.HeldShape) bool { return c.Resource == r.Name })
		if !free && !same && gpu != "" {
			gpus[gpu] = true
		}
	}
	return gpus
}

// gpuOf returns the GPU of a held form, as far as the node has it.
func (s *Set) gpuOf(c resource.HeldShape) string {
	if c.GPU != "" {
		return c.GPU
	}
	uuid, _ := resource.SplitID(c.ID)
	device, _ := s.asked.plan.NodeDevice(uuid)
	return device.GPU
}

// offer puts devices of an old form on offer if it is well and no other form of its GPU counts as
// held: those that count as held. If these are more than the planned devices that wait for them, so
// many are on offer as wait, at first those that are free, and then those of which no pod is known,
// as after a start: the scheduler sends pods by the old count for some seconds, and must know the
// new one before the pods end.
func (s *Set) offer(f *oldForm) {
	now, there := s.asked.plan.NodeDevice(f.device.UUID)
	well := there && now.Healthy && !s.contests(f.device)
	waiting := s.waitFor(f)
	first, last := len(f.others), len(f.others)+len(f.held)
	switch {
	case s.forms.drain.withdraws(f.device.GPU):
		last = first
	case 0 < waiting && waiting < len(f.held) && !f.kept:
		first, last = 0, waiting
		slices.SortStableFunc(f.held, func(a, b string) int { return s.holders(f.list, a) - s.holders(f.list, b) })
	}
	for i, id := range slices.Concat(f.others, f.held) {
		d := f.list.departing[id]
		d.device.Healthy, d.offered = well && d.counts(), well && first <= i && i < last
		f.list.departing[id] = d
	}
}

// holders returns how many pods are known to hold a device, or were given it a short time ago: 0 or
// 1.
func (s *Set) holders(l *list, id string) int {
	_, held := s.told.evidence.held[deviceKey{l.name, id}]
	_, given := l.allocated[id]
	if held || given {
		return 1
	}
	return 0
}

// contests reports whether the GPU of a device counts as held in another form.
func (s *Set) contests(device resource.Device) bool {
	return slices.ContainsFunc(s.forms.held, func(c resource.HeldShape) bool { return c.Conflicts(device) })
}

// allocating returns the view of a list for the answer to a call of Allocate. The devices of the
// call count as held from now on.
//
// Kubelet may have chosen a departing device in the moment before it received the list that has the
// GPU in its new form. The device is on offer again then, unless the GPU was given in its new form
// meanwhile.
func (s *Set) allocating(l *list, request *pluginapi.AllocateRequest) *view {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.collaborators.Clock.Now()
	maps.DeleteFunc(l.allocated, func(_ string, at time.Time) bool { return now.Sub(at) >= freeFor })
	changed := false
	for _, container := range request.GetContainerRequests() {
		for _, id := range container.GetDevicesIds() {
			s.allocated[deviceKey{l.name, id}]++
			device, planned := l.resource.Device(id)
			d, departing := l.departing[id]
			switch {
			case planned && device.Healthy:
				l.allocated[id] = now
				s.take(device)
			case departing && !d.taken && !s.contests(d.device):
				if !d.counts() {
					changed = true
					s.untouched(d)
				}
				changed = changed || !d.offered && l.resource.UnitClients(d.device.UUID) > 0
				l.allocated[id] = now
				d.possession, d.given = d.allocate(now), now
				s.regiven = now
				l.departing[id] = d
			}
		}
	}
	refusal := ""
	for _, container := range request.GetContainerRequests() {
		if refusal == "" {
			refusal = s.giveUnits(l, container.GetDevicesIds(), now)
		}
	}
	if changed {
		s.refresh()
	}
	view := l.views.Value()
	if refusal != "" {
		refused := *view
		refused.refusal = refusal
		return &refused
	}
	return view
}

// waitsForAllocate is why a device that a pod may have got a short time ago counts as held.
const waitsForAllocate = "kubelet may have allocated it within the last 10s"

// untouched notes that no pod can hold the devices of the plan that wait for a departing device
// which is given once more.
func (s *Set) untouched(d departure) {
	for _, entry := range s.resources {
		for _, device := range entry.list.resource.Devices {
			if d.heldForm().Conflicts(device) {
				delete(entry.list.offered, device.UUID)
			}
		}
	}
}

// take notes that a device of the plan is given to a pod: its GPU is not given in another form from
// now on.
func (s *Set) take(device resource.Device) {
	for _, entry := range s.resources {
		for id, d := range entry.list.departing {
			if d.heldForm().Conflicts(device) {
				d.taken = true
				entry.list.departing[id] = d
			}
		}
	}
}

// heldForm returns the form that a departing device has if it counts as held.
func (d departure) heldForm() resource.HeldShape {
	form := resource.HeldShape{Resource: d.device.Resource, ID: d.device.ID, GPU: d.device.GPU, Reason: d.waits}
	if d.kept {
		form.Reason = waitsForTaint
	}
	return form
}

// foreignForms returns the devices that kubelet has under resources which this Set does not serve:
// those on GPUs of the plan, and those that this program may have offered on other GPUs.
func (s *Set) foreignForms() []resource.HeldShape {
	var foreign []resource.HeldShape
	add := func(name, id, reason string) {
		uuid, _ := resource.SplitID(id)
		if _, served := s.resources[name]; !served && (s.asked.uuids[uuid] || resource.MayBeOurs(name, id)) {
			foreign = append(foreign, resource.HeldShape{Resource: name, ID: id, Reason: reason})
		}
	}
	for key, holder := range s.told.evidence.held {
		add(key.resource, key.id, heldBy(holder.pod))
	}
	for name, ids := range s.told.evidence.checkpoint.Healthy {
		for _, id := range ids {
			if _, held := s.told.evidence.held[deviceKey{name, id}]; !held {
				add(name, id, "another device plugin offers it, or did so until a short time ago")
			}
		}
	}
	slices.SortFunc(foreign, func(a, b resource.HeldShape) int {
		return cmp.Or(strings.Compare(a.Resource, b.Resource), strings.Compare(a.ID, b.ID))
	})
	return foreign
}

// update takes in new evidence about resources that this Set does not serve, and about whether the
// checkpoint can be read. It reports whether a new checkpoint would say more, and whether the held
// forms or the resources changed.
func (s *Set) update(e evidence, now time.Time) (outdated, changed bool) {
	before, silence := s.told.foreign, s.told.silence.reason
	s.told.silence.see(e.unreadable, now, unreadableFor, e.gap)
	since := s.told.unserved
	s.told.unserved = map[string]time.Time{}
	if e.tells() {
		s.told.holders = maps.Clone(e.held)
		for key, h := range s.told.evidence.held {
			if _, named := e.held[key]; e.unreadable && h.checkpointOnly && !named {
				s.told.holders[key] = h // it may be an init container, which PodResources leaves out
			}
		}
	}
	if e.gap == "" {
		if s.told.evidence.kubelet != e.kubelet {
			since = nil
		}
		s.told.evidence = e
		s.forms.held, s.told.foreign = nil, s.foreignForms()
		changed = s.serveUnserved(since, now)
	}
	changed = changed || s.forms.stuck.isDue(now, stuckFor) || s.told.silence.reason != silence ||
		e.unasked != s.told.unasked ||
		!slices.Equal(before, s.told.foreign)
	s.told.unasked = e.unasked
	return e.unreadable || len(s.told.foreign) > 0, changed
}

// serveUnserved begins to serve resources of which pods hold devices and which no plugin has served
// for unservedFor, although this program may have offered them: their GPUs cannot be read now, or
// the configuration has changed. So kubelet goes on listing what its pods hold. It reports whether
// there are any. since says how long the resources are known.
func (s *Set) serveUnserved(since map[string]time.Time, now time.Time) (changed bool) {
	if !s.told.evidence.alone {
		return false
	}
	ours := map[string]bool{}
	for key := range s.told.evidence.held {
		uuid, _ := resource.SplitID(key.id)
		mayBe := resource.MayBeOurs(key.resource, key.id) || s.asked.uuids[uuid] && resource.IsName(key.resource)
		before, known := ours[key.resource]
		ours[key.resource] = mayBe && (before || !known)
	}
	for name, ours := range ours {
		if _, served := s.resources[name]; served || !ours || len(s.told.evidence.healthy[name]) > 0 {
			continue
		}
		began, waited := since[name]
		switch {
		case !waited:
			s.told.unserved[name] = now
		case now.Sub(began) < unservedFor:
			s.told.unserved[name] = began
		default:
			s.add(name).list.retired = true
			changed = true
		}
	}
	return changed
}

// heldBy is the reason of a device that a pod holds.
func heldBy(pod string) string { return "pod " + pod + " holds it" }
