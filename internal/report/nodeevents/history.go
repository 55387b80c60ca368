package nodeevents

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// maxAlike is the greatest number of GPUs with separate Events for the same change.
const maxAlike = 4

// The causes of dropped Events.
const (
	DropSubjectRate = "subject rate" // a GPU, the driver, the configuration, or left-out devices
	DropNodeRate    = "node rate"
	DropQueue       = "queue"
)

// The states of the driver in Events.
const (
	driverReady    = "ready"
	driverNotReady = "not ready"
	driverReleased = "released"
)

// A History records the Events about a node. The zero value is an empty History. If a limit delays
// an Event, it is written as soon as the limit allows, provided it is still true. So the last Event
// about a GPU soon becomes true again.
type History struct {
	hasBegun bool
	hadGPUs  bool
	driver   string
	config   string               // the reported error
	leftOut  map[string]bool      // the reported devices
	failed   map[string]bool      // the reported errors of NVSwitches
	labels   labelsReport         // why labels are not as wanted
	steps    map[string]bool      // last reported state by step
	repairs  map[string]Reason    // last reported reason of each repair and planned repair
	layout   layoutReport         // last reported MIG layout
	change   driverReport         // last reported change of the driver
	bad      map[string]verdict   // verdicts of devices that are unhealthy or gone, by UUID
	gpus     map[string]string    // names of the known GPUs, by UUID
	used     map[string]time.Time // use of the rates by subject; the rate of the node has the key ""
	denied   map[string]string    // last delayed Event by subject
}

// A Batch is a result of History.Next.
type Batch struct {
	Events []NodeEvent
	// Dropped are causes, one for each Event that a limit delays for the first time.
	Dropped []string
	// Again is when a rate allows a delayed Event; zero if there is none.
	Again time.Time
}

// A candidate is an Event that limits may delay.
type candidate struct {
	NodeEvent
	subject string // only the latest fact about a subject is reported
	limited string // UUID of the GPU, or a word, whose rate applies; empty for the rate of the node only
	alike   string // equal for candidates that can share an Event; empty for one that cannot
	name    string // name in a shared Event
	record  func() // records that the Event was written
}

// Recall sets the reports of an earlier process: c is the condition of the node, zero if it has
// none, and hadGPUs is true if the node is known to have GPUs. It must be called before Next.
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
		h.leftOut, h.failed = map[string]bool{}, map[string]bool{}
		h.bad, h.gpus = map[string]verdict{}, map[string]string{}
		h.used, h.denied, h.steps = map[string]time.Time{}, map[string]string{}, map[string]bool{}
	}
}

// Next returns Events about the changes up to s, at most room of them. A status from before the
// first scan changes nothing.
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
	all = append(all, h.repairEvents(s)...)
	all = append(all, h.layoutEvents(s)...)
	all = append(all, h.driverChangeEvents(s)...)
	batch := Batch{}
	labels, due := h.labelsEvents(s, now)
	all, batch.Again = append(all, labels...), due
	steps, due := h.stepEvents(s, now)
	all = append(all, steps...)
	if !due.IsZero() && (batch.Again.IsZero() || due.Before(batch.Again)) {
		batch.Again = due
	}
	denied := map[string]string{}
	for _, c := range all {
		c.At, c.AtStart, c.Note = now, !h.hasBegun, line(c.Note)
		cause, again := h.limit(c.limited, now, room-len(batch.Events))
		if cause == "" {
			c.record()
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
	h.denied, h.hasBegun = denied, true
	maps.DeleteFunc(h.used, func(_ string, until time.Time) bool { return until.Before(now) })
	return batch
}

// limit takes one Event from the rates. If it cannot, it returns the cause, and when a retry will
// succeed.
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

// driverEvents returns Events about whether the driver answers. A node that never had a GPU has
// none.
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
	c.record = func() { h.driver = is }
	return []candidate{c}
}

