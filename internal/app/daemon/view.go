package daemon

import (
	"context"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A View has the parts of the daemon that the tasks for the API server use.
type View struct {
	// Config is the configuration at the start, for settings that need a restart.
	Config config.Config
	// Configs are those in force, ConfigErrors why the file as it is now is not in force.
	Configs      *feed.Feed[config.Config]
	ConfigErrors *feed.Feed[error]
	// Snapshots are what is known of the GPUs.
	Snapshots *feed.Feed[inventory.Snapshot]
	// Labels are those that the node is to have; nil as long as they are not known. LabelsProblem gets
	// the reason why the node does not have them.
	Labels        *feed.Feed[map[string]string]
	LabelsProblem *feed.Feed[error]
	// Lead says whether this process leads, and is asked before each write that only the process that
	// leads makes.
	Lead *lead.Lead
	// MIGChoice chooses the MIG layout, and MIG is the progress of the node with it; both are nil
	// where layouts are not changed.
	MIGChoice *choice.Chooser
	MIG       *feed.Feed[mig.Status]
	// DRA has the parts for Dynamic Resource Allocation; nil if there are none.
	DRA *DRA
	// Offered is the part of the plan that the servers offer.
	Offered *feed.Feed[resource.Plan]
	// Fewer is the number of a change by which the lists get fewer devices, and which waits until
	// Proceed is called with it; 0 if none waits. Listed returns how many devices the lists offer, by
	// resource.
	Fewer   *feed.Feed[uint64]
	Proceed func(number uint64)
	Listed  func() map[string]int
	// Status returns what the daemon knows now.
	Status func(context.Context) (status.Status, error)
	// Quiesce releases the driver, and Resume goes back to it, as the commands of these names do.
	Quiesce, Resume func(context.Context) error
	// Held returns which devices pods hold, as PodResources tells.
	Held func(context.Context) ([]kubelet.HeldDevice, error)
	// ClaimsOf returns the names and UIDs of the prepared claims that have one of the GPUs or MIG
	// devices, by UUID; nil where there are none.
	ClaimsOf func(devices []string) []dra.Claim
	// Checkpoint returns kubelet's own record of devices and pods; nil without a kubelet.
	Checkpoint func() (kubelet.Checkpoint, error)
	// APIRequested and EventDropped count what happens to requests to the API server, and to Events.
	APIRequested func(verb, resource string, code int)
	EventDropped func(cause string)
}
