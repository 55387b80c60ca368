// Package monitor has the state of the node's GPUs. It is the only package that asks the driver.
// One loop looks at the node, listens to the driver's events, folds both into what is known of each
// GPU with the policy of package health, and publishes a Snapshot whenever what the node says has
// changed.
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
	// inventory's where those fit. After inventory.ErrNoAnswer the session may still come: then the
	// next Open returns it.
	Open(ctx context.Context) (Session, error)
}

// A Session is one session with the driver. Next is called by one goroutine, Sample by another, the
// other methods by a third. All of them return in bounded time, whatever call hangs, with
// inventory.ErrNoAnswer; an inventory.Stall says which call of which GPU it is.
type Session interface {
	// Scan looks at the whole node. Of the health in the Snapshot nothing is used: Read says more.
	Scan(ctx context.Context) (inventory.Snapshot, error)
	// Read reads how a GPU of the last Scan is. An error means that it could not be asked.
	Read(ctx context.Context, uuid string) (inventory.Reading, error)
	// Retry has the next Scan ask the GPUs again that were left alone because they are lost, hang or
	// cannot be identified.
	Retry(ctx context.Context) error
	// Sample measures a GPU of the last Scan, for metrics; with blocking, also what takes long. It
	// calls pause again and again, and makes no call into the driver meanwhile. The error is as that
	// of Read.
	Sample(ctx context.Context, uuid string, blocking bool, pause func(context.Context)) (inventory.Sample, error)
	// Processes returns the processes that compute on a GPU of the last Scan, as far as this process
	// can see them.
	Processes(ctx context.Context, uuid string) ([]inventory.Process, error)
	// MemoryLimit returns how much memory of a GPU of the last Scan the processes of a cgroup may use,
	// in MiB; 0 where that is not limited.
	MemoryLimit(ctx context.Context, uuid, cgroup string) (mib int, err error)
	// Clean takes back what earlier work left behind on a GPU of the last Scan.
	Clean(ctx context.Context, uuid string, what inventory.Remnant) error
	// SetComputeMode says which processes may compute on a GPU of the last Scan, and returns what held
	// before.
	SetComputeMode(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode, error)
	// Partitions returns how MIG divides a GPU of the last Scan.
	Partitions(ctx context.Context, uuid string) (inventory.Partitions, error)
	// Repartition begins to change how MIG divides a GPU of the last Scan. It returns when the change
	// is made or takes long. The function that it returns waits for the end; the ID is that of an
	// instance that was created.
	Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (end func(context.Context) (id int, err error),
		err error)
	// LostByClose returns what GPUs would lose if the session were closed while nobody else has them
	// open; empty for nothing.
	LostByClose(ctx context.Context) (string, error)
	// Next blocks until an event. After inventory.ErrNoAnswer it may be called again later. Any other
	// error ends the session's use: only a new one has further events.
	Next(ctx context.Context) (inventory.Event, error)
	// Hanging reports whether a call has not returned in time: the session cannot be closed now.
	Hanging() bool
	// Unwatched lists the GPUs that give no events, and why.
	Unwatched() []inventory.LeftOut
	// Close ends the session and the Next under way. After inventory.ErrNoAnswer the session can still
	// be used.
	Close(ctx context.Context) error
}

// A ModeSetter sets the MIG mode of GPUs that the driver resets for that, while this process has no
// session.
type ModeSetter interface {
	// Check returns why it must not be done on this node; nil if it may.
	Check() error
	// Set sets the mode. It returns by the end of ctx. The error wraps the same errors as the end of
	// Session.Repartition.
	Set(ctx context.Context, uuid string, mode inventory.MIGMode) error
}

