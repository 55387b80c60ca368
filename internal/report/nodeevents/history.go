package nodeevents

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// maxAlike is how many GPUs one change may concern for each to get an Event of its own.
const maxAlike = 4

// The causes for which an Event is not written.
const (
	DropSubjectRate = "subject rate" // of a GPU, the driver, the configuration, or what is left out
	DropNodeRate    = "node rate"
	DropQueue       = "queue"
)

// The states of the driver of which Events tell.
const (
	driverReady    = "ready"
	driverNotReady = "not ready"
	driverReleased = "released"
)

// A History records which Events were written about a node. The zero value has none. If a limit
// delays an Event, it is written when the limit allows it and if it is still true then. So the last
// Event about a GPU is soon true again.
type History struct {
	begun   bool
	hadGPUs bool
	driver  string
	config  string               // the error that was told
	leftOut map[string]bool      // what was told to be left out
	failed  map[string]bool      // the errors of NVSwitches that were told
	labels  labelsTold           // why they are not as they are wanted
	steps   map[string]bool      // those of which an Event told that they are reached, and that they are not
	layout  layoutTold           // what was told of the MIG layout
	bad     map[string]verdict   // of the devices that are not healthy, or gone, by UUID
	gpus    map[string]string    // the names of the GPUs that were there, by UUID
	used    map[string]time.Time // of the rates: by what they limit, and of the node under ""
	denied  map[string]string    // what a limit kept back last, by subject
}

// A Batch is a result of History.Next.
type Batch struct {
	Events []NodeEvent
	// Dropped are the causes, one for each Event that a limit keeps back now and did not before.
	Dropped []string
	// Again is when a rate allows an Event that it keeps back; zero if there is none.
	Again time.Time
}

// A candidate is an Event that limits may keep back.
type candidate struct {
	NodeEvent
	subject string // what it is about: only the latest fact about a subject is reported
	limited string // whose rate it counts for: the UUID of a GPU, or a word; empty for that of the node alone
	alike   string // the same for candidates that can be one Event; empty for one that stays alone
	name    string // what it names in an Event for several
	told    func() // notes that it was told
}

// Recall sets what an earlier process told of the node: c is the condition of the node, zero if it
// has none, and hadGPUs says that the node is known to have GPUs. It must be called before Next.
func (h *History) Recall(c Condition, hadGPUs bool) {
	h.init()
	h.hadGPUs = h.hadGPUs || hadGPUs
	switch {
	case c.Reason == DriverNotReady && c.Message == released:
		h.driver = driverReleased
	case c.Reason == DriverNotReady:
		h.driver = driverNotReady
	}
	for text := range strings.SplitSeq(c.Message, "; ") {
		if uuid, v, ok := parseEntry(text); ok {
			h.bad[uuid] = v
		}
	}
}

func (h *History) init() {
	if h.bad == nil {
		h.leftOut, h.failed, h.bad, h.gpus = map[string]bool{}, map[string]bool{}, map[string]verdict{}, map[string]string{}
		h.used, h.denied, h.steps = map[string]time.Time{}, map[string]string{}, map[string]bool{}
	}
}

// Next returns the Events that tell what changed to s, at most room of them. A status of a daemon
// whose first look has not ended changes nothing.
func (h *History) Next(s status.Status, now time.Time, room int) Batch {
	if s.Version == "" || s.Looked.IsZero() && s.Stale == "" && !s.Quiet {
		return Batch{}
	}
	h.init()
	h.hadGPUs = h.hadGPUs || len(s.GPUs) > 0
	all := h.driverEvents(s)
	all = append(all, together(h.deviceEvents(s))...)
	all = append(all, together(h.switchEvents(s))...)
	all = append(all, h.configEvents(s)...)
	all = append(all, together(h.leftOutEvents(s))...)
	all = append(all, h.layoutEvents(s)...)
	batch := Batch{}
	withheld, due := h.labelsEvents(s, now)
	all, batch.Again = append(all, withheld...), due
	steps, due := h.stepEvents(s, now)
	all = append(all, steps...)
	if !due.IsZero() && (batch.Again.IsZero() || due.Before(batch.Again)) {
		batch.Again = due
	}
	denied := map[string]string{}
	for _, c := range all {
		c.At, c.AtStart, c.Note = now, !h.begun, line(c.Note)
		cause, again := h.limit(c.limited, now, room-len(batch.Events))
		if cause == "" {
			c.told()
			batch.Events = append(batch.Events, c.NodeEvent)
			continue
		}
		if denied[c.subject] = c.Key(); h.denied[c.subject] != c.Key() {
			batch.Dropped = append(batch.Dropped, cause)
		}
		if !again.IsZero() && (batch.Again.IsZero() || again.Before(batch.Again)) {
			batch.Again = again
		}
	}
	h.denied, h.begun = denied, true
	maps.DeleteFunc(h.used, func(_ string, until time.Time) bool { return until.Before(now) })
	return batch
}

