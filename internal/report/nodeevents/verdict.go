package nodeevents

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The states of a device in a Status.
var (
	healthy   = inventory.Healthy.String()
	suspect   = inventory.Suspect.String()
	unhealthy = inventory.Unhealthy.String()
	lost      = inventory.Lost.String()
)

// removed is the state of a GPU that disappeared.
const removed = "Removed"

// A verdict is the state, the source and the remedy of an unhealthy device.
type verdict struct {
	state, source, remedy string
	xid                   uint64
}

func verdictOf(d status.Device) verdict {
	v := verdict{state: d.State, remedy: d.Remedy, xid: d.XID}
	for _, f := range d.Faults {
		if f.XID == d.XID && f.Remedy == d.Remedy {
			v.source = f.Source
			break
		}
	}
	return v
}

// what names the cause of the verdict.
func (v verdict) what() string {
	switch {
	case v.xid != 0:
		return fmt.Sprintf("XID %d", v.xid)
	case v.source != "":
		return v.source
	}
	return "unknown"
}

// needsOperator reports whether only a person can repair the fault.
func (v verdict) needsOperator() bool {
	return v.remedy == string(inventory.RemedyHuman) || v.remedy == string(inventory.RemedyHardware)
}

// reason returns the reason of an Event about an unhealthy device, given the last reported verdict;
// empty if nothing is to be reported.
func (v verdict) reason(before verdict) Reason {
	switch {
	case v.state == lost && before.state != lost:
		return GPULost
	case v.needsOperator() && !before.needsOperator():
		return GPUNeedsOperator
	case v.state == unhealthy && before.state != unhealthy:
		return GPUUnhealthy
	case v.xid != 0 && v.xid != before.xid:
		return GPUXid
	case v.remedy != before.remedy && v.state == lost:
		return GPULost
	case v.remedy != before.remedy:
		return GPUUnhealthy
	}
	return ""
}

// entry formats a device for a condition's message, without times and counts. parseEntry is the
// inverse.
func (v verdict) entry(uuid string) string {
	remedy := cmp.Or(v.remedy, "none")
	return fmt.Sprintf("%s %s: %s, remedy: %s", uuid, v.state, v.what(), remedy)
}

var entryPattern = regexp.MustCompile(`^(\S+) (Unhealthy|Lost): (?:XID (\d+)|(\S+)), remedy: (\S+)$`)

func parseEntry(text string) (uuid string, v verdict, ok bool) {
	m := entryPattern.FindStringSubmatch(text)
	if m == nil {
		return "", verdict{}, false
	}
	v = verdict{state: m[2], source: m[4], remedy: m[5]}
	v.xid, _ = strconv.ParseUint(m[3], 10, 64) // 0 without an XID
	if v.remedy == "none" {
		v.remedy = ""
	}
	return m[1], v, true
}

// isBad reports whether a device's state forbids its use.
func isBad(d status.Device) bool { return d.State == unhealthy || d.State == lost }

// own returns the devices of s without MIG devices that only repeat the state of their GPU.
func own(s status.Status) []status.Device {
	gpus := map[string]status.Device{}
	var devices []status.Device
	for _, d := range s.GPUs {
		if d.GPU == "" {
			gpus[d.UUID] = d
		} else if g := gpus[d.GPU]; d.State != healthy && g.State == d.State && g.Reason == d.Reason {
			continue
		}
		devices = append(devices, d)
	}
	return devices
}

// name names a device for people.
func name(d status.Device) string {
	if d.GPU != "" {
		return fmt.Sprintf("MIG device %s (%s)", d.Index, d.UUID)
	}
	return fmt.Sprintf("GPU %s (%s)", d.Index, d.UUID)
}

// because returns the device's reason, with the remedy's short name.
func because(d status.Device) string {
	h := inventory.Health{Reason: cmp.Or(d.Reason, verdictOf(d).what()), Remedy: inventory.Remedy(d.Remedy)}
	if strings.Contains(h.Reason, "remedy:") {
		return h.Reason
	}
	return h.Why()
}
