package holders

import (
	"fmt"
	"time"
)

// Of returns the known holders of the wanted devices, according to an account.
// offered says that a list still offers one of them: then another pod may get it.
// retiring are the devices that left the plan. outdated reports that only the
// checkpoint names one of the holders, which may have ended. The error says which
// device was given to a pod so recently that the account need not show the pod.
func (h *Holders) Of(a Account, wanted func(id string) bool, offered bool, retiring map[Key]State, now time.Time) (
	held map[Key]Holder, outdated bool, err error,
) {
	held = map[Key]Holder{}
	for key, holder := range a.Held {
		if !wanted(key.ID) {
			continue
		}
		g := h.grants[key]
		switch {
		case offered:
			g.confirmedBy = Source{}
		case !holder.CheckpointOnly && a.Began.After(g.asked):
			g.confirmedBy = a.Source
		}
		h.grants[key] = g
		outdated = outdated || holder.CheckpointOnly
		if ended := holder.CheckpointOnly && h.isConfirmed(key, a); !ended {
			held[key] = holder
		}
	}
	note := func(key Key, given time.Time) {
		_, named := a.Held[key]
		if wanted(key.ID) && !named && !h.isConfirmed(key, a) && !given.IsZero() && now.Sub(given) < FreeFor {
			err = fmt.Errorf("device %s: %s", key.ID, waitsForAllocate)
		}
	}
	for key, g := range h.grants {
		note(key, g.given)
	}
	for key, s := range retiring {
		note(key, s.lastAllocate)
	}
	return held, outdated, err
}

// isConfirmed reports whether the kubelet of this account has named a holder of a
// device since it last asked for the device.
func (h *Holders) isConfirmed(device Key, a Account) bool {
	return a.Source != Source{} && h.grants[device].confirmedBy == a.Source
}
