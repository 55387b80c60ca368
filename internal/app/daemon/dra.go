package daemon

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// DRA has the parts for Dynamic Resource Allocation. They also run in the mode plugin,
// because claims of an earlier mode may still have GPUs.
type DRA struct {
	Arbiter *owner.Arbiter
	// Owners are the owners of the GPUs; nil until they are known. Offered are the owners
	// in effect in the lists of the device plugin.
	Owners, Offered *feed.Feed[dra.Owners]
	Devices         *pool.Devices
	Claims          *claims.Claims
	// Driver receives the state of the DRA driver's registration with the kubelet.
	Driver *feed.Feed[status.DRADriver]
}
