// Package monitor owns the state of the node's GPUs. Other packages send it requests instead of
// calling the driver. One loop checks the health of the node, listens to the driver's events, folds
// both into the state of each GPU by the policy of package health, and publishes a Snapshot of every
// change.
//
// A look is one health check of the node: a scan and a reading of every GPU. The laws in
// docs/dev/architecture.md use the same word.
package monitor

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// A Driver opens sessions with the driver of the node, one at a time.
type Driver interface {
	// Open starts a session and registers for events before it returns. The error wraps one of
	// inventory's errors where possible. After inventory.ErrNoAnswer a session may still open
	// later, and the next Open returns it.
	Open(ctx context.Context) (Session, error)
}

// A Session is a session with the driver. Next is called by one goroutine, Sample by a second, and
// the other methods by a third. All methods return in bounded time. If a call hangs, the error is
// inventory.ErrNoAnswer, or an inventory.Stall with the call and the GPU.
type Session interface {
	// Scan reads the node. The Health in the Snapshot is not used, because Read returns more.
	Scan(ctx context.Context) (inventory.Snapshot, error)
	// Read returns a Reading of a GPU of the last Scan. An error means that the GPU could not be
	// read.
	Read(ctx context.Context, uuid string) (inventory.Reading, error)
	// Retry makes the next Scan call all paused GPUs again. Paused GPUs are lost, hang or cannot be
	// identified.
	Retry(ctx context.Context) error
	// Sample measures a GPU of the last Scan, for metrics. With blocking, the sample includes slow
	// measurements. Sample calls pause repeatedly, and makes no call into the driver during pause.
	// Errors are as in Read.
	Sample(ctx context.Context, uuid string, blocking bool, pause func(context.Context)) (inventory.Sample, error)
	// Processes returns the processes that compute on a GPU of the last Scan, if visible to this
	// process.
	Processes(ctx context.Context, uuid string) ([]inventory.Process, error)
	// MemoryLimit returns the memory limit of a cgroup on a GPU of the last Scan, in MiB; 0 without
	// a limit.
	MemoryLimit(ctx context.Context, uuid, cgroup string) (mib int, err error)
	// Clean removes changes left behind by earlier work on a GPU of the last Scan.
	Clean(ctx context.Context, uuid string, what inventory.Remnant) error
	// SetComputeMode sets the compute mode of a GPU of the last Scan, and returns the previous
	// mode.
	SetComputeMode(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode, error)
	// Partitions returns the MIG layout of a GPU of the last Scan.
	Partitions(ctx context.Context, uuid string) (inventory.Partitions, error)
	// Repartition starts a change of the MIG layout of a GPU of the last Scan. It returns after the
	// change, or early if the change takes long. The returned function waits for the end of the
	// change; id is the ID of the created instance.
	Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (end func(context.Context) (id int,
		err error), err error)
	// LostByClose describes the GPU settings lost when the session closes while no other process
	// has the GPUs open; empty without any.
	LostByClose(ctx context.Context) (string, error)
	// Next blocks until an event. It may be called again after inventory.ErrNoAnswer. After any
	// other error only a new session has further events.
	Next(ctx context.Context) (inventory.Event, error)
	// Hanging reports whether a call has not returned in time. The session can then not be closed.
	Hanging() bool
	// Unwatched lists the GPUs without driver events, with the reasons.
	Unwatched() []inventory.LeftOut
	// Close ends the session and a running Next. After inventory.ErrNoAnswer the session can still
	// be used.
	Close(ctx context.Context) error
}

// A ModeSetter sets the MIG mode of GPUs that the driver resets for the change, while this process
// has no session.
type ModeSetter interface {
	// Check returns why the mode must not be set on this node; nil if it may.
	Check() error
	// Set sets the mode. It returns by the end of ctx. The error wraps the same errors as the end
	// of Session.Repartition.
	Set(ctx context.Context, uuid string, mode inventory.MIGMode) error
}

// Options are the dependencies and durations of a Monitor. A zero duration means its default.
type Options struct {
	Driver Driver
	Policy health.Policy
	// StateDir is the directory of the fault ledger; empty for no ledger. The ledger keeps a bad
	// GPU bad after a restart. Only the leading process writes the ledger.
	StateDir string
	// While runs a task whenever this process leads, until ctx ends; nil means always. Lead returns
	// before each write why this process does not lead.
	While func(ctx context.Context, task func(context.Context) error) error
	Lead  func() error
	// BootID is the node's boot ID (/proc/sys/kernel/random/boot_id). Faults of an earlier boot
	// have another boot ID in the ledger. With an empty BootID, all faults in the ledger stay open.
	BootID string
	// Poll is the time between two looks; the default is the policy's. SuspectPoll replaces Poll
	// while a verdict is pending; the default is 1 s.
	Poll, SuspectPoll time.Duration
	// Gap is the shortest time between two looks, however many events request one; the default is
	// 250 ms.
	Gap time.Duration
	// Metrics counts XIDs and recoveries; nil counts nothing.
	Metrics Metrics
	// Modes sets MIG modes while there is no session; nil if modes are never changed.
	Modes ModeSetter
}