// Options are the parts of the daemon and the durations that a Monitor uses. All durations have
// defaults, which a zero value stands for.
type Options struct {
	Driver Driver
	Policy health.Policy
	// StateDir is where the fault ledger is kept, so that a restart does not make a bad GPU good;
	// empty for nowhere. The process that leads writes it.
	StateDir string
	// While runs a task whenever this process leads, until ctx ends; nil means always. Lead says why
	// it does not lead, before each write.
	While func(ctx context.Context, task func(context.Context) error) error
	Lead  func() error
	// BootID is the node's boot ID (/proc/sys/kernel/random/boot_id), by which the ledger's faults of
	// before a restart of the node are told; empty if it is not known: then they all stand.
	BootID string
	// Poll is the time between looks; that of the policy if zero. SuspectPoll is the time while a
	// verdict is being waited for, 1 s.
	Poll, SuspectPoll time.Duration
	// Gap is the least time between two looks, however many events ask for one, 250 ms.
	Gap time.Duration
	// Metrics counts XIDs and recoveries; nil counts nothing.
	Metrics Metrics
	// Modes sets MIG modes that this process's session is in the way of; nil where none is ever
	// changed.
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

// The wait before the driver is asked again for a session that it refused: it doubles from
// reopenFirst to reopenMost, and a driver that arrives late is served that soon after.
const (
	reopenFirst = time.Second
	reopenMost  = 15 * time.Second
)

// defaultPoll is the time between looks where nothing else says one.
const defaultPoll = 4 * time.Second

// closePatience is how long a session may take to close.
const closePatience = 5 * time.Second

// provenSession is how long a session's events must have come for their end to count as the first
// again.
const provenSession = time.Minute

// maxPending bounds the events that wait for a look to know their device.
const maxPending = 256

// A Monitor is the owner of the Snapshot. New builds one, Run is its one life.
type Monitor struct {
	options   Options
	snapshots *feed.Feed[inventory.Snapshot]
	samples   *feed.Feed[[]inventory.Sample]

	// What the loop receives. Requests are run by it, one at a time.
	requests chan func(*loop)
	events   chan inventory.Event
	broken   chan error
	looks    chan look

	recall func(context.Context, Options) memory
	save   func(dir string, r *ledger.Release) error
	marks  chan mark   // the latest to be saved
	told   atomic.Bool // that the driver is to be released, or gone back to, since the start

	releasing chan struct{} // holds a token while it is being saved that the driver is released, or used again

	first    chan struct{} // closed once firstErr is the outcome of the first look
	firstErr error
}

// New returns a Monitor that has not begun to look. It does no I/O.
func New(o Options) *Monitor {
	return &Monitor{
		options:   o.withDefaults(),
		snapshots: feed.New(inventory.Snapshot{}),
		samples:   feed.New[[]inventory.Sample](nil),
		requests:  make(chan func(*loop)),
		events:    make(chan inventory.Event),
		broken:    make(chan error),
		looks:     make(chan look),
		recall:    recall,
		save:      save,
		marks:     make(chan mark, 1),
		releasing: make(chan struct{}, 1),
		first:     make(chan struct{}),
	}
}

// Snapshots returns the feed of Snapshots. Its first value, of Generation 0, is that of a node
// nobody has looked at.
func (m *Monitor) Snapshots() *feed.Feed[inventory.Snapshot] { return m.snapshots }

// First waits for the outcome of the first look: nil once its Snapshot is published, or why there
// was none. The error wraps inventory.ErrNoDriver and the like. A Monitor whose first look failed
// goes on trying.
func (m *Monitor) First(ctx context.Context) error {
	select {
	case <-m.first:
		return m.firstErr
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run looks at the node until ctx ends, and then returns nil. It may be called once.
func (m *Monitor) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(klog.NewContext(ctx, klog.FromContext(ctx).WithName("monitor")))
	prober := &prober{monitor: m, start: group.Go}
	loop := newLoop(m, prober, group.Go)
	if m.options.StateDir != "" {
		loop.remember(ctx)
		group.Go(func() error {
			m.saveMarks(ctx)
			return nil
		})
	}
	group.Go(func() error {
		loop.run(ctx)
		return nil
	})
	_ = group.Wait() // none of them fails
	if err := prober.close(context.WithoutCancel(ctx), closeTimeout); err != nil {
		klog.FromContext(ctx).Info("Ended with an open session", "reason", err.Error())
	}
	return nil
}