// limit takes one of the rates. If it cannot, it returns the cause, and when it could.
func (h *History) limit(limited string, now time.Time, room int) (cause string, again time.Time) {
	if room <= 0 {
		return DropQueue, time.Time{}
	}
	byNode, node := perNode.after(h.used[""], now)
	if byNode.After(now) {
		return DropNodeRate, byNode
	}
	if limited != "" {
		bySubject, next := perSubject.after(h.used[limited], now)
		if bySubject.After(now) {
			return DropSubjectRate, bySubject
		}
		h.used[limited] = next
	}
	h.used[""] = node
	return "", time.Time{}
}

// driverEvents returns the Events that say whether the driver answers. A node that never had a GPU
// has none.
func (h *History) driverEvents(s status.Status) []candidate {
	is, c := driverReady, candidate{subject: "driver", limited: "driver"}
	switch {
	case s.Quiet:
		is, c.Reason, c.Note = driverReleased, DriverReleased, s.Summary.Text
	case s.Stale != "":
		is, c.Reason, c.Note, c.Cause = driverNotReady, DriverNotReady, s.Stale, s.Stale
	default:
		c.Reason, c.Note = DriverReady, "The NVIDIA driver answers again, version "+s.Driver
	}
	if is == h.driver || !h.hadGPUs || h.driver == "" && is == driverReady {
		return nil
	}
	c.told = func() { h.driver = is }
	return []candidate{c}
}

func (h *History) deviceEvents(s status.Status) []candidate {
	var all []candidate
	there := map[string]bool{}
	for _, d := range s.GPUs {
		there[d.UUID] = true
	}
	for _, d := range own(s) {
		before, told := h.bad[d.UUID]
		c := candidate{NodeEvent: NodeEvent{Devices: []string{d.UUID}}, subject: d.UUID, limited: d.UUID, name: d.UUID}
		if d.GPU != "" {
			c.limited = d.GPU
		}
		switch now := verdictOf(d); {
		case isBad(d):
			c.Reason, c.XID, c.Cause = now.reason(before), now.xid, now.source+","+now.remedy
			c.Note = fmt.Sprintf("%s is %s: %s", name(d), d.State, because(d))
			c.alike = fmt.Sprint(c.Reason, now)
			c.told = func() { h.bad[d.UUID] = now }
			if c.Reason == "" { // another cause, and for the operator the same
				c.told()
				continue
			}
		case d.State == healthy && told:
			c.Reason, c.XID, c.Cause = GPURecovered, before.xid, before.source+","+before.remedy
			c.Note = fmt.Sprintf("%s is Healthy again; it was %s (%s)", name(d), before.state, before.what())
			c.alike = fmt.Sprint(c.Reason, before)
			c.told = func() { delete(h.bad, d.UUID) }
		default:
			continue
		}
		all = append(all, c)
	}
	for _, d := range s.GPUs {
		if d.GPU == "" {
			h.gpus[d.UUID] = name(d)
		}
	}
	if s.Quiet || s.Stale != "" {
		return all
	}
	maps.DeleteFunc(h.bad, func(uuid string, _ verdict) bool { return !there[uuid] && strings.HasPrefix(uuid, "MIG-") })
	for _, uuid := range slices.Sorted(maps.Keys(h.gpus)) {
		if there[uuid] {
			continue
		}
		all = append(all, candidate{
			NodeEvent: NodeEvent{
				Reason: GPURemoved, Devices: []string{uuid},
				Note: h.gpus[uuid] + " is no longer there: it was unplugged, or unbound from the driver",
			},
			subject: uuid, limited: uuid, name: uuid, alike: string(GPURemoved),
			told: func() {
				delete(h.gpus, uuid)
				h.bad[uuid] = verdict{state: removed, source: "unplugged or unbound"}
			},
		})
	}
	return all
}

