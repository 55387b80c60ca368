package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// duplicateWindow is the time within which an event and a line of the kernel log with the same XID
// are the same thing.
const duplicateWindow = 10 * time.Second

// lineWindow is the time from the first line of a fault in the kernel log within which other lines
// with the same XID are of the same fault. The driver tells of an exception in several lines, a few
// milliseconds apart, and by one event.
const lineWindow = time.Second

// recentXIDs find the XIDs that come more than once: as an event of the driver and as lines of the
// kernel log.
type recentXIDs []recentXID

// A recentXID counts an XID of the last seconds: events has the events minus the faults in the log.
type recentXID struct {
	xid        uint64
	gi         int
	events     int
	last, line time.Time // the last of either, and the first line of the last fault in the log
}

// with returns h with an event counted, and whether the fault that it tells of has come already.
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
		case now.Sub(o.last) >= duplicateWindow: // too old
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
