package listing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// An Answer answers a call of Allocate by one list.
type Answer struct {
	List
	refusal error // why the call gets nothing; nil if it may get devices
}

// Allocate records a call of Allocate for devices of a resource, by container, and returns the
// answer. From now on the devices of the call count as held. mayGive returns why the node must not
// give these devices to a pod now, or nil; a nil function allows all.
//
// The kubelet may have chosen a retiring device just before it received the list with the GPU's new
// form. Then the device is offered again, unless the GPU was allocated in its new form meanwhile.
func (s State) Allocate(
	name string, containers [][]string, mayGive func([]resource.Device) error, h *holders.Holders, now time.Time,
) (State, Answer) {
	if !s.Has(name) {
		return s, Answer{List: List{Resource: resource.Resource{Name: name}}}
	}
	for _, ids := range containers {
		for _, id := range ids {
			h.Ask(holders.Key{Resource: name, ID: id}, now)
		}
	}
	list := s.latest.Lists[name]
	if refused, err := list.refuses(containers, mayGive); refused {
		return s, Answer{list, err}
	}
	n := step{s.clone(), h, now}
	l, changed := n.lists[name], false
	for _, ids := range containers {
		for _, id := range ids {
			changed = n.give(name, l, id) || changed
		}
	}
	var refusal error
	for _, ids := range containers {
		if refusal == nil {
			refusal = n.giveUnits(name, l, ids)
		}
	}
	next := n.State
	if changed {
		next = n.Again(h, now)
	}
	return next, Answer{next.latest.Lists[name], refusal}
}

// refuses reports whether a call gets nothing, as far as that is known before
// retiring devices are given again: a pod whose call is refused holds nothing. The
// error is the refusal of mayGive; nil if the list itself says why, by Devices.
func (l List) refuses(containers [][]string, mayGive func([]resource.Device) error) (refused bool, err error) {
	for _, ids := range containers {
		if !slices.ContainsFunc(ids, func(id string) bool { _, is := l.retiring[id]; return is }) {
			if _, err := (Answer{List: l}).Devices(ids); err != nil {
				return true, nil
			}
		}
		var devices []resource.Device
		for _, id := range ids {
			if d, held := l.PossiblyHeld(id); held {
				devices = append(devices, d)
			}
		}
		if mayGive == nil || len(devices) == 0 {
			continue
		}
		if err := mayGive(devices); err != nil {
			return true, refuse(Withheld, "%v", err)
		}
	}
	return false, nil
}

// give records the allocation of a device, if the device may be allocated. It reports whether the
// lists change.
func (n *step) give(name string, l *list, id string) (changed bool) {
	key := holders.Key{Resource: name, ID: id}
	device, planned := l.resource.Device(id)
	d, isRetiring := l.retiring[id]
	switch {
	case planned && device.Healthy:
		n.holders.Give(key, n.now)
		n.markReassigned(device)
	case isRetiring && !d.gpuReassigned && !n.contests(d.device):
		if !d.Counts() {
			changed = true
			n.clearOffered(d)
		}
		changed = changed || !d.offered && l.resource.UnitClients(d.device.UUID) > 0
		n.holders.Give(key, n.now)
		d.State, d.lastGrant, n.lastRegrant = d.Allocate(n.now), n.now, n.now
		l.retiring[id] = d
	}
	return changed
}

// clearOffered records that no pod can hold the planned devices that wait for a
// retiring device which is allocated once more.
func (n *step) clearOffered(d retiring) {
	for _, l := range n.lists {
		for _, device := range l.resource.Devices {
			if d.heldForm().Conflicts(device) {
				delete(l.everOffered, device.UUID)
			}
		}
	}
}

// markReassigned records that a planned device is given to a pod. From now on its
// GPU is not allocated in another form.
func (n *step) markReassigned(device resource.Device) {
	for _, l := range n.lists {
		for id, d := range l.retiring {
			if d.heldForm().Conflicts(device) {
				d.gpuReassigned = true
				l.retiring[id] = d
			}
		}
	}
}

// A Refusal is the kind of a RefusalError.
type Refusal int

// The kinds of refusals.
const (
	// Invalid: the call is wrong.
	Invalid Refusal = iota
	// Unknown: no list has the device.
	Unknown
	// Withheld: the device may not be allocated now.
	Withheld
)

// A RefusalError says why a call for devices is refused.
type RefusalError struct {
	Kind Refusal
	text string
}

func (e *RefusalError) Error() string { return e.text }

func refuse(kind Refusal, format string, args ...any) error {
	return &RefusalError{kind, fmt.Sprintf(format, args...)}
}

