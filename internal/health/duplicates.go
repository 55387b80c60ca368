package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// duplicateWindow is the time within which an event and a line of the kernel log with the same XID are the same thing.
const duplicateWindow = 10 * time.Second

// recentXIDs find the XIDs that come twice: as an event of the driver and as a line of the kernel log.
type recentXIDs []recentXID

// A recentXID counts an XID of the last seconds: events has the events minus the lines of the log.
type recentXID struct {
	xid    uint64
	gi     int
	events int
	last   time.Time
}

// with returns h with an event counted, and whether the same XID has already come the other way.
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
	duplicate := e.Logged && b.events > 0 || !e.Logged && b.events < 0
	if e.Logged {
		b.events--
	} else {
		b.events++
	}
	b.last = now
	next = append(next, b)
	return slices.Clip(next[max(0, len(next)-maxCounts):]), duplicate
}
