// Package claims prepares the devices of ResourceClaims for containers. It decides whether
// a claim may have its devices now, keeps one record per claim on disk, and writes the CDI
// spec for the container runtime.
//
// The package uses neither gRPC nor the API server: the caller passes Prepare a function
// that reads the claim. Among the processes of this program on a node, the leader owns the
// claims: in memory, and on disk for the next leader. See record.go for the rules.
package claims

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Options configure Claims.
type Options struct {
	// DriverName is that of the DRA driver; empty for dra.Driver.
	DriverName string
	Inputs
	Accounts
	Hardware
	Files
	// LookUp returns a claim from the API server, and whether a claim of that name exists.
	// Nil without access to the API server: then no claim counts as leaked.
	LookUp func(ctx context.Context, namespace, name string) (claim dra.Claim, found bool, err error)
	// Patience is how long a call waits for a temporary obstacle, such as a device in use
	// or missing information; 0 for no wait. The kubelet retries after 60 to 90 s.
	Patience time.Duration
	// Lead returns why this process is not the leader, and so must not write; nil if it
	// leads. Without the function the process always leads.
	Lead func() error
	// Metrics may be nil.
	Metrics Metrics
}

// Inputs are the devices that claims can have.
type Inputs struct {
	// Pools are the published devices.
	Pools     *feed.Feed[dra.Pool]
	Snapshots *feed.Feed[inventory.Snapshot]
	Configs   *feed.Feed[config.Config]
	// Owners say who offers each GPU. If all GPUs are in slices, a claim is prepared even
	// if HeldDevices fails. Nil if the owners are unknown.
	Owners *feed.Feed[dra.Owners]
}

// Accounts say who else uses devices.
type Accounts struct {
	// HeldDevices returns the devices that pods hold by the device plugin; nil without a
	// kubelet.
	HeldDevices func(context.Context) ([]kubelet.HeldDevice, error)
	// PodClaims returns the claims of the pods on the node, by "NAMESPACE/NAME"; nil if
	// they cannot be known.
	PodClaims func(context.Context) (map[string]bool, error)
	// KubeletClaims returns the UIDs of the prepared claims according to the kubelet's
	// checkpoint, in a process that does not serve the DRA driver. The error says why the
	// claims are unknown. Nil in a process that serves the driver.
	KubeletClaims func(context.Context) (map[string]bool, error)
	// PodRuns reports whether a pod, by UID, still has a process; false if unknown. Nil if
	// it is never known.
	PodRuns func(uid string) bool
	// Checkpoint is the file of NVIDIA's driver with its prepared claims; empty if the
	// claims are never taken over.
	Checkpoint string
}

// Hardware is what a claim changes and checks on the node.
type Hardware struct {
	// Inspect runs the checks that precede a container start with devices of the device
	// plugin, and returns why the devices must not be used now. The error wraps
	// inventory.ErrInUse if the reason is temporary. Only UUID and Sharing of the devices
	// are set. Nil means no checks.
	Inspect func(context.Context, []resource.Device) error
	// SetTimeSlice sets the time slice of a GPU, from 0 (the default) to 3 (long); nil if
	// time slices are not supported.
	SetTimeSlice func(ctx context.Context, gpu string, interval int) error
	// MPS runs control daemons; nil if MPS is not supported.
	MPS ControlDaemons
	// Driver creates MIG devices for claims; nil if none are created.
	Driver Divider
	// Divisions receive how GPUs in MIG mode are divided for claims; nil until the first
	// survey of Divide. The feed is nil without readers.
	Divisions *feed.Feed[dra.Divisions]
	// Alone returns why hardware must not be changed now: an earlier leader may still
	// change it. Without the function changes are always allowed.
	Alone func() error
}

// Files are the folders and files of claims.
type Files struct {
	// StateDir holds the records. CDIDir is the folder in which runtimes search for specs.
	StateDir, CDIDir string
	// BootID is the node's boot ID; empty if unknown.
	BootID string
	// Root is the file system with the driver's files; nil for the file system of this
	// process.
	Root fs.FS
}

// Metrics counts calls of the kubelet. Its methods return at once.
type Metrics interface {
	// Prepared counts a call that prepared a claim or failed, with its duration. The Cause
	// is empty on success.
	Prepared(took time.Duration, cause string)
	// Unprepared does the same for calls that unprepare a claim.
	Unprepared(took time.Duration, cause string)
	// PreparedWithoutKubelet counts a claim prepared although the kubelet did not say
	// which pods hold GPUs as resources. No GPU is offered as a resource then.
	PreparedWithoutKubelet()
}

type noMetrics struct{}

func (noMetrics) Prepared(time.Duration, string)   {}
func (noMetrics) Unprepared(time.Duration, string) {}
func (noMetrics) PreparedWithoutKubelet()          {}

