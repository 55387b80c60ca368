package nodeevents

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The values of a condition's status.
const (
	True    = "True"
	False   = "False"
	Unknown = "Unknown"
)

// The reasons of the node's GPU condition. GPUUnhealthy, GPULost and DriverNotReady are also
// reasons of Events. docs/reference.md explains each of them.
const (
	AllHealthy     Reason = "AllHealthy"
	GPUUnknown     Reason = "GPUUnknown"
	MonitorStalled Reason = "MonitorStalled"
	GPUNotReady    Reason = "GPUNotReady"
	DriverChanging Reason = "DriverChanging"
)

// released is the message for a node with a released driver.
const released = "the driver is released"

// stalledAfter is the age of the last scan from which the state of the GPUs is unknown.
const stalledAfter = 2 * time.Minute

// A Condition is the node's GPU condition without times. Equal Conditions need no write.
type Condition struct {
	// Status is True, False or Unknown.
	Status string
	Reason Reason
	// Message names each unhealthy device: UUID, state, XID or source, and remedy, in at most 1024
	// bytes.
	Message string
}

// Judge returns the condition for s at the time now. It returns false if there should be none:
// before the first scan has ended, and for a node without GPUs, unless the node already has the
// condition.
func Judge(s status.Status, now time.Time, exists bool) (Condition, bool) {
	if s.Version == "" || s.Looked.IsZero() && !exists || len(s.GPUs)+len(s.Retries) == 0 && !exists {
		return Condition{}, false
	}
	if s.Looked.IsZero() && s.Stale == "" && !s.Quiet {
		return Condition{}, false
	}
	reason, entries, unknown := GPUUnhealthy, []string(nil), []string(nil)
	for _, d := range own(s) {
		switch {
		case isBad(d):
			entries = append(entries, verdictOf(d).entry(d.UUID))
			if d.State == lost {
				reason = GPULost
			}
		case d.State != healthy && d.State != suspect:
			unknown = append(unknown, d.UUID)
		}
	}
	for _, r := range s.Retries {
		known := slices.ContainsFunc(s.GPUs,
			func(d status.Device) bool { return d.Index == fmt.Sprint(r.Index) && isBad(d) })
		if !known {
			reason, entries = GPULost, append(entries, fmt.Sprintf("GPU %d cannot be read, remedy: %s", r.Index,
				inventory.RemedyReconnect))
		}
	}
	slices.Sort(entries)
	slices.Sort(unknown)
	switch {
	case len(entries) > 0:
		return Condition{False, reason, list("", entries)}, true
	case s.DriverChange != nil && s.DriverChange.Withholds:
		return Condition{Unknown, DriverChanging, driverchange.HoldReason}, true
	case s.Quiet:
		return Condition{Unknown, DriverNotReady, released}, true
	case s.Stale != "":
		return Condition{Unknown, DriverNotReady, line(s.Stale)}, true
	case now.Sub(s.Looked) > stalledAfter:
		return Condition{Unknown, MonitorStalled, "the GPUs have not been scanned for more than 2 minutes"}, true
	case len(s.GPUs) == 0:
		return Condition{False, GPULost, "the GPUs of the node have disappeared"}, true
	case len(unknown) > 0:
		return Condition{Unknown, GPUUnknown, list("no verdict yet: ", unknown)}, true
	}
	if step, late := late(s, now); late {
		return Condition{Unknown, GPUNotReady, line(waitsFor(step))}, true
	}
	return Condition{True, AllHealthy, "all GPUs are healthy"}, true
}

// NoHealthyGPU reports whether the node has GPUs and all of them are Unhealthy, Lost or unreadable.
// It returns known false while the driver does not answer and while a GPU has no verdict. The taint
// then stays unchanged.
func NoHealthyGPU(s status.Status) (none, known bool) {
	if s.Version == "" || s.Looked.IsZero() {
		return false, false
	}
	bad, gpus := 0, 0
	for _, d := range s.GPUs {
		if d.GPU != "" {
			continue
		}
		gpus++
		switch {
		case isBad(d):
			bad++
		case d.State == healthy || d.State == suspect:
			return false, true
		}
	}
	if gpus == 0 && len(s.Retries) > 0 { // no GPU can be read
		return true, s.Stale == "" && !s.Quiet
	}
	if gpus == 0 {
		return false, s.Stale == "" && !s.Quiet
	}
	return bad == gpus, bad == gpus
}

// worse reports whether c has more problems than before.
func (c Condition) worse(before Condition) bool {
	if gravity(c) != gravity(before) {
		return gravity(c) > gravity(before)
	}
	if c.Status != False {
		return false // only the reason of the unknown state differs
	}
	for entry := range strings.SplitSeq(c.Message, "; ") {
		if !strings.Contains(before.Message, entry) {
			return true
		}
	}
	return false
}

func gravity(c Condition) int {
	switch c.Status {
	case True:
		return 0
	case Unknown:
		return 1
	}
	return 2
}