func (h *History) deviceEvents(s status.Status) []candidate {
	var all []candidate
	there := map[string]bool{}
	for _, d := range s.GPUs {
		there[d.UUID] = true
	}
	for _, d := range own(s) {
		before, reported := h.bad[d.UUID]
		c := candidate{NodeEvent: NodeEvent{Devices: []string{d.UUID}}, subject: d.UUID, limited: d.UUID, name: d.UUID}
		if d.GPU != "" {
			c.limited = d.GPU
		}
		switch now := verdictOf(d); {
		case isBad(d):
			c.Reason, c.XID, c.Cause = now.reason(before), now.xid, now.source+","+now.remedy
			c.Note = fmt.Sprintf("%s is %s: %s", name(d), d.State, because(d))
			c.alike = fmt.Sprint(c.Reason, now)
			c.record = func() { h.bad[d.UUID] = now }
			if c.Reason == "" { // for the operator nothing changed
				c.record()
				continue
			}
		case d.State == healthy && reported:
			c.Reason, c.XID, c.Cause = GPURecovered, before.xid, before.source+","+before.remedy
			c.Note = fmt.Sprintf("%s is Healthy again; it was %s (%s)", name(d), before.state, before.what())
			c.alike = fmt.Sprint(c.Reason, before)
			c.record = func() { delete(h.bad, d.UUID) }
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
				Note: h.gpus[uuid] + " has disappeared: it was unplugged, or unbound from the driver",
			},
			subject: uuid, limited: uuid, name: uuid, alike: string(GPURemoved),
			record: func() {
				delete(h.gpus, uuid)
				h.bad[uuid] = verdict{state: removed, source: "unplugged or unbound"}
			},
		})
	}
	return all
}

// switchEvents returns an Event for each new error of an NVSwitch.
func (h *History) switchEvents(s status.Status) []candidate {
	var all []candidate
	for _, what := range s.NVSwitches {
		if !h.failed[what] {
			all = append(all, candidate{
				NodeEvent: NodeEvent{
					Reason: NVSwitchFailed, Cause: what,
					Note: what + ", a fatal error: NVLinks of the node's GPUs have failed. Drain the node and " +
						"restart it",
				},
				subject: what, limited: "NVSwitches", alike: string(NVSwitchFailed), name: what,
				record: func() { h.failed[what] = true },
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
			Note: fmt.Sprintf("The configuration file %s is not used, and the last good configuration stays: %s",
				s.ConfigFile, s.ConfigError),
		},
		subject: "configuration", limited: "configuration", record: func() { h.config = s.ConfigError },
	}
	if s.ConfigError == "" {
		c.NodeEvent = NodeEvent{Reason: ConfigApplied, Note: fmt.Sprintf("The configuration file %s is used again",
			s.ConfigFile)}
	}
	return []candidate{c}
}

// labelsPatience is how long labels must differ before an Event: failed writes are retried.
const labelsPatience = time.Minute

// A labelsReport records why labels are not as wanted.
type labelsReport struct {
	reason   string
	since    time.Time
	reported bool
}

// labelsEvents returns an Event if labels have differed for long enough. Otherwise it returns when
// they will have; zero for never.
func (h *History) labelsEvents(s status.Status, now time.Time) (events []candidate, due time.Time) {
	if s.LabelsError != h.labels.reason {
		h.labels = labelsReport{reason: s.LabelsError, since: now}
	}
	if h.labels.reason == "" || h.labels.reported {
		return nil, time.Time{}
	}
	if due := h.labels.since.Add(labelsPatience); due.After(now) {
		return nil, due
	}
	return []candidate{{
		NodeEvent: NodeEvent{Reason: LabelsWithheld, Cause: s.LabelsError,
			Note: "Labels of the node: " + s.LabelsError},
		subject: "labels", limited: "labels", record: func() { h.labels.reported = true },
	}}, time.Time{}
}

func (h *History) leftOutEvents(s status.Status) []candidate {
	var all []candidate
	is := map[string]bool{}
	for _, sentence := range s.LeftOut {
		what, _, _ := strings.Cut(sentence, ": ") // the reason may differ at each scan
		known := slices.ContainsFunc(s.GPUs, func(d status.Device) bool { return what == "GPU "+d.Index && isBad(d) })
		if !h.leftOut[what] && !is[what] && !known { // a lost GPU has its own Event
			all = append(all, candidate{
				NodeEvent: NodeEvent{Reason: ResourceLeftOut, Note: "Not offered: " + sentence, Cause: what},
				subject:   "left out " + what, limited: "left out", alike: string(ResourceLeftOut), name: sentence,
				record: func() { h.leftOut[what] = true },
			})
		}
		is[what] = true
	}
	maps.DeleteFunc(h.leftOut, func(what string, _ bool) bool { return !is[what] })
	return all
}

// together merges large groups of candidates that are alike.
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
	c.Note = list(fmt.Sprintf("%d similar Events. The first: %s. All: ", len(group), c.Note), names)
	c.record = func() {
		for _, other := range group {
			other.record()
		}
	}
	return c
}
