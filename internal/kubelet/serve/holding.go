package serve

import "time"

// A holding says whether a pod holds a retiring device, as far as known.
type holding int

const (
	// unread: a pod may hold the device, and the kubelet's accounts have not been read since, or
	// cannot be read.
	unread holding = iota
	// lost: as unread, for so long that the device no longer counts as held.
	lost
	// held: the kubelet's accounts name a pod.
	held
	// given: the accounts name no pod, but the kubelet may have allocated the device a short time ago.
	// The accounts do not show an allocation at once.
	given
	// ended: only the checkpoint names a pod, and PodResources has shown that the pod has ended.
	ended
	// free: the accounts have named no pod since a known time.
	free
	// unheld: the accounts cannot be read, and no pod can hold the device: the device was never on
	// offer, or was free and not allocated since.
	unheld
	holdings // their number
)

// An observation is what one reading of the kubelet's accounts, or a call of Allocate, says about a
// device.
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

// transitions has the next holding for each holding and observation. docs/dev/architecture.md shows
// them as a picture.
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

// counts reports whether the device counts as held by a pod.
func (h holding) counts() bool { return h == unread || h == held || h == given }

// cannotBeHeld reports whether no pod can hold the device until the kubelet allocates it again.
func (h holding) cannotBeHeld() bool { return h == ended || h == free || h == unheld }

// A holdState says who holds a retiring device, as far as known, and since when.
type holdState struct {
	holding
	lastAllocate time.Time // the last possible Allocate that kubelet's accounts need not show yet
	since        time.Time // since when the accounts name no pod; zero if they do, or cannot be read
	kubelet      uint64    // incarnation of the kubelet since then
	confirmedBy  source    // who has shown its holder through PodResources since the last Allocate
	waitsFor     string    // why the device is still listed
}

// allocate returns the state after a call of Allocate.
func (p holdState) allocate(now time.Time) holdState {
	p.holding = transitions[p.holding][allocates]
	p.lastAllocate, p.confirmedBy, p.waitsFor = now, source{}, waitsForAllocate
	return p
}

// read returns the state after a reading of the accounts. If named, holder has the device. silent
// says that the accounts have been unreadable long enough to count. The accounts need not show
// events after the beginning of the reading, which may be long before now.
func (p holdState) read(e evidence, holder holder, named, silent bool, now time.Time) holdState {
	// The checkpoint may still name the pod of an earlier Allocate. PodResources does not.
	if named && !holder.checkpointOnly && e.began.After(p.lastAllocate) {
		p.confirmedBy, p.lastAllocate = e.source, time.Time{}
	}
	recent := e.began.Sub(p.lastAllocate) < freeFor
	f := namesNone
	switch {
	case named && holder.checkpointOnly && p.confirmedBy == e.source && p.confirmedBy != source{}:
		f, p.waitsFor = namesEnded, "kubelet's checkpoint still names pod "+holder.pod+", which has ended"
	case named:
		f, p.waitsFor = namesPod, heldBy(holder.pod)
	case e.unknownBecause != "" && silent && !recent:
		f, p.waitsFor = staysSilent, e.unknownBecause
	case e.unknownBecause != "":
		f, p.waitsFor = saysNothing, e.unknownBecause
	case recent:
		f, p.waitsFor = namesNotYet, waitsForAllocate
	default:
		p.waitsFor = "no pod holds it; it is dropped after " + freeFor.String()
	}
	switch {
	case f != namesNone && f != namesNotYet:
		p.since = time.Time{}
	case p.since.IsZero() || p.kubelet != e.kubelet:
		p.since, p.kubelet = now, e.kubelet
	}
	p.holding = transitions[p.holding][f]
	return p
}

// over reports whether the list may drop the device after a reading of the accounts that began at
// this time.
func (p holdState) over(began time.Time) bool {
	return p.holding == free && began.Sub(p.since) >= freeFor
}
