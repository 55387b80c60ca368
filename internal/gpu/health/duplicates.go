package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// duplicateWindow is the longest time between an event and a kernel log line of the same XID for
// both to count as one.
const duplicateWindow = 10 * time.Second

// lineWindow is the longest time between the first and another kernel log line of the same fault.
// The driver logs an exception in several lines, a few milliseconds apart, and sends one event.
const lineWindow = time.Second

// recentXIDs finds duplicates: XIDs reported by both events and the kernel log.
type recentXIDs []recentXID

// A recentXID counts a recent XID: events is the number of events minus the number of faults in the
// log.
type recentXID struct {
	xid        uint64
	gi         int
	events     int
	last, line time.Time // last event or line, and the first line of the last fault in the log
}

// with returns h with the event counted, and whether the event is a duplicate.
func (h recentXIDs) with(e inventory.Event, now time.Time) (recentXIDs, bool) {
	if e.Kind != inventory.EventXID {
		return h, false
	}
	b := recentXID{xid: e.XID, gi: e.GI}
	next := make(recentXIDs, 0, len(h)+1)
	found := false
	for _, o := range h {
		same := o.xid == e.XID && (o.gi == e.GI || o.gi == inventory.Unattributed || e.GI == inventory.Unattributed)
		switch {
		case now.Sub(o.last) >= duplicateWindow: // expired
		case same && !found:
			b, found = o, true
		default:
			next = append(next, o)
		}
	}
	again := e.Logged && now.Sub(b.line) < lineWindow
	duplicate := again || e.Logged && b.events > 0 || !e.Logged && b.events < 0
	switch {
	case !e.Logged:
		b.events++
	case !again:
		b.events--
		b.line = now
	}
	b.last = now
	next = append(next, b)
	return slices.Clip(next[max(0, len(next)-maxCounts):]), duplicate
}
