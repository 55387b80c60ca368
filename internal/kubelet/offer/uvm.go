package offer

import (
	"slices"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	uvmMissing = "the device node /dev/nvidia-uvm is not there yet, and a container without it cannot use CUDA"
	uvmAbsent  = "the device node /dev/nvidia-uvm is not there: containers that start now cannot use CUDA; load the " +
		"module on the node: " +
		"nvidia-modprobe -u -c 0"
)

// A uvmWait waits for the device node nvidia-uvm. With the strategy envvar there is
// no wait: NVIDIA's runtime loads the module itself.
type uvmWait struct {
	clock clock.Clock
	timer clock.Timer // since the node was seen to be missing; nil while it is not
	over  bool
}

// plan returns the plan without the waiting devices and, once the wait is long
// enough, with a warning.
func (u *uvmWait) plan(plan resource.Plan, snapshot inventory.Snapshot, c config.Config) resource.Plan {
	switch {
	case !(c.Edits.UsesCDI() && snapshot.LacksUVM(true) || c.Edits.GivesNodes() && snapshot.LacksUVM(false)):
		u.timer, u.over = nil, false
		return plan
	case u.over:
		plan.Warnings = append(slices.Clone(plan.Warnings), uvmAbsent)
		return plan
	case u.timer == nil:
		u.timer = u.clock.NewTimer(inventory.UVMPatience)
	}
	return plan.Under(holdsOnAll(plan, resource.Hold{Reason: uvmMissing, Row: resource.RowUVM, Hidden: true}))
}

// ended returns when the wait is long enough.
func (u *uvmWait) ended() <-chan time.Time {
	if u.timer == nil {
		return nil
	}
	return u.timer.C()
}