func (o Options) withDefaults() Options {
	fill := func(d *time.Duration, value time.Duration) {
		if *d == 0 {
			*d = value
		}
	}
	fill(&o.SuspectPoll, time.Second)
	fill(&o.Gap, 250*time.Millisecond)
	if o.Metrics == nil {
		o.Metrics = noMetrics{}
	}
	if o.While == nil {
		o.While = func(ctx context.Context, task func(context.Context) error) error { return task(ctx) }
		o.Lead = func() error { return nil }
	}
	return o
}

// The wait before another attempt to open a session doubles from reopenFirst to reopenMost. A
// driver that is installed late is in use after reopenMost at the latest.
const (
	reopenFirst = time.Second
	reopenMost  = 15 * time.Second
)

// defaultPoll is the time between two looks if neither the options nor the policy has a time.
const defaultPoll = 4 * time.Second

// closePatience is the longest wait for a session to close.
const closePatience = 5 * time.Second

// provenSession is the lifetime of a session with events after which their end counts as a first
// failure.
const provenSession = time.Minute

// maxPending limits the events that wait for a look to identify the device.
const maxPending = 256

// A Monitor owns the Snapshot. Create a Monitor with New, and call Run once.
type Monitor struct {
	options   Options
	snapshots *feed.Feed[inventory.Snapshot]
	samples   *feed.Feed[[]inventory.Sample]

	// The inputs of the loop. The loop runs requests one at a time.
	requests    chan func(*loop)
	releases    chan func(*loop) // every Quiesce and Resume that the loop has not received yet
	events      chan inventory.Event
	eventErrors chan error
	looks       chan look

	readState        func(context.Context, Options) savedState
	save             func(dir string, r *ledger.Release) error
	marks            chan mark   // the last mark to be saved
	releaseRequested atomic.Bool // Quiesce or Resume was called

	releaseLock chan struct{} // holds a token while a release of the driver, or its end, is being saved

	first    chan struct{} // closed once firstErr is the result of the first look
	firstErr error
}

// New returns a Monitor that has not begun its first look. It does no I/O.
func New(o Options) *Monitor {
	return &Monitor{
		options:     o.withDefaults(),
		snapshots:   feed.New(inventory.Snapshot{}),
		samples:     feed.New[[]inventory.Sample](nil),
		requests:    make(chan func(*loop)),
		releases:    make(chan func(*loop), 1),
		events:      make(chan inventory.Event),
		eventErrors: make(chan error),
		looks:       make(chan look),
		readState:   readSavedState,
		save:        save,
		marks:       make(chan mark, 1),
		releaseLock: make(chan struct{}, 1),
		first:       make(chan struct{}),
	}
}

// Snapshots returns the feed of Snapshots. The first value, of Generation 0, is from before the
// first look.
func (m *Monitor) Snapshots() *feed.Feed[inventory.Snapshot] { return m.snapshots }

// First waits for the end of the first look. It returns nil after the Snapshot is published, or the
// error of the look, which wraps inventory.ErrNoDriver and the like. The Monitor retries a failed
// first look.
func (m *Monitor) First(ctx context.Context) error {
	select {
	case <-m.first:
		return m.firstErr
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run checks the node until ctx ends, and returns nil. It may be called once.
func (m *Monitor) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(klog.NewContext(ctx, klog.FromContext(ctx).WithName("monitor")))
	prober := &prober{monitor: m, start: group.Go}
	loop := newLoop(m, prober, group.Go)
	if m.options.StateDir != "" {
		loop.restoreState(ctx)
		group.Go(func() error {
			m.saveMarks(ctx)
			return nil
		})
	}
	group.Go(func() error {
		loop.run(ctx)
		return nil
	})
	_ = group.Wait() // no function of the group fails
	if err := prober.close(context.WithoutCancel(ctx), closeTimeout); err != nil {
		klog.FromContext(ctx).Info("The driver session could not be closed in time", "reason", err.Error())
	}
	return nil
}
