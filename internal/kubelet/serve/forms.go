package serve

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// unservedFor is how long no plugin must be known to serve a resource before this plugin serves the
// resource for the pods that hold its devices. A plugin that restarts, or registers with a new
// kubelet, needs less time. The kubelet tolerates this time without a server.
const unservedFor = 10 * time.Second

// refresh makes all lists match the plan and the evidence: which devices are retiring, which of
// them count as held, and which planned devices are withheld for them. It publishes the plan with
// its holds.
func (s *Servers) refresh() {
	for name, entry := range s.resources {
		r, _ := s.wanted.plan.Resource(name)
		entry.list.replace(r, s.holders)
		for id, d := range entry.list.retiring {
			if d.offered {
				d.lastOffered = s.collaborators.Clock.Now()
			}
			d.device, d.offered = s.onNode(name, d.device), false
			entry.list.retiring[id] = d
		}
	}
	s.forms.held, s.observed.unservedForms = nil, s.findUnservedForms()
	s.keepUntilApproved()
	s.findHeldForms()
	withheld := map[string]map[string]bool{}
	holds := s.wanted.plan.Conflicts(s.forms.held)
	for _, h := range holds {
		if withheld[h.Resource] == nil {
			withheld[h.Resource] = map[string]bool{}
		}
		withheld[h.Resource][h.UUID] = true
	}
	plan := s.limitGrowth(s.wanted.plan.Under(holds))
	if why := s.holders.Silence(); why != "" {
		plan.Warnings = append(slices.Clone(plan.Warnings),
			"it is not known which devices pods hold: a GPU whose name or sharing "+
				"changed is offered, although a pod may hold it in its old form: "+why)
	}
	if s.forms.blocked.Counts() {
		plan.Warnings = append(slices.Clone(plan.Warnings),
			"a GPU whose resource has another name now is offered, although a pod may hold it "+
				"under the old name: "+s.forms.blocked.Reason)
	}
	for name, entry := range s.resources {
		r, planned := plan.Resource(name)
		if !planned {
			r.Name = name
		}
		s.offerUnits(entry.list, r)
		entry.list.publish(r, s.wanted.options, withheld[name])
	}
	s.offered.Publish(plan)
}

// growsAfter is the time between the last offer of a GPU in its old form and the offer of more
// devices of this GPU than before. By then the kubelet has received the list, and has finished the
// calls for devices chosen earlier.
const growsAfter = 500 * time.Millisecond