// Claims prepares and unprepares claims. Create it with New, and call Run for each period
// in which this process leads. All methods may be called concurrently.
type Claims struct {
	options Options
	store   store
	locks   locks
	claimFeeds
	edits atomic.Pointer[containerEdits] // nil until Run has read the driver's files
	calls sync.WaitGroup                 // calls in progress

	mu      sync.Mutex        // guards all following fields
	records map[string]record // by UID of the claim; replaced, not changed
	// specWritten has the prepared claims, by UID, and whether their records are complete
	// and their specs up to date.
	specWritten        map[string]bool
	recentlyUnprepared map[string]unprepareMark // claims that were unprepared a short time ago, by UID
	unprepareCount     int                      // number of unprepare calls
	releaseProblem     map[string]string        // why devices of an unprepared claim are not released yet, by UID
	noUVM              time.Time                // when nvidia-uvm was found missing; zero while it exists
	controlDaemons
}

// claimFeeds are what Claims publish.
type claimFeeds struct {
	inUse  *feed.Feed[map[string][]Holder]
	status *feed.Feed[[]ClaimStatus]
	// problems say why containers cannot use a device, by device name.
	problems       *feed.Feed[map[string]string]
	open           *feed.Feed[bool]     // calls are answered: Run has read the records, and still runs
	editsChanged   *feed.Feed[struct{}] // published when edits change
	recordsChanged *feed.Feed[struct{}] // published when a record changes or a claim is unprepared
}

// controlDaemons are the MPS control daemons of claims.
type controlDaemons struct {
	// mpsProblem says why an MPS control daemon does not serve clients, by daemon ID.
	// servedCount counts the successful starts.
	mpsProblem  map[string]string
	servedCount int
}

// containerEdits are what a container gets with each device, as of the Snapshot of a
// generation.
type containerEdits struct {
	cdi.DeviceEdits
	generation uint64
}

// knownSince reports whether the edits for a device, by UUID, are known from the Snapshot
// of a generation or a later Snapshot.
func (g *containerEdits) knownSince(generation uint64, uuid string) bool {
	return g != nil && g.generation >= generation && g.Has(uuid)
}

// An unprepareMark says that a claim was unprepared. A call that began to prepare the
// claim earlier must fail. A mark outlives every call.
type unprepareMark struct {
	number int // among all unprepare calls
	last   time.Time
}

const unprepareMarkLifetime = 2 * time.Minute

// New returns Claims that prepare nothing until Run is called.
func New(o Options) *Claims {
	o.DriverName = cmp.Or(o.DriverName, dra.Driver)
	if o.Metrics == nil {
		o.Metrics = noMetrics{}
	}
	if o.Root == nil {
		o.Root = os.DirFS("/")
	}
	if o.Divisions == nil {
		o.Divisions = feed.New(dra.Divisions(nil))
	}
	if o.Owners == nil {
		o.Owners = feed.New(dra.Owners(nil))
	}
	always := func() error { return nil }
	leads := always
	if o.Lead != nil {
		leads = func() error {
			// Also checked because this process may have been paused without knowing.
			if err := o.Lead(); err != nil {
				return causedError{CauseLate, fmt.Errorf("%w: %w", dra.ErrEnded, err)}
			}
			return nil
		}
	}
	if o.Alone == nil {
		o.Alone = always
	}
	return &Claims{
		options: o, store: store{
			dir: o.StateDir, specs: cdi.ClaimSpecs{Dir: o.CDIDir, Driver: o.DriverName}, step: func() {}, lead: leads,
			written: &sync.Map{},
		},
		locks: locks{tail: map[string]chan struct{}{}},
		claimFeeds: claimFeeds{
			inUse: feed.New[map[string][]Holder](nil), status: feed.New[[]ClaimStatus](nil),
			problems: feed.New[map[string]string](nil), open: feed.New(false),
			editsChanged: feed.New(struct{}{}), recordsChanged: feed.New(struct{}{}),
		},
		records: map[string]record{}, specWritten: map[string]bool{},
		recentlyUnprepared: map[string]unprepareMark{}, releaseProblem: map[string]string{},
	}
}

// begin waits until calls are answered. The caller calls done at the end of its call.
func (c *Claims) begin(ctx context.Context) (done func(), err error) {
	for {
		_, changed := c.open.Latest()
		c.mu.Lock()
		open := c.open.Value()
		if open {
			c.calls.Add(1)
		}
		c.mu.Unlock()
		if open {
			return c.calls.Done, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fail(CauseNotReady, "the records of claims are not read yet: %w", ctx.Err())
		}
	}
}

// setOpen starts to answer calls, or stops it and waits for the calls in progress.
func (c *Claims) setOpen(open bool) {
	c.mu.Lock()
	if c.open.Value() != open {
		c.open.Publish(open)
	}
	c.mu.Unlock()
	if !open {
		c.calls.Wait()
	}
}

