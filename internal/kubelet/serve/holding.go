package serve

import "time"

// A holding is what is known of whether a pod holds a departing device.
type holding int

const (
	// unread: a pod may hold it, and kubelet's accounts have not been read since, or cannot be.
	unread holding = iota
	// lost: the same, for so long that the device no longer counts as held.
	lost
	// held: kubelet's accounts name a pod.
	held
	// given: they name none, but kubelet may have allocated the device a short time ago: they do not
	// show that at once.
	given
	// ended: only the checkpoint names a pod, and PodResources has shown that the pod has ended.
	ended
	// free: they have named none since a time that is known.
	free
	// unheld: they cannot be read, and no pod can hold the device: it was never on offer, or it was
	// free and not given since.
	unheld
	holdings // their number
)

// A finding is what one reading of kubelet's accounts, or a call of Allocate, says of a device.
type finding int

const (
	namesPod    finding = iota // a pod holds it
	namesEnded                 // only the checkpoint names a pod, which has ended
	namesNone                  // no pod holds it
	namesNotYet                // the same, a short time after a call of Allocate
	saysNothing                // the accounts cannot be read
	staysSilent                // the same, for so long that it counts
	allocates                  // kubelet allocates the device
	findings                   // their number
)

// transitions are what follows from each holding by each finding. docs/dev/architecture.md has a
// picture of them.
var transitions = [holdings][findings]holding{
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

// cannotBeHeld reports whether no pod can hold the device, as long as kubelet does not allocate it.
func (h holding) cannotBeHeld() bool { return h == ended || h == free || h == unheld }

// A possession is who has a departing device, as far as that is known, and since when.
type possession struct {
	holding
	allocated time.Time // the last possible Allocate that kubelet's accounts need not show yet
	since     time.Time // since when the accounts name no pod; zero if they do, or cannot be read
	kubelet   uint64    // incarnation of kubelet since then
	shown     source    // who has shown its holder through PodResources since the last Allocate
	waits     string    // why the device is still listed
}

// allocate returns the possession after a call of Allocate.
func (p possession) allocate(now time.Time) possession {
	p.holding = transitions[p.holding][allocates]
	p.allocated, p.shown, p.waits = now, source{}, waitsForAllocate
	return p
}

// read returns the possession after a reading of the accounts. If named, holder has the device. The
// accounts are silent if they cannot be read for so long that it counts. What happened after the
// reading began, which may be long before now, they need not show.
func (p possession) read(e evidence, holder holder, named, silent bool, now time.Time) possession {
	// The checkpoint may still name the pod before the last Allocate, PodResources does not.
	if named && !holder.checkpointOnly && e.began.After(p.allocated) {
		p.shown, p.allocated = e.source, time.Time{}
	}
	recent := e.began.Sub(p.allocated) < freeFor
	f := namesNone
	switch {
	case named && holder.checkpointOnly && p.shown == e.source && p.shown != source{}:
		f, p.waits = namesEnded, "kubelet's checkpoint still names pod "+holder.pod+", which has ended"
	case named:
		f, p.waits = namesPod, heldBy(holder.pod)
	case e.gap != "" && silent && !recent:
		f, p.waits = staysSilent, e.gap
	case e.gap != "":
		f, p.waits = saysNothing, e.gap
	case recent:
		f, p.waits = namesNotYet, waitsForAllocate
	default:
		p.waits = "no pod holds it; it is dropped after " + freeFor.String()
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

// over reports whether the list may drop the device, after a reading of the accounts that began at
// this time.
func (p possession) over(began time.Time) bool {
	return p.holding == free && began.Sub(p.since) >= freeFor
}
