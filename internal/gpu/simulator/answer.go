package simulator

import (
	"fmt"
	"slices"
	"strconv"
)

// changeable are the calls whose values can be replaced.
var changeable = []string{
	"DeviceGetApplicationsClock", "DeviceGetCount", "DeviceGetGridLicensableFeatures",
	"DeviceGetMaxMigDeviceCount", "DeviceGetMinorNumber", "DeviceGetName",
	"DeviceGetPowerManagementLimit", "DeviceGetUUID",
	"DeviceSetComputeMode", // the resulting mode
	"SystemGetConfComputeState", "SystemGetConfComputeGpusReadyState",
	"DeviceSetMigMode", // the return code of the activation
}

// A substitute replaces the value returned by a call.
type substitute struct {
	call  string
	slot  int // or anywhere
	inst  *computeInstance
	value string
}

func (n *Node) answersLocked(f Fault, t target) error {
	if !slices.Contains(changeable, f.Call) {
		return fmt.Errorf("the value of call %q cannot be changed: give one of %s", f.Call, join(changeable))
	}
	value := f.Value
	if unquoted, err := strconv.Unquote(value); err == nil {
		value = unquoted
	}
	n.answers = append(n.answers, substitute{f.Call, t.slot(), t.inst, value})
	return nil
}

// textLocked returns the answer of a call about a GPU (nil: about none) or MIG device: the actual
// text, unless an answer was injected.
func (n *Node) textLocked(call string, g *gpu, inst *computeInstance, actual string) string {
	slot := target{gpu: g}.slot()
	for _, a := range n.answers {
		if a.call == call && (a.slot == slot || a.slot == anywhere) && a.inst == inst {
			actual = a.value
		}
	}
	return actual
}

// numberLocked is textLocked for a number. An injected answer that is no number is ignored.
func (n *Node) numberLocked(call string, g *gpu, actual int) int {
	if number, err := strconv.Atoi(n.textLocked(call, g, nil, "")); err == nil {
		return number
	}
	return actual
}