// all returns all records. Callers must not change them.
func (c *Claims) all() map[string]record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.records
}

// unprepareNumber returns the number of the last call that unprepared a claim in the last
// minutes; 0 if there is none.
func (c *Claims) unprepareNumber(uid string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.recentlyUnprepared[uid].number
}

// unpreparedSince reports whether a claim was unprepared after unprepareNumber returned
// before.
func (c *Claims) unpreparedSince(uid string, before int) bool {
	number := c.unprepareNumber(uid)
	return number != 0 && number != before
}

// noteUnprepared marks a claim as unprepared now. A repeated call wakes nobody, itself
// included.
func (c *Claims) noteUnprepared(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, again := c.recentlyUnprepared[uid]
	c.unprepareCount++
	c.recentlyUnprepared[uid] = unprepareMark{c.unprepareCount, time.Now()}
	if !again {
		c.recordsChanged.Publish(struct{}{})
	}
}

// dropUnprepareMarks removes old marks.
func (c *Claims) dropUnprepareMarks() {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.recentlyUnprepared, func(_ string, t unprepareMark) bool {
		return time.Since(t.last) > unprepareMarkLifetime
	})
}

// A Holder is a claim that holds a GPU or a part of a GPU.
type Holder struct {
	UID, Namespace, Name string
	// Device is the UUID of the GPU or MIG device.
	Device string
	// Admin says that the claim has adminAccess: other claims can have the device at the
	// same time.
	Admin bool
}

// InUse returns the feed of the recorded claims, by UUID of the GPU; nil until Run has
// read the records. Claims from before a restart of the node are included, because their
// pods come back. The value at the end of Run is kept.
func (c *Claims) InUse() *feed.Feed[map[string][]Holder] { return c.inUse }

// A ClaimStatus is a recorded claim, for users and programs.
type ClaimStatus struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// OwnerPod is the UID of the only pod that can use the claim; empty if several pods can.
	OwnerPod string `json:"-"`
	// Driver is the name of the driver that prepared the claim; empty for dra.Driver.
	Driver string `json:"driver,omitempty"`
	// Since is when the claim was first prepared.
	Since time.Time `json:"since"`
	// Restarted says that the node has restarted since. The claim will be prepared again
	// before its next pod starts.
	Restarted bool `json:"restarted,omitempty"`
	// Making says that MIG devices are being created for the claim.
	Making bool `json:"-"`
	// Released is why MIG devices or control daemons of an unprepared claim still exist;
	// empty for any other claim.
	Released string `json:"released,omitempty"`
	// Destroyed says that the devices are gone, but the MIG mode of their GPUs is still
	// on.
	Destroyed bool           `json:"destroyed,omitempty"`
	Devices   []DeviceStatus `json:"devices"`
}

// A DeviceStatus is a device of a claim.
type DeviceStatus struct {
	Request string `json:"request"`
	Name    string `json:"name"`
	ShareID string `json:"shareID,omitempty"`
	// Share is the claim's part of the device memory, in bytes; 0 for the whole memory.
	// Limited says that MPS enforces the share for every process of the claim; otherwise
	// only the scheduler accounts for the share.
	Share   int64 `json:"share,omitempty"`
	Limited bool  `json:"limited,omitempty"`
	// GPU is the UUID of the GPU, and MIG the UUID of the MIG device, if any.
	GPU   string `json:"gpu"`
	MIG   string `json:"mig,omitempty"`
	Admin bool   `json:"adminAccess,omitempty"`
	// Problem is why the containers of the claim cannot use the device; empty if they can.
	Problem string `json:"problem,omitempty"`
}

// Problems returns the feed of why containers of a claim cannot use a device, by device
// name.
func (c *Claims) Problems() *feed.Feed[map[string]string] { return c.problems }

// Status returns the feed of all recorded claims, sorted by namespace and name.
func (c *Claims) Status() *feed.Feed[[]ClaimStatus] { return c.status }

// States returns the prepared claims, and a channel that is closed when they change.
// Claims from before a restart of the node, claims whose MIG devices are being created,
// and unprepared claims are omitted.
func (c *Claims) States() (all []dra.ClaimState, changed <-chan struct{}) {
	prepared, changed := c.status.Latest()
	for _, s := range prepared {
		if s.Released != "" || s.Restarted || s.Making {
			continue
		}
		state := dra.ClaimState{UID: s.UID, Namespace: s.Namespace, Name: s.Name, Since: s.Since}
		for _, d := range s.Devices {
			state.Devices = append(state.Devices, dra.DeviceState{
				Device: d.Name, ShareID: d.ShareID, GPU: d.GPU, MIG: d.MIG, Memory: d.Share, Limited: d.Limited,
				Problem: d.Problem,
			})
		}
		all = append(all, state)
	}
	return all, changed
}
