// Package claims prepares the devices of ResourceClaims for containers: it decides whether a claim
// may have its devices now, keeps one record a claim on disk, and writes the CDI spec that kubelet
// names to the runtime.
//
// It knows neither gRPC nor the API server: Prepare gets a function that reads the claim. Of the
// processes of this program on a node, the one that leads has the claims. It has their records in
// memory, and on disk for the next one. See record.go for the rules.
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

// Options are what Claims are made of.
type Options struct {
	// DriverName is that of the DRA driver; empty for dra.Driver.
	DriverName string
	// Pools are the devices that are published.
	Pools     *feed.Feed[dra.Pool]
	Snapshots *feed.Feed[inventory.Snapshot]
	Configs   *feed.Feed[config.Config]
	// Held returns the devices that pods hold by the device plugin; nil where there is no kubelet.
	HeldDevices func(context.Context) ([]kubelet.HeldDevice, error)
	// Owners say who gives out each GPU. Where all are in slices, a claim is prepared also without an
	// answer of Held; nil where that is not known.
	Owners *feed.Feed[dra.Owners]
	// Claimed returns the claims of the pods that are on the node, by "NAMESPACE/NAME"; nil where that
	// is not known.
	PodClaims func(context.Context) (map[string]bool, error)
	// LookUp returns a claim as the API server has it, and whether it has one of that name; nil where
	// it is not asked: then no claim counts as leaked.
	LookUp func(ctx context.Context, namespace, name string) (claim dra.Claim, found bool, err error)
	// Kept returns the UIDs of the claims that the kubelet has had prepared and not unprepared, by
	// its own checkpoint, in a process that does not offer the driver to the kubelet. The error
	// says why they are not known. Nil means that the process does.
	KubeletClaims func(context.Context) (map[string]bool, error)
	// Inspect makes the checks that precede the start of a container with devices of the device
	// plugin. It returns why the devices must not be used now. The error wraps inventory.ErrInUse if
	// the reason passes by itself. Of the devices, UUID and Sharing are set. Without the function
	// there are no checks.
	Inspect func(context.Context, []resource.Device) error
	// PodRuns reports whether a pod has a process still, by its UID; false where that cannot be seen.
	// Nil where it is never seen.
	PodRuns func(uid string) bool
	// SetTimeSlice sets the time slice of a GPU, from 0 (the default) to 3 (long); nil where it cannot
	// be set.
	SetTimeSlice func(ctx context.Context, gpu string, interval int) error
	// MPS runs control daemons; nil where there are none.
	MPS ControlDaemons
	// Divisions are published here: how GPUs in MIG mode are divided for claims. It is nil until
	// Divide has looked. Nil where nobody reads it.
	Divisions *feed.Feed[dra.Divisions]
	// Driver makes MIG devices for claims; nil where none are made.
	Driver Divider
	// StateDir is where the records are kept, and CDIDir where runtimes look for specs.
	StateDir, CDIDir string
	// Checkpoint is the file in which NVIDIA's driver keeps the claims that it prepared; empty where
	// they are never taken over.
	Checkpoint string
	// BootID is the node's boot ID; empty if it is not known.
	BootID string
	// Patience is how long a call waits for what passes by itself: a device that is in use still, what
	// is not known yet. Kubelet calls again after 60 to 90 s. 0 for not at all.
	Patience time.Duration
	// Lead returns why this process does not lead now, so that it may write nothing; nil if it does.
	// Without the function it always does.
	Lead func() error
	// Alone returns why hardware may not be changed now: an earlier lead may still do so. Without the
	// function it may.
	Alone func() error
	// Root is the file system of this process, in which the driver's files are looked for; nil is the
	// real one.
	Root fs.FS
	// Metrics may be nil.
	Metrics Metrics
}

// Metrics counts calls of kubelet's. Its methods return at once.
type Metrics interface {
	// Prepared counts a claim that was prepared in that time, or was not: the Cause is empty if it
	// was.
	Prepared(took time.Duration, cause string)
	// Unprepared is the same for claims that are given back.
	Unprepared(took time.Duration, cause string)
	// Unasked counts a claim for which kubelet did not say which pods hold GPUs as resources, where
	// none is on offer as one.
	PreparedWithoutKubelet()
}

type noMetrics struct{}

func (noMetrics) Prepared(time.Duration, string)   {}
func (noMetrics) Unprepared(time.Duration, string) {}
func (noMetrics) PreparedWithoutKubelet()          {}

// Claims prepare and unprepare claims. New builds them, and Run is called for each time in which
// this process leads. Their methods may be called by several goroutines.
type Claims struct {
	options Options
	store   store
	locks   locks
	inUse   *feed.Feed[map[string][]Holder]
	status  *feed.Feed[[]ClaimStatus]
	// problems are why containers cannot use a device, by its name.
	problems *feed.Feed[map[string]string]
	edits    atomic.Pointer[containerEdits] // nil until Run has looked
	open     *feed.Feed[bool]               // calls are answered: Run has read the records, and has not ended
	calls    sync.WaitGroup                 // those that are being answered

	editsChanged   *feed.Feed[struct{}] // when given changes
	recordsChanged *feed.Feed[struct{}] // when a record does, or a claim is given back

	mu      sync.Mutex        // guards all following fields
	records map[string]record // by the UID of the claim; replaced, not changed
	// claims that were prepared, by UID, and whether their records say all, and their specs are as
	// they should be
	specWritten        map[string]bool
	recentlyUnprepared map[string]unprepareMark // claims that were given back a short time ago, by UID
	unprepareCount     int                      // how often a claim was given back
	releaseProblem     map[string]string        // why something is left of a claim that was given back, by its UID
	noUVM              time.Time                // when nvidia-uvm was seen to be missing; zero while it is there
	// unserved are why control daemons of MPS do not serve clients, by ID. served counts when one did.
	mpsProblem  map[string]string
	servedCount int
}

