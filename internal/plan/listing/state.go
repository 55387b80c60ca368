package listing

import (
	"maps"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A State has the lists of all resources, and all that decides about the next ones.
// It is immutable: each event returns the next State. The zero value has no list.
type State struct {
	plan    resource.Plan // of the last Next
	options Options       // of the last Next
	uuids   map[string]bool
	latest  *Decision // nil before the first Next

	lists         map[string]*list     // by resource
	held          []resource.HeldShape // forms in which GPUs count as held, other than the planned forms
	unserved      []resource.HeldShape // devices that the kubelet has under resources without a list
	unservedSince map[string]time.Time // since when pods hold devices of a resource without a server
	drain         drain
	shrink        pendingShrink
	blocked       holders.Lasting // a resource has nothing to give because PodResources cannot be asked
	growsAt       time.Time       // when a GPU in a new form may have more devices; zero if none may
	lastRegrant   time.Time       // the last Allocate of a retiring device
}

// Options are the parts of the configuration that decide about lists.
type Options struct {
	// AnnounceShrink makes each removal of devices wait for Approve.
	AnnounceShrink bool
}

// A list is the state of the devices of one resource.
type list struct {
	resource resource.Resource // of the plan, with the holds of the last Decision
	// UUIDs of devices of the resource that were offered at some time since they were added
	everOffered map[string]bool
	retiring    map[string]retiring // by device ID
	units       units               // if the devices are units of memory
	devices     []Entry             // the last list
	// IDs in the kubelet's list, if another process sent the list; nil if devices was sent
	adoptedIDs map[string]bool
}

// A retiring device left the plan and is still listed. It is Healthy as long as the
// device counts as held and its GPU is healthy: the kubelet gives a held device to
// no other pod, and the scheduler's count of the node stays the same.
type retiring struct {
	holders.State
	device      resource.Device // Healthy if Allocate gives it; on another node, ID and UUID alone are known
	nodes       []int64         // the NUMA nodes in the kubelet's checkpoint, if another process listed the device
	reason      string          // why Allocate refuses it
	offered     bool            // listed as Healthy
	lastOffered time.Time       // when the device was last offered since it retired; zero if never
	wasOffered  bool            // offered until it left the plan; may be kept
	isKept      bool            // stays offered, and counts as held, until Approve
	lastGrant   time.Time       // the last grant since the device retired; zero for none
	// The device was never offered, or Allocate has given the GPU in another form
	// since the device ceased to count as held.
	gpuReassigned bool
}

// Counts reports whether the device counts as held by a pod.
func (d retiring) Counts() bool { return d.isKept || d.State.Counts() }

// heldForm returns the form of a retiring device that counts as held.
func (d retiring) heldForm() resource.HeldShape {
	form := resource.HeldShape{Resource: d.device.Resource, ID: d.device.ID, GPU: d.device.GPU, Reason: d.WaitsFor()}
	if d.isKept {
		form.Reason, form.Row = waitsForTaint, resource.RowTaint
	}
	return form
}

// Latest returns the latest Decision; nil before the first one. Another Decision is
// another pointer.
func (s State) Latest() *Decision { return s.latest }

// Has reports whether a resource has a list.
func (s State) Has(name string) bool { return s.lists[name] != nil }

// Add adds the list of a resource. The devices that the kubelet had at the last
// reading retire. wasOffered says that another process may offer them now.
func (s State) Add(name string, wasOffered bool, h *holders.Holders, now time.Time) State {
	s = s.clone()
	s.add(name, wasOffered, h, now)
	return s
}

func (s *State) add(name string, wasOffered bool, h *holders.Holders, now time.Time) {
	l := &list{everOffered: map[string]bool{}, retiring: map[string]retiring{}}
	l.adopt(h.Complete().Known(name), now)
	for id, d := range l.retiring {
		d.wasOffered = wasOffered
		l.retiring[id] = d
	}
	s.lists[name] = l
}

// Remove removes the list of a resource.
func (s State) Remove(name string) State {
	s = s.clone()
	delete(s.lists, name)
	return s
}

// Adopt adds the known devices of a resource that its list lacks. They retire.
func (s State) Adopt(name string, known map[string][]int64, h *holders.Holders, now time.Time) State {
	next := s.clone()
	if !s.Has(name) || !next.lists[name].adopt(known, now) {
		return s
	}
	return next.Again(h, now)
}

// adopt adds the known devices that the plan lacks, as retiring, each with its NUMA nodes: if a
// list lacks the NUMA node of a device that a running pod holds, the kubelet refuses the pod at its
// next start. adopt reports whether it added devices.
func (l *list) adopt(known map[string][]int64, now time.Time) (changed bool) {
	for id, nodes := range known {
		_, isRetiring := l.retiring[id]
		if isRetiring || !l.resource.Lacks(id) {
			continue
		}
		l.retiring[id] = retiring{device: resource.ByID(id), nodes: slices.Sorted(slices.Values(nodes)),
			State: holders.Adopted(now),
			reason: "an earlier process listed the device, and it is not on this node now, cannot be read, or is not " +
				"in the configuration"}
		changed = true
	}
	if changed {
		l.adoptedIDs = make(map[string]bool, len(known))
		for id := range known {
			l.adoptedIDs[id] = true
		}
	}
	return changed
}

// clone returns a State whose lists may be changed.
func (s State) clone() State {
	lists := make(map[string]*list, len(s.lists))
	for name, l := range s.lists {
		c := *l
		c.everOffered, c.retiring = maps.Clone(l.everOffered), maps.Clone(l.retiring)
		lists[name] = &c
	}
	s.lists, s.drain.tried = lists, maps.Clone(s.drain.tried)
	return s
}

// Again returns the State with another Decision about the same plan.
func (s State) Again(h *holders.Holders, now time.Time) State {
	return Next(s, s.plan, s.options, h, now)
}

// A RetiringDevice is a device that left the plan and is still listed.
type RetiringDevice struct {
	ID string
	// Reason is why the device cannot be allocated.
	Reason string
	// Waiting says what must happen before the list drops the device.
	Waiting string
}

// Retiring returns the retiring devices of a resource, sorted by ID.
func (s State) Retiring(name string) []RetiringDevice {
	if !s.Has(name) {
		return nil
	}
	of := s.lists[name].retiring
	var all []RetiringDevice
	for _, id := range slices.Sorted(maps.Keys(of)) {
		all = append(all, RetiringDevice{ID: id, Reason: of[id].reason, Waiting: of[id].WaitsFor()})
	}
	return all
}

// HasRetiring reports whether a resource has retiring devices.
func (s State) HasRetiring(name string) bool { return s.Has(name) && len(s.lists[name].retiring) > 0 }

// HoldingStates returns what is known of the holders of all retiring devices.
func (s State) HoldingStates() map[holders.Key]holders.State {
	states := map[holders.Key]holders.State{}
	for name, l := range s.lists {
		for id, d := range l.retiring {
			states[holders.Key{Resource: name, ID: id}] = d.State
		}
	}
	return states
}