// limitGrowth withholds devices of GPUs that have just changed their form, beyond the number on
// offer in the old form. The kubelet may allocate such a GPU once more in its old form, and then
// the devices in the new form are withheld. The count must not rise before that and then fall,
// because the scheduler would send pods for missing devices.
func (s *Servers) limitGrowth(plan resource.Plan) resource.Plan {
	type devices struct{ resource, uuid string }
	before, now := map[devices]int{}, s.collaborators.Clock.Now()
	s.forms.growsAt = time.Time{}
	for name, entry := range s.resources {
		for _, d := range entry.list.retiring {
			if at := d.lastOffered.Add(growsAfter); !d.offered && now.Before(at) {
				before[devices{name, d.device.UUID}]++
				if s.forms.growsAt.IsZero() || at.Before(s.forms.growsAt) {
					s.forms.growsAt = at
				}
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

// onNode returns a retiring device of a resource with the node's current data. The device is not on
// offer.
func (s *Servers) onNode(name string, departing resource.Device) resource.Device {
	device, there := s.wanted.plan.NodeDevice(departing.UUID)
	if !there {
		device = departing
	}
	device.ID, device.Resource, device.Sharing, device.Healthy = departing.ID, name, departing.Sharing, false
	return device
}

// An oldForm is a retiring device in one form, with all its replicas.
type oldForm struct {
	list        *list
	device      resource.Device // one of them
	keptOnOffer bool            // all of them stay on offer for now
	lastGrant   time.Time       // when one was given last since they left the plan; zero if none was
	held        []string        // the IDs that count as held
	others      []string        // the other IDs
}

// findHeldForms finds the forms in which GPUs count as held, and decides which retiring devices
// are on offer.
func (s *Servers) findHeldForms() {
	old := map[resource.Device]*oldForm{}
	for name, entry := range s.resources {
		containers := s.holders.Containers(name)
		for _, id := range slices.Sorted(maps.Keys(entry.list.retiring)) {
			d := entry.list.retiring[id]
			form := resource.Device{Resource: d.device.Resource, UUID: d.device.UUID, Sharing: d.device.Sharing}
			f := old[form]
			if f == nil {
				f = &oldForm{list: entry.list, device: d.device}
				old[form] = f
			}
			if d.lastGrant.After(f.lastGrant) {
				f.lastGrant = d.lastGrant
			}
			if !d.Counts() || s.isFree(entry.list, d, containers) {
				f.others = append(f.others, id)
				continue
			}
			if f.held == nil { // one for all replicas
				s.forms.held = append(s.forms.held, d.heldForm())
			}
			f.held, f.keptOnOffer = append(f.held, id), f.keptOnOffer || d.keptOnOffer
		}
	}
	for _, c := range s.observed.unservedForms {
		r, _ := s.wanted.plan.Resource(c.Resource)
		if _, offered := r.Device(c.ID); !offered {
			s.forms.held = append(s.forms.held, c)
		}
	}
	gpus := s.unblockable()
	s.forms.blocked.Update(len(gpus) > 0, s.collaborators.Clock.Now(), blockedFor,
		"there is no PodResources socket of the kubelet, and the end of that pod is seen when another one gets a GPU")
	if s.forms.blocked.Counts() {
		s.forms.held = slices.DeleteFunc(s.forms.held, func(h resource.HeldShape) bool { return gpus[h.GPU] })
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

// blockedFor is how long a resource must have nothing to give before that counts. A starting daemon
// knows after unservedFor which forms pods hold.
const blockedFor = 30 * time.Second

// unblockable returns GPUs whose held forms cease to count after blockedFor: one GPU for each
// resource of the plan without a free device, where all devices wait for pods that hold them under
// other names. Without PodResources, the kubelet notices the end of such a pod only when it gives a
// device to another pod. That would never happen.
func (s *Servers) unblockable() map[string]bool {
	gpus := map[string]bool{}
	if !s.holders.NoPodResources() {
		return gpus
	}
	for _, r := range s.wanted.plan.Resources {
		gpu := ""
		free := slices.ContainsFunc(r.Devices, func(d resource.Device) bool {
			waits, pods := false, true
			for _, c := range s.forms.held {
				if c.Conflicts(d) {
					_, served := s.resources[c.Resource]
					named := s.holders.IsNamed(holders.Key{Resource: c.Resource, ID: c.ID})
					waits, pods = true, pods && (served || named) // otherwise another plugin offers it
				}
			}
			if waits && pods && d.Healthy && gpu == "" {
				gpu = d.GPU
			}
			return d.Healthy && !waits
		})
		// pods still request the resource
		same := slices.ContainsFunc(s.forms.held, func(c resource.HeldShape) bool { return c.Resource == r.Name })
		if !free && !same && gpu != "" {
			gpus[gpu] = true
		}
	}
	return gpus
}

// offer decides which devices of an old form are on offer. If the GPU is healthy and no other form
// of it counts as held, these are the devices that count as held. If more devices count as held
// than planned devices wait for them, only as many are on offer as wait: first the free devices,
// and then the devices without a known pod, as after a start. The scheduler uses the old count for
// some seconds, and must learn the new count before the pods end.
func (s *Servers) offer(f *oldForm) {
	now, there := s.wanted.plan.NodeDevice(f.device.UUID)
	well := there && now.Healthy && !s.contests(f.device)
	waiting := s.waitFor(f)
	first, last := len(f.others), len(f.others)+len(f.held)
	switch {
	case s.forms.drain.withdraws(f.device.GPU):
		last = first
	case 0 < waiting && waiting < len(f.held) && !f.keptOnOffer:
		first, last = 0, waiting
		known := func(id string) int {
			if s.holders.IsHeld(f.list.key(id)) {
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
func (s *Servers) contests(device resource.Device) bool {
	return slices.ContainsFunc(s.forms.held, func(c resource.HeldShape) bool { return c.Conflicts(device) })
}

// allocating returns the view of a list for the answer to a call of Allocate. From now on the
// devices of the call count as held.
//
// The kubelet may have chosen a retiring device just before it received the list with the GPU's new
// form. Then the device is on offer again, unless the GPU was allocated in its new form meanwhile.
func (s *Servers) allocating(l *list, request *pluginapi.AllocateRequest) *view {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.collaborators.Clock.Now()
	changed := false
	for _, container := range request.GetContainerRequests() {
		for _, id := range container.GetDevicesIds() {
			s.holders.Ask(l.key(id), now)
			device, planned := l.resource.Device(id)
			d, departing := l.retiring[id]
			switch {
			case planned && device.Healthy:
				s.holders.Give(l.key(id), now)
				s.markReassigned(device)
			case departing && !d.gpuReassigned && !s.contests(d.device):
				if !d.Counts() {
					changed = true
					s.clearOffered(d)
				}
				changed = changed || !d.offered && l.resource.UnitClients(d.device.UUID) > 0
				s.holders.Give(l.key(id), now)
				d.State, d.lastGrant = d.Allocate(now), now
				s.lastRegrant = now
				l.retiring[id] = d
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

// clearOffered records that no pod can hold the planned devices that wait for a retiring device
// which is allocated once more.
func (s *Servers) clearOffered(d retiringDevice) {
	for _, entry := range s.resources {
		for _, device := range entry.list.resource.Devices {
			if d.heldForm().Conflicts(device) {
				delete(entry.list.everOffered, device.UUID)
			}
		}
	}
}

// markReassigned records that a planned device is given to a pod. From now on its GPU is not
// allocated in another form.
func (s *Servers) markReassigned(device resource.Device) {
	for _, entry := range s.resources {
		for id, d := range entry.list.retiring {
			if d.heldForm().Conflicts(device) {
				d.gpuReassigned = true
				entry.list.retiring[id] = d
			}
		}
	}
}

// heldForm returns the form of a retiring device that counts as held.
func (d retiringDevice) heldForm() resource.HeldShape {
	form := resource.HeldShape{Resource: d.device.Resource, ID: d.device.ID, GPU: d.device.GPU, Reason: d.WaitsFor()}
	if d.keptOnOffer {
		form.Reason = waitsForTaint
	}
	return form
}

// findUnservedForms returns the kubelet's devices of resources that this process does not serve:
// the devices on GPUs of the plan, and the devices that this program may have offered on other
// GPUs.
func (s *Servers) findUnservedForms() []resource.HeldShape {
	var foreign []resource.HeldShape
	add := func(name, id, reason string) {
		uuid, _ := resource.SplitID(id)
		if _, served := s.resources[name]; !served && (s.wanted.uuids[uuid] || resource.MayBeOurs(name, id)) {
			device, _ := s.wanted.plan.NodeDevice(uuid)
			foreign = append(foreign, resource.HeldShape{Resource: name, ID: id, GPU: device.GPU, Reason: reason})
		}
	}
	for key, holder := range s.holders.Complete().Held {
		add(key.Resource, key.ID, holder.Reason())
	}
	for name, ids := range s.observed.checkpoint.Healthy {
		for _, id := range ids {
			if !s.holders.IsNamed(holders.Key{Resource: name, ID: id}) {
				add(name, id, "another device plugin offers it, or did so until a short time ago")
			}
		}
	}
	slices.SortFunc(foreign, func(a, b resource.HeldShape) int {
		return cmp.Or(strings.Compare(a.Resource, b.Resource), strings.Compare(a.ID, b.ID))
	})
	return foreign
}

// update applies new evidence about resources without a server in this process, and about whether
// the checkpoint can be read. It reports whether a new checkpoint would say more, and whether the
// held forms or the resources changed.
func (s *Servers) update(e evidence, now time.Time) (outdated, changed bool) {
	before, kubelet := s.observed.unservedForms, s.holders.Complete().Kubelet
	since := s.observed.unservedSince
	s.observed.unservedSince = map[string]time.Time{}
	warns := s.holders.Tell(e.Account, now)
	if e.UnknownBecause == "" {
		if kubelet != e.Kubelet {
			since = nil
		}
		s.observed.others = e.others
		s.observed.unservedForms = s.findUnservedForms()
		changed = s.serveUnserved(since, now)
	}
	changed = changed || warns || s.forms.blocked.IsDue(now, blockedFor) ||
		!slices.Equal(before, s.observed.unservedForms)
	return e.Unreadable || len(s.observed.unservedForms) > 0, changed
}

// serveUnserved begins to serve resources whose devices pods hold and which no plugin has served
// for unservedFor, if this program may have offered them: their GPUs cannot be read now, or the
// configuration has changed. So the kubelet keeps listing the devices of its pods. It reports
// whether it added resources. since says how long each resource has been known.
func (s *Servers) serveUnserved(since map[string]time.Time, now time.Time) (changed bool) {
	if !s.observed.alone {
		return false
	}
	ours := map[string]bool{}
	for key := range s.holders.Complete().Held {
		uuid, _ := resource.SplitID(key.ID)
		mayBe := resource.MayBeOurs(key.Resource, key.ID) || s.wanted.uuids[uuid] && resource.IsName(key.Resource)
		before, known := ours[key.Resource]
		ours[key.Resource] = mayBe && (before || !known)
	}
	for name, ours := range ours {
		if _, served := s.resources[name]; served || !ours || len(s.observed.healthy[name]) > 0 {
			continue
		}
		began, waited := since[name]
		switch {
		case !waited:
			s.observed.unservedSince[name] = now
		case now.Sub(began) < unservedFor:
			s.observed.unservedSince[name] = began
		default:
			s.add(name).list.retired = true
			changed = true
		}
	}
	return changed
}
