// Package claims prepares the devices of ResourceClaims for containers: it decides whether a claim may have its devices now, keeps one
// record a claim on disk, and writes the CDI spec that kubelet names to the runtime.
//
// It knows neither gRPC nor the API server: who calls Prepare has read the claim. Nothing is kept between two calls but what is on
// disk, where a second process of this program may work at the same time, as in a roll-out. See record.go for the rules.
//
// Package cli puts it together; others may use its values.
package claims

import (
	"context"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// Options are what Claims are made of.
type Options struct {
	// Pools are the devices that are published.
	Pools     *feed.Feed[dra.Pool]
	Snapshots *feed.Feed[inventory.Snapshot]
	Configs   *feed.Feed[config.Config]
	// Held returns the devices that pods hold by the device plugin; nil where there is no kubelet.
	Held func(context.Context) ([]kubelet.HeldDevice, error)
	// Claimed returns the claims of the pods that are on the node, by "NAMESPACE/NAME"; nil where that is not known.
	Claimed func(context.Context) (map[string]bool, error)
	// SetTimeSlice sets the time slice of a GPU, from 0 (the default) to 3 (long); nil where it cannot be set.
	SetTimeSlice func(ctx context.Context, gpu string, interval int) error
	// MPS has control daemons run; nil where there are none.
	MPS ControlDaemons
	// Divisions are published here: how GPUs in MIG mode are divided for claims. It is nil until Divide has looked. Nil where nobody reads it.
	Divisions *feed.Feed[dra.Divisions]
	// Driver makes MIG devices for claims; nil where none are made.
	Driver Divider
	// StateDir is where the records are kept, and CDIDir where runtimes look for specs.
	StateDir, CDIDir string
	// Checkpoint is the file in which NVIDIA's driver keeps the claims that it prepared; empty where they are never taken over.
	Checkpoint string
	// BootID is the node's boot ID; empty if it is not known.
	BootID string
	// Root is the file system of this process, in which the driver's files are looked for; nil is the real one.
	Root fs.FS
	// Metrics may be nil.
	Metrics Metrics
	// Clock is what is waited by; nil is the real one.
	Clock clock.Clock
}

// Metrics counts calls of kubelet's. Its methods return at once.
type Metrics interface {
	// Prepared counts a claim that was prepared in that time, or was not: the Cause is empty if it was.
	Prepared(took time.Duration, cause string)
	// Unprepared is the same for claims that are given back.
	Unprepared(took time.Duration, cause string)
}

type noMetrics struct{}

func (noMetrics) Prepared(time.Duration, string)   {}
func (noMetrics) Unprepared(time.Duration, string) {}

// Claims prepare and unprepare claims. New builds them, and Run is their one life. Their methods may be called by several goroutines.
type Claims struct {
	options Options
	store   store
	inUse   *feed.Feed[map[string][]Holder]
	status  *feed.Feed[[]ClaimStatus]
	// problems are why containers cannot use a device, by its name.
	problems *feed.Feed[map[string]string]
	given    atomic.Pointer[cdi.Given] // nil until Run has looked
	started  chan struct{}             // closed when Run has read the records

	renewed *feed.Feed[struct{}] // when given changes

	mu      sync.Mutex        // guards all following fields
	records map[string]record // by the UID of the claim, as they are shown
	read    bool              // all records were read once
	left    map[string]string // why MIG devices are left of a claim that was given back, by its UID
	exists  exists            // nil where the API server is not asked
	noUVM   time.Time         // when nvidia-uvm was seen to be missing; zero while it is there
}

// New returns Claims that prepare nothing before Run.
func New(o Options) *Claims {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Metrics == nil {
		o.Metrics = noMetrics{}
	}
	if o.Root == nil {
		o.Root = os.DirFS("/")
	}
	if o.Divisions == nil {
		o.Divisions = feed.New(dra.Divisions(nil))
	}
	return &Claims{
		options: o, store: store{dir: o.StateDir, specs: o.CDIDir, boot: o.BootID, clock: o.Clock, step: func() {}, parsed: &sync.Map{}},
		inUse: feed.New[map[string][]Holder](nil), status: feed.New[[]ClaimStatus](nil),
		problems: feed.New[map[string]string](nil), renewed: feed.New(struct{}{}),
		started: make(chan struct{}), records: map[string]record{}, left: map[string]string{},
	}
}

// A Holder is a claim that has a GPU or a part of it.
type Holder struct {
	UID, Namespace, Name string
	// Device is the UUID of the GPU or MIG device.
	Device string
	// Admin says that the claim has the device beside whoever has it otherwise.
	Admin bool
}

// exists says whether the API server has a claim with this UID.
type exists func(ctx context.Context, uid, namespace, name string) (bool, error)

// ExistsBy has the API server asked whether it has a claim with a UID. Without it, no claim counts as leaked.
func (c *Claims) ExistsBy(ask func(ctx context.Context, uid, namespace, name string) (bool, error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exists = ask
}

// InUse returns the feed of the claims that are recorded, by the UUID of the GPU. It is nil until Run has read the records. Claims from
// before a restart of the node are among them: their pods come back.
func (c *Claims) InUse() *feed.Feed[map[string][]Holder] { return c.inUse }

// A ClaimStatus is a claim that is recorded, for people and programs.
type ClaimStatus struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Since is when the claim was first prepared.
	Since time.Time `json:"since"`
	// Restarted says that the node was restarted since: the claim will be prepared again before its next pod starts.
	Restarted bool `json:"restarted,omitempty"`
	// Released is why MIG devices that were made for a claim are there still although it was given back; empty for any other claim.
	Released string         `json:"released,omitempty"`
	Devices  []DeviceStatus `json:"devices"`
}

// A DeviceStatus is a device of a claim.
type DeviceStatus struct {
	Request string `json:"request"`
	Name    string `json:"name"`
	ShareID string `json:"shareID,omitempty"`
	// Share is the part of the memory of the device that the claim has, in bytes; 0 for all of it. Limited says that MPS keeps every process
	// of the claim to it, and not the scheduler's account alone.
	Share   int64 `json:"share,omitempty"`
	Limited bool  `json:"limited,omitempty"`
	// GPU is the UUID of the GPU, and MIG that of the MIG device, if it is one.
	GPU   string `json:"gpu"`
	MIG   string `json:"mig,omitempty"`
	Admin bool   `json:"adminAccess,omitempty"`
	// Problem is why the containers of the claim cannot use the device; empty if they can.
	Problem string `json:"problem,omitempty"`
}

// Problems returns the feed of why the containers of a claim cannot use a device, by the name of the device.
func (c *Claims) Problems() *feed.Feed[map[string]string] { return c.problems }

// Status returns the feed of all recorded claims, by namespace and name.
func (c *Claims) Status() *feed.Feed[[]ClaimStatus] { return c.status }
