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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A View has the parts of the daemon for the tasks that use the API server.
type View struct {
	ConfigView
	// Snapshots are the states of the GPUs.
	Snapshots *feed.Feed[inventory.Snapshot]
	MaintenanceView
	LabelView
	// Lead knows whether this process leads. It is queried before each write that only the
	// leader makes.
	Lead *lead.Lead
	MIGView
	// DRA has the parts for Dynamic Resource Allocation; nil if there are none.
	DRA *DRA
	// Offered is the part of the plan that the servers offer.
	Offered *feed.Feed[resource.Plan]
	ShrinkView
	// Status returns the daemon's present status.
	Status func(context.Context) (status.Status, error)
	// Unproven returns why CUDA is not proven on devices of a Snapshot, by UUID, and a channel that
	// is closed when the result may have changed; nil if the configuration wants no proofs.
	Unproven func(inventory.Snapshot) (unproven map[string]string, changed <-chan struct{})
	// Quiesce releases the driver, and Resume resumes its use, like the commands of these names.
	Quiesce, Resume func(context.Context) error
	AccountView
	CountView
}

// A CountView counts what the tasks do.
type CountView struct {
	// APIRequested counts requests to the API server, EventDropped dropped Events, and
	// HealthEventsSent the health events of a call to NVSentinel.
	APIRequested     func(verb, resource string, code int)
	EventDropped     func(cause string)
	HealthEventsSent func(accepted bool, events int)
}

// A ConfigView has the configurations.
type ConfigView struct {
	// Startup has the settings that need a restart.
	Startup config.Startup
	// Configs are the configurations in force. ConfigErrors are the reasons why the
	// present file is not in force.
	Configs      *feed.Feed[config.Config]
	ConfigErrors *feed.Feed[error]
}

// A MaintenanceView has what the daemon does to the node's GPUs and driver.
type MaintenanceView struct {
	// Repairs is what the daemon does about GPUs whose remedy is a reset.
	Repairs *feed.Feed[repair.Status]
	// DriverChange is the progress of a change of the driver.
	DriverChange *feed.Feed[driverchange.Status]
}

// A LabelView has the labels of the node.
type LabelView struct {
	// Labels are the wanted labels; nil until they are known. LabelsProblem receives the
	// reason why the node does not have them.
	Labels        *feed.Feed[map[string]string]
	LabelsProblem *feed.Feed[error]
}

// A MIGView has the change of MIG layouts. Its fields are nil if layouts are not changed.
type MIGView struct {
	// MIGChoice chooses the layout, and MIG is the progress of the node.
	MIGChoice *choice.Chooser
	MIG       *feed.Feed[mig.Status]
}

// A ShrinkView has a change to fewer devices, which waits until the node is tainted.
type ShrinkView struct {
	// PendingShrink is the number of the change that waits; 0 if none waits. ApproveShrink
	// lets the change with that number begin.
	PendingShrink *feed.Feed[uint64]
	ApproveShrink func(number uint64)
	// Listed returns the number of Healthy devices in the lists, by resource.
	Listed func() map[string]int
}

// An AccountView has who uses devices.
type AccountView struct {
	// Held returns the devices of pods, according to PodResources.
	Held func(context.Context) ([]kubelet.HeldDevice, error)
	// ClaimsOf returns the names and UIDs of the prepared claims that have one of the GPUs
	// or MIG devices, by UUID; nil without claims.
	ClaimsOf func(devices []string) []dra.Claim
	// Checkpoint returns the kubelet's record of devices and pods; nil without a kubelet.
	Checkpoint func() (kubelet.Checkpoint, error)
}
