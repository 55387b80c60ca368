package dra

import (
	"strconv"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// The keys of taints. The first three exist in NVIDIA's driver.
const (
	TaintXID         = Driver + "/xid"         // its value is the XID
	TaintLost        = Driver + "/gpu-lost"    // the GPU cannot be reached
	TaintUnmonitored = Driver + "/unmonitored" // the driver does not respond, for longer than its grace
	TaintUnhealthy   = Driver + "/unhealthy"   // any other fault; its value is the remedy
	TaintLeaving     = Driver + "/leaving"     // the GPU moves to the device plugin as soon as no claim has it
)

// taints returns the taints for a health: none while the kubelet would see the device as Healthy. A
// repaired device has no taint any more.
func taints(h inventory.Health) []Taint {
	if h.Allocatable() {
		return nil
	}
	t := Taint{Key: TaintUnhealthy, Value: strings.ReplaceAll(string(h.Remedy), "+", "-"), Effect: "NoSchedule"}
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