// A given is what containers are given with the devices of the Snapshot of a generation.
type containerEdits struct {
	cdi.Given
	generation uint64
}

// since reports whether it is known what containers are given with a device, by UUID, by the
// Snapshot of a generation or a later one.
func (g *containerEdits) knownSince(generation uint64, uuid string) bool {
	return g != nil && g.generation >= generation && g.Has(uuid)
}

// A tombstone says that a claim was given back: a call that began to prepare it before must not do
// so any more. It is kept for longer than any call can last.
type unprepareMark struct {
	number int // of all claims that were given back
	last   time.Time
}

const unprepareMarkLifetime = 2 * time.Minute

// New returns Claims that prepare nothing before Run.
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
			if err := o.Lead(); err != nil { // also where this process was stopped, and does not know it yet
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
		inUse: feed.New[map[string][]Holder](nil), status: feed.New[[]ClaimStatus](nil),
		problems: feed.New[map[string]string](nil), editsChanged: feed.New(struct{}{}), recordsChanged: feed.New(struct{}{}),
		open: feed.New(false), records: map[string]record{}, specWritten: map[string]bool{}, recentlyUnprepared: map[string]unprepareMark{},
		releaseProblem: map[string]string{},
	}
}

// enter waits until calls are answered. The caller calls done at the end of its call.
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

// answer lets calls be answered, or stops that and waits for the calls under way.
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

// all returns all records. Nobody may change them.
func (c *Claims) all() map[string]record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.records
}

// givenBack returns the number of the last time that a claim was given back, if that was in the
// last minutes; 0 otherwise.
func (c *Claims) unprepareNumber(uid string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.recentlyUnprepared[uid].number
}

// backSince reports whether a claim was given back since givenBack returned before.
func (c *Claims) unpreparedSince(uid string, before int) bool {
	number := c.unprepareNumber(uid)
	return number != 0 && number != before
}

// bury notes that a claim is given back now. A call that tries that again wakes nobody, itself
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

// forget removes old tombstones.
func (c *Claims) dropUnprepareMarks() {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.recentlyUnprepared, func(_ string, t unprepareMark) bool { return time.Since(t.last) > unprepareMarkLifetime })
}

// A Holder is a claim that has a GPU or a part of it.
type Holder struct {
	UID, Namespace, Name string
	// Device is the UUID of the GPU or MIG device.
	Device string
	// Admin says that the claim has adminAccess: others can have the device at the same time.
	Admin bool
}

// InUse returns the feed of the claims that are recorded, by the UUID of the GPU. It is nil until
// Run has read the records. Claims from before a restart of the node are among them: their pods
// come back. What it had when Run ended stays.
func (c *Claims) InUse() *feed.Feed[map[string][]Holder] { return c.inUse }

// A ClaimStatus is a claim that is recorded, for people and programs.
type ClaimStatus struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Driver is the name of the driver under which it was prepared; empty for dra.Driver.
	Driver string `json:"driver,omitempty"`
	// Since is when the claim was first prepared.
	Since time.Time `json:"since"`
	// Restarted says that the node was restarted since: the claim will be prepared again before its
	// next pod starts.
	Restarted bool `json:"restarted,omitempty"`
	// Making says that MIG devices are being made for the claim.
	Making bool `json:"-"`
	// Released is why MIG devices or control daemons of a claim are there still although it was given
	// back; empty for any other claim.
	Released string `json:"released,omitempty"`
	// Destroyed says that these devices are gone, and that the MIG mode of their GPUs is still on.
	Destroyed bool           `json:"destroyed,omitempty"`
	Devices   []DeviceStatus `json:"devices"`
}

// A DeviceStatus is a device of a claim.
type DeviceStatus struct {
	Request string `json:"request"`
	Name    string `json:"name"`
	ShareID string `json:"shareID,omitempty"`
	// Share is the part of the memory of the device that the claim has, in bytes; 0 for all of it.
	// Limited says that MPS keeps every process of the claim to it, and not the scheduler's account
	// alone.
	Share   int64 `json:"share,omitempty"`
	Limited bool  `json:"limited,omitempty"`
	// GPU is the UUID of the GPU, and MIG that of the MIG device, if it is one.
	GPU   string `json:"gpu"`
	MIG   string `json:"mig,omitempty"`
	Admin bool   `json:"adminAccess,omitempty"`
	// Problem is why the containers of the claim cannot use the device; empty if they can.
	Problem string `json:"problem,omitempty"`
}

// Problems returns the feed of why the containers of a claim cannot use a device, by the name of
// the device.
func (c *Claims) Problems() *feed.Feed[map[string]string] { return c.problems }

// Status returns the feed of all recorded claims, by namespace and name.
func (c *Claims) Status() *feed.Feed[[]ClaimStatus] { return c.status }

// States returns the claims that are prepared, and what is closed when that changes. Those of
// before a restart of the node, those whose MIG devices are being made, and those that were given
// back are left out.
func (c *Claims) States() (all []dra.ClaimState, changed <-chan struct{}) {
	prepared, changed := c.status.Latest()
	for _, s := range prepared {
		if s.Released != "" || s.Restarted || s.Making {
			continue
		}
		state := dra.ClaimState{UID: s.UID, Namespace: s.Namespace, Name: s.Name, Since: s.Since}
		for _, d := range s.Devices {
			state.Devices = append(state.Devices, dra.DeviceState{
				Device: d.Name, ShareID: d.ShareID, GPU: d.GPU, MIG: d.MIG, Memory: d.Share, Limited: d.Limited, Problem: d.Problem,
			})
		}
		all = append(all, state)
	}
	return all, changed
}