// CanForward reports whether the earlier process of a roll-out may be asked for the
// devices: all of them are healthy and have left the plan of this process.
func (l List) CanForward(ids []string) bool {
	return !slices.ContainsFunc(ids, func(id string) bool {
		d, isRetiring := l.retiring[id]
		return !isRetiring || !d.device.Healthy
	})
}

// Devices returns the devices with the given IDs for one container, or a
// RefusalError that says which ID is wrong and why.
func (a Answer) Devices(ids []string) ([]resource.Device, error) {
	switch {
	case len(ids) == 0:
		return nil, refuse(Invalid, "a container requests no device")
	case a.refusal != nil:
		return nil, a.refusal
	}
	devices := make([]resource.Device, 0, len(ids))
	seen := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		device, known := a.Resource.Device(id)
		if !known {
			device, known = a.allocatable(id)
		}
		if !known {
			return nil, a.Unknown(id)
		}
		if !device.Healthy {
			return nil, refuse(Withheld, "device %s is not healthy: %s", id, device.Reason)
		}
		if _, twice := seen[id]; twice {
			return nil, refuse(Invalid, "device %s is requested twice", id)
		}
		seen[id] = struct{}{}
		devices = append(devices, device)
	}
	if err := a.Resource.Admit(devices); err != nil {
		return nil, refuse(Invalid, "%v", err)
	}
	return devices, nil
}

// allocatable returns a device that left the plan, in the form given to a pod;
// false if no pod may get it.
func (l List) allocatable(id string) (resource.Device, bool) {
	d, isRetiring := l.retiring[id]
	switch {
	case !isRetiring || !d.device.Healthy:
		return d.device, false
	case resource.UnitMiB(l.Resource.Name) > 0:
		return l.asPlanned(d.device)
	}
	return d.device, true
}

// asPlanned returns a unit that left the plan in the form of its GPU's current units. It returns
// false if the GPU no longer has such units: nothing may enforce the limit then.
func (l List) asPlanned(left resource.Device) (resource.Device, bool) {
	i := slices.IndexFunc(l.Resource.Devices, func(d resource.Device) bool { return d.UUID == left.UUID })
	if i < 0 {
		return left, false
	}
	unit := l.Resource.Devices[i]
	unit.ID = left.ID
	return unit, true
}

// PossiblyHeld returns a device that a pod may hold: a device of the plan, or a retiring device.
func (l List) PossiblyHeld(id string) (resource.Device, bool) {
	if device, planned := l.Resource.Device(id); planned {
		return device, true
	}
	d, isRetiring := l.retiring[id]
	return d.device, isRetiring
}

// maxShown bounds the part of an unknown ID in an error, in bytes.
const maxShown = 200

// Unknown returns a RefusalError for a device missing from the plan.
func (l List) Unknown(id string) error {
	if id == "" {
		return refuse(Invalid, "a container asks for a device with an empty ID")
	}
	if d, isRetiring := l.retiring[id]; isRetiring {
		return refuse(Withheld, "device %s cannot be given out: %s", id, cmp.Or(d.device.Reason, d.reason))
	}
	if len(id) > maxShown { // gRPC keeps as much memory for each connection as the longest error took
		id = strings.ToValidUTF8(id[:maxShown], "") + fmt.Sprintf("... (%d bytes)", len(id))
	}
	// The words of NVIDIA's plugin, because existing alerts may search for them.
	return refuse(Unknown, "invalid allocation request for %q: invalid request: unknown device: %s",
		l.Resource.Name, id)
}

// Prefer returns the best `size` available devices for a container. Devices missing from the plan
// come last: they left the plan, or the kubelet chose among them just before it received the list.
// A required device missing from the plan is no error, because the kubelet would fail the pod. The
// following Allocate decides, and names unknown IDs.
func (l List) Prefer(available, required []string, size int) ([]string, error) {
	if l.Resource.InUnits() {
		return l.Resource.Prefer(available, required, size) // retiring units are of the same GPU, or not given
	}
	must, others := l.split(required)
	wanted := max(0, size-len(others))
	ids, err := l.Resource.Prefer(available, must, wanted)
	if known, few := resource.TooFew(err); few { // asked last: there may be thousands of replicas
		_, unknown := l.split(available)
		unknown = slices.DeleteFunc(unknown, func(id string) bool { return slices.Contains(others, id) })
		if missing := wanted - known; missing <= len(unknown) {
			others = append(others, unknown[:missing]...)
			ids, err = l.Resource.Prefer(available, must, known)
		}
	}
	return append(ids, others...), err
}

// split returns the IDs of the plan, and the other IDs, sorted.
func (l List) split(ids []string) (planned, others []string) {
	for _, id := range ids {
		if l.Resource.Lacks(id) {
			others = append(others, id)
		} else {
			planned = append(planned, id)
		}
	}
	slices.Sort(others)
	return planned, slices.Compact(others)
}
