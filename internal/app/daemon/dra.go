package daemon

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/handover"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// DRA has the parts for Dynamic Resource Allocation. They run also in the mode plugin: claims of an
// earlier mode may still have GPUs.
type DRA struct {
	Arbiter *handover.Arbiter
	// Owners say who gives out each GPU; nil as long as that is not known. Offered are the Owners that
	// the lists of the device plugin follow now.
	Owners, Offered *feed.Feed[dra.Owners]
	Devices         *handover.Devices
	Claims          *claims.Claims
	// Driver gets the state of the driver's registration at kubelet.
	Driver *feed.Feed[status.DRADriver]
}
