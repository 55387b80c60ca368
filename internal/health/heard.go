package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// twinWindow is how long after an XID the same XID by the other way is taken for the same one.
const twinWindow = 10 * time.Second

// heard tells the XIDs of a GPU that came twice, as an event of the driver and as a line of the kernel's log.
type heard []balance

// A balance is how many more events than lines of the log there were of an XID lately; negative, if there were fewer.
type balance struct {
	xid    uint64
	gi     int
	events int
	last   time.Time
}

// with returns h with an event noted, and whether the event is one that came the other way already.
func (h heard) with(e inventory.Event, now time.Time) (heard, bool) {
	if e.Kind != inventory.EventXID {
		return h, false
	}
	b := balance{xid: e.XID, gi: e.GI}
	next := make(heard, 0, len(h)+1)
	found := false
	for _, o := range h {
		same := o.xid == e.XID && (o.gi == e.GI || o.gi == inventory.Unattributed || e.GI == inventory.Unattributed)
		switch {
		case now.Sub(o.last) >= twinWindow: // over
		case same && !found:
			b, found = o, true
		default:
			next = append(next, o)
		}
	}
	twin := e.Logged && b.events > 0 || !e.Logged && b.events < 0
	if e.Logged {
		b.events--
	} else {
		b.events++
	}
	b.last = now
	next = append(next, b)
	return slices.Clip(next[max(0, len(next)-maxCounts):]), twin
}
