package simulator

import (
	"fmt"
	"slices"
	"strconv"
)

// changeable are the calls that can be made to return another value.
var changeable = []string{
	"DeviceGetApplicationsClock", "DeviceGetCount", "DeviceGetGridLicensableFeatures",
	"DeviceGetMaxMigDeviceCount", "DeviceGetMinorNumber", "DeviceGetName",
	"DeviceGetPowerManagementLimit", "DeviceGetUUID",
	"DeviceSetComputeMode", // the mode that is in force then
	"SystemGetConfComputeState", "SystemGetConfComputeGpusReadyState",
	"DeviceSetMigMode", // how the activation went: a return code
}

// A substitute makes a call return another value.
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

// textLocked returns what a call about a GPU (nil: about none) or MIG device answers: the given
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

// numberLocked is textLocked for a number. An injected answer that is not a number changes nothing.
func (n *Node) numberLocked(call string, g *gpu, actual int) int {
	if number, err := strconv.Atoi(n.textLocked(call, g, nil, "")); err == nil {
		return number
	}
	return actual
}
