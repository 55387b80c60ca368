package holders

import "time"

// A holding says whether a pod holds a retiring device, as far as known.
type holding int

const (
	// unread: a pod may hold the device, and the kubelet's accounts have not been
	// read since, or cannot be read.
	unread holding = iota
	// lost: as unread, for so long that the device no longer counts as held.
	lost
	// held: the kubelet's accounts name a pod.
	held
	// given: the accounts name no pod, but the kubelet may have allocated the
	// device a short time ago. The accounts do not show an allocation at once.
	given
	// ended: only the checkpoint names a pod, and PodResources has shown that the pod has ended.
	ended
	// free: the accounts have named no pod since a known time.
	free
	// unheld: the accounts were not read since, or cannot be read, and no pod can hold the device: it
	// was never offered, or was free and not allocated since.
	unheld
	holdings // their number
)

// An observation is what one reading of the kubelet's accounts, or a call of
// Allocate, says about a device.
type observation int

const (
	namesPod     observation = iota // a pod holds it
	namesEnded                      // only the checkpoint names a pod, which has ended
	namesNone                       // no pod holds it
	namesNotYet                     // the same, a short time after a call of Allocate
	saysNothing                     // the accounts cannot be read
	staysSilent                     // the same, for so long that it counts
	allocates                       // the kubelet allocates the device
	observations                    // their number
)

// transitions has the next holding for each holding and observation.
// docs/dev/architecture.md shows them as a table.
var transitions = [holdings][observations]holding{
	//        namesPod, namesEnded, namesNone, namesNotYet, saysNothing, staysSilent, allocates
	unread: {held, ended, free, given, unread, lost, given},
	lost:   {held, ended, free, given, unread, lost, given},
	held:   {held, ended, free, given, unread, lost, given},
	given:  {held, ended, free, given, unread, lost, given},
	ended:  {held, ended, free, given, unheld, unheld, given},
	free:   {held, ended, free, given, unheld, unheld, given},
	unheld: {held, ended, free, given, unheld, unheld, given},
}

// Counts reports whether the device counts as held by a pod.
func (h holding) Counts() bool { return h == unread || h == held || h == given }

// CannotBeHeld reports whether no pod can hold the device until the kubelet allocates it again.
func (h holding) CannotBeHeld() bool { return h == ended || h == free || h == unheld }

// A State says who holds a device that left the plan, as far as known, and since when.
type State struct {
	holding
	lastAllocate time.Time // the last possible Allocate that the kubelet's accounts need not show yet
	since        time.Time // since when the accounts name no pod; zero if they do, or cannot be read
	kubelet      uint64    // incarnation of the kubelet since then
	confirmedBy  Source    // who has shown its holder through PodResources since the last Allocate
	waitsFor     string
}

// waitsForReading is why a device is still listed before the first reading.
const waitsForReading = "the kubelet's checkpoint was not read since the device left the plan"

// waitsForAllocate is why a device counts as held that a pod may have received a short time ago.
const waitsForAllocate = "the kubelet may have allocated it within the last 10s"

// Adopted is the state of a device that another process listed: that process may
// have given it to a pod until now.
func Adopted(now time.Time) State { return State{lastAllocate: now, waitsFor: waitsForReading} }

// WaitsFor says why the device is still listed.
func (s State) WaitsFor() string { return s.waitsFor }

// Allocate returns the state after a call of Allocate that gives the device to a pod.
func (s State) Allocate(now time.Time) State {
	s.holding = transitions[s.holding][allocates]
	s.lastAllocate, s.confirmedBy, s.waitsFor = now, Source{}, waitsForAllocate
	return s
}

// Read returns the state of a device after a reading of the accounts, which h was told. The
// accounts need not show events after the beginning of the reading, which may be long before now.
func (s State) Read(h *Holders, a Account, device Key, now time.Time) State {
	holder, named := a.Held[device]
	// The checkpoint may still name the pod of an earlier Allocate. PodResources does not.
	if named && !holder.CheckpointOnly && a.Began.After(s.lastAllocate) {
		s.confirmedBy, s.lastAllocate = a.Source, time.Time{}
	}
	recent := a.Began.Sub(s.lastAllocate) < FreeFor
	o := namesNone
	switch {
	case named && holder.CheckpointOnly && s.confirmedBy == a.Source && s.confirmedBy != Source{}:
		o, s.waitsFor = namesEnded, "the kubelet's checkpoint still names pod "+holder.Pod+", which has ended"
	case named:
		o, s.waitsFor = namesPod, holder.Reason()
	case a.UnknownBecause != "" && h.unreadable.Counts() && !recent:
		o, s.waitsFor = staysSilent, a.UnknownBecause
	case a.UnknownBecause != "":
		o, s.waitsFor = saysNothing, a.UnknownBecause
	case recent:
		o, s.waitsFor = namesNotYet, waitsForAllocate
	default:
		s.waitsFor = "no pod holds it; it is dropped after " + FreeFor.String()
	}
	switch {
	case o != namesNone && o != namesNotYet:
		s.since = time.Time{}
	case s.since.IsZero() || s.kubelet != a.Kubelet:
		s.since, s.kubelet = now, a.Kubelet
	}
	s.holding = transitions[s.holding][o]
	return s
}

// IsOver reports whether the list may drop the device after a reading of the
// accounts that began at this time.
func (s State) IsOver(began time.Time) bool {
	return s.holding == free && began.Sub(s.since) >= FreeFor
}