// switchEvents tells of each error of an NVSwitch once.
func (h *History) switchEvents(s status.Status) []candidate {
	var all []candidate
	for _, what := range s.NVSwitches {
		if !h.failed[what] {
			all = append(all, candidate{
				NodeEvent: NodeEvent{
					Reason: NVSwitchFailed, Cause: what,
					Note: what + ", a fatal error: NVLinks of the node's GPUs have failed. Drain the node and restart it",
				},
				subject: what, limited: "NVSwitches", alike: string(NVSwitchFailed), name: what, told: func() { h.failed[what] = true },
			})
		}
	}
	return all
}

func (h *History) configEvents(s status.Status) []candidate {
	if s.ConfigError == h.config {
		return nil
	}
	c := candidate{
		NodeEvent: NodeEvent{
			Reason: ConfigRejected, Cause: s.ConfigError,
			Note: fmt.Sprintf("The configuration file %s is not used, and the last good configuration stays: %s", s.ConfigFile,
				s.ConfigError),
		},
		subject: "configuration", limited: "configuration", told: func() { h.config = s.ConfigError },
	}
	if s.ConfigError == "" {
		c.NodeEvent = NodeEvent{Reason: ConfigApplied, Note: fmt.Sprintf("The configuration file %s is used again",
			s.ConfigFile)}
	}
	return []candidate{c}
}

// labelsPatience is how long labels are not as they are wanted before an Event tells: a write that
// failed is tried again.
const labelsPatience = time.Minute

// A labelsTold is what is known of the reason why labels are not as they are wanted.
type labelsTold struct {
	reason string
	since  time.Time
	told   bool
}

// labelsEvents tells why labels are not as they are wanted, once that has lasted, and when that
// will be if it has not; zero for never.
func (h *History) labelsEvents(s status.Status, now time.Time) (events []candidate, due time.Time) {
	if s.LabelsError != h.labels.reason {
		h.labels = labelsTold{reason: s.LabelsError, since: now}
	}
	if h.labels.reason == "" || h.labels.told {
		return nil, time.Time{}
	}
	if due := h.labels.since.Add(labelsPatience); due.After(now) {
		return nil, due
	}
	return []candidate{{
		NodeEvent: NodeEvent{Reason: LabelsWithheld, Cause: s.LabelsError, Note: "Labels of the node: " + s.LabelsError},
		subject:   "labels", limited: "labels", told: func() { h.labels.told = true },
	}}, time.Time{}
}

func (h *History) leftOutEvents(s status.Status) []candidate {
	var all []candidate
	is := map[string]bool{}
	for _, sentence := range s.LeftOut {
		what, _, _ := strings.Cut(sentence, ": ") // the reason may be another one at each look
		known := slices.ContainsFunc(s.GPUs, func(d status.Device) bool { return what == "GPU "+d.Index && isBad(d) })
		if !h.leftOut[what] && !is[what] && !known { // of a GPU that is lost, its own Event tells
			all = append(all, candidate{
				NodeEvent: NodeEvent{Reason: ResourceLeftOut, Note: "Not offered: " + sentence, Cause: what},
				subject:   "left out " + what, limited: "left out", alike: string(ResourceLeftOut), name: sentence,
				told: func() { h.leftOut[what] = true },
			})
		}
		is[what] = true
	}
	maps.DeleteFunc(h.leftOut, func(what string, _ bool) bool { return !is[what] })
	return all
}

// together makes one candidate of those that are alike, where they are many.
func together(all []candidate) []candidate {
	alike := map[string][]candidate{}
	for _, c := range all {
		alike[c.alike] = append(alike[c.alike], c)
	}
	var joined []candidate
	for _, c := range all {
		group := alike[c.alike]
		switch {
		case len(group) <= maxAlike:
			joined = append(joined, c)
		case c.subject == group[0].subject:
			joined = append(joined, join(group))
		}
	}
	return joined
}

func join(group []candidate) candidate {
	c := group[0]
	var names []string
	c.Devices, c.limited = nil, ""
	for _, other := range group {
		c.Devices = append(c.Devices, other.Devices...)
		names = append(names, other.name)
	}
	slices.Sort(c.Devices)
	slices.Sort(names)
	if len(c.Devices) == 0 {
		c.Cause = strings.Join(names, "; ")
	}
	c.Note = list(fmt.Sprintf("%d alike. The first: %s. All: ", len(group), c.Note), names)
	c.told = func() {
		for _, other := range group {
			other.told()
		}
	}
	return c
}
