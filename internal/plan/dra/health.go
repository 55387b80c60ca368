package dra

import (
	"strconv"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// The keys of taints. The first three are those of NVIDIA's driver.
const (
	TaintXID         = Driver + "/xid"         // its value is the XID
	TaintLost        = Driver + "/gpu-lost"    // the GPU cannot be reached
	TaintUnmonitored = Driver + "/unmonitored" // the driver does not answer, and has not for longer than its grace
	TaintUnhealthy   = Driver + "/unhealthy"   // anything else; its value is the cure
	TaintLeaving     = Driver + "/leaving"     // the device plugin gets the GPU as soon as no claim has it
)

// taints returns what keeps new work from a device of some health: nothing as long as kubelet would
// be told that it is Healthy. A device that was cured has no taint any more.
func taints(h inventory.Health) []Taint {
	if h.Allocatable() {
		return nil
	}
	t := Taint{Key: TaintUnhealthy, Value: strings.ReplaceAll(string(h.Cure), "+", "-"), Effect: "NoSchedule"}
	switch {
	case h.State == inventory.Lost:
		t.Key, t.Value = TaintLost, ""
	case h.State == inventory.Unknown:
		t.Key, t.Value = TaintUnmonitored, ""
	case h.XID != 0:
		t.Key, t.Value = TaintXID, strconv.FormatUint(h.XID, 10)
	}
	if !h.Since.IsZero() {
		since := h.Since.UTC().Truncate(time.Second)
		t.TimeAdded = &since
	}
	return []Taint{t}
}
