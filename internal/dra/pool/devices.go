// Package pool has the devices of the node for ResourceSlices: their names, which of them are to be in
// slices, and which may be at the API server. It keeps on disk what the next process must know.
// Package cluster writes the slices.
package pool

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// Files in the state directory.
const (
	numbersFile   = "dra-numbers.json"
	publishedFile = "dra-published.json"
	fileVersion   = 1
	maxFile       = 1 << 20
)

// retryInterval is the interval of retries while the numbers cannot be written or the
// published GPUs cannot be read.
const retryInterval = 10 * time.Second

// Options configure Devices.
type Options struct {
	// StateDir is the state directory; empty to keep numbers only as long as the process
	// runs.
	StateDir string
	// Driver is the name of the driver; empty for dra.Driver.
	Driver string
	// Node is the name of the node.
	Node      string
	Snapshots *feed.Feed[inventory.Snapshot]
	Configs   *feed.Feed[config.Config]
	// Owners say who offers each GPU; nil while unknown. The Arbiter publishes them.
	Owners *feed.Feed[dra.Owners]
	// Divisions are how GPUs in MIG mode are divided for claims; nil while unknown.
	// Without the feed no GPU is divided.
	Divisions *feed.Feed[dra.Divisions]
	// Driverless is the function of the same name in the Arbiter's Options.
	Driverless func() bool
	// Lead returns an error if this process is not the leader, and so must not write.
	// Without the function this process always leads.
	Lead func() error
	// Clock is the clock for all waits; nil means the real clock.
	Clock clock.Clock
}

// Devices are the devices of the node for slices. They keep on disk the numbers in device
// names, and the GPUs that may be in slices. Package cluster publishes the slices. Create
// Devices with New, and call Run for each period in which this process leads.
type Devices struct {
	o           Options
	pools       *feed.Feed[dra.Pool]
	published   *feed.Feed[map[string]bool]
	publication *feed.Feed[Publication]
	problem     string             // the last logged reason why numbers cannot be written
	steady      inventory.Snapshot // without changes that MIG mode causes on GPUs whose mode claims switch

	disk *statefile.Disk // for all work on the files
	// onDisk says that the file named GPUs at its last read or write. Only work on the
	// files uses onDisk.
	onDisk           bool
	publishedUnknown atomic.Bool // it is unknown which GPUs are published

	mu        sync.Mutex  // guards all following fields, and changes of published
	hungSince time.Time   // when the disk last did not respond; zero after a response
	term      int         // counts the periods in which this process leads
	numbers   dra.Numbers // as on disk
	returningGPUs
}

// returningGPUs are GPUs on their way from slices to the device plugin.
type returningGPUs struct {
	// leftSlice are GPUs that left their slices, but are not back at the device plugin;
	// leftOnDisk is the same set on disk.
	leftSlice, leftOnDisk map[string]bool
	// retracted are GPUs whose slices the kubelet has removed, while the file still names
	// them; retractions is published for each new one.
	retracted   map[string]bool
	retractions *feed.Feed[struct{}]
}

// A Publication is the state of the pool at the API server.
type Publication struct {
	// Slices and Devices count the slices and devices. Generation is the generation of the
	// pool.
	Slices, Devices int
	Generation      int64
	// API is the version of resource.k8s.io at the API server. NoTaints says that the API
	// server drops device taints. NoCounters says that it drops counters: then GPUs are
	// not divided for claims. NoShares says that it does not support devices for several
	// claims.
	API                            string
	NoTaints, NoCounters, NoShares bool
	// Problem is why the slices at the API server are not up to date, a sentence without a
	// full stop; empty if they are.
	Problem string
}

// New returns the devices of a node, unknown until Run is called.
func New(o Options) *Devices {
	o.Clock = cmp.Or[clock.Clock](o.Clock, clock.RealClock{})
	if o.Divisions == nil {
		o.Divisions = feed.New(dra.Divisions{})
	}
	if o.Lead == nil {
		o.Lead = func() error { return nil }
	}
	if o.Driverless == nil {
		o.Driverless = func() bool { return false }
	}
	o.Driver = cmp.Or(o.Driver, dra.Driver)
	return &Devices{
		o: o, pools: feed.New(dra.Pool{}), published: feed.New(map[string]bool(nil)),
		publication: feed.New(Publication{}), disk: statefile.NewDisk(), numbers: dra.Numbers{},
		returningGPUs: returningGPUs{leftSlice: map[string]bool{}, retracted: map[string]bool{},
			retractions: feed.New(struct{}{})},
	}
}

// Snapshots returns the feed of the node's GPUs.
func (d *Devices) Snapshots() *feed.Feed[inventory.Snapshot] { return d.o.Snapshots }

// Configs returns the feed of configurations.
func (d *Devices) Configs() *feed.Feed[config.Config] { return d.o.Configs }

// Owners returns the feed of the GPUs' owners. The Arbiter publishes them.
func (d *Devices) Owners() *feed.Feed[dra.Owners] { return d.o.Owners }

// Driverless reports whether no claim can be prepared on this node, because this process
// does not offer the driver to the kubelet. Then the kubelet removes the slices of the
// node.
func (d *Devices) Driverless() bool { return d.o.Driverless() }

// Driver returns the name of the driver.
func (d *Devices) Driver() string { return d.o.Driver }

// Pools returns the feed of the pool to publish. A pool without a name is unknown yet. A
// pool without slices must not exist at the API server.
func (d *Devices) Pools() *feed.Feed[dra.Pool] { return d.pools }

// Published returns the feed of the GPUs that may be in slices at the API server, by UUID;
// nil if unknown: then every GPU may be in a slice.
func (d *Devices) Published() *feed.Feed[map[string]bool] { return d.published }

// Publication returns the feed of the pool's state at the API server, set by the publisher
// of slices.
func (d *Devices) Publication() *feed.Feed[Publication] { return d.publication }

// GPU returns the UUID of the GPU to which a device belongs, by device name, even if the
// device is not in the pool now.
func (d *Devices) GPU(device string) (uuid string, known bool) {
	text, _, _ := strings.Cut(strings.TrimPrefix(device, "gpu-"), "-")
	number, err := strconv.Atoi(text)
	if err != nil {
		return "", false
	}
	for uuid, n := range d.Numbers() {
		if n == number {
			return uuid, true
		}
	}
	return "", false
}

// Numbers returns the numbers in device names. Callers must not change them.
func (d *Devices) Numbers() dra.Numbers {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.numbers
}

func (d *Devices) setNumbers(numbers dra.Numbers) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.numbers = numbers
}

// diskTimeout limits each wait for the disk.
const diskTimeout = 2 * time.Second

// onFiles runs work on the files, one work at a time. After the disk has not responded,
// calls fail at once for a while, so that tasks without the disk continue.
func (d *Devices) onFiles(ctx context.Context, work func() error) error {
	d.mu.Lock()
	wait := d.hungSince.IsZero() || d.o.Clock.Since(d.hungSince) >= retryInterval
	d.mu.Unlock()
	err := statefile.ErrHangs
	if wait {
		err = d.disk.Do(ctx, diskTimeout, work)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.hungSince = time.Time{}
	}
	if errors.Is(err, statefile.ErrHangs) {
		if wait {
			d.hungSince = d.o.Clock.Now()
		}
		err = fmt.Errorf("%w; see to the disk of %s", err, d.o.StateDir)
	}
	return err
}

// Run reads the files of an earlier process and follows the GPUs until ctx ends. Then it
// resets its state and returns nil. The error wraps dra.ErrOtherName if an earlier leader
// publishes devices under another driver name.
func (d *Devices) Run(ctx context.Context) error {
	known := false
	term := d.reset() // forget the state of an earlier term
	defer d.reset()
	for {
		if !known || d.Lost() { // an operator who removes the damaged file confirms that nothing is published
			err := d.onFiles(ctx, func() error { return errors.Join(d.readPublished(term), d.readNumbers()) })
			if errors.Is(err, dra.ErrOtherName) {
				return err
			}
			if known = err == nil; !known && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Cannot read which GPUs are in slices")
			}
		}
		snapshot, snapshotChanged := d.o.Snapshots.Latest()
		owners, ownersChanged := d.o.Owners.Latest()
		c, configChanged := d.o.Configs.Latest()
		divisions, divisionsChanged := d.o.Divisions.Latest()
		_, retractionsChanged := d.retractions.Latest()
		complete := known
		if known {
			var pool dra.Pool
			if pool, complete = d.pool(ctx, snapshot, owners, divisions, c.DRA); !pool.Equal(d.pools.Value()) {
				d.pools.Publish(pool)
			}
			complete = d.writeChanges(ctx, snapshot) == nil && complete
		}
		var again <-chan time.Time
		if !complete || d.Lost() {
			again = d.o.Clock.After(retryInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-snapshotChanged:
		case <-ownersChanged:
		case <-configChanged:
		case <-divisionsChanged:
		case <-retractionsChanged:
		case <-again:
		}
	}
}

// writeChanges writes which GPUs have left their slices. A driverless process without its
// file assumes that all GPUs may be in slices.
func (d *Devices) writeChanges(ctx context.Context, s inventory.Snapshot) error {
	if d.o.Driverless() {
		all := d.withoutRetracted()
		if d.Lost() && s.Generation > 0 {
			all = map[string]bool{}
			for _, g := range s.GPUs {
				all[g.UUID] = true
			}
		}
		if all != nil {
			return d.SetPublished(ctx, all)
		}
	}
	if d.isOutdated() {
		return d.onFiles(ctx, d.writeLeftSlice)
	}
	return nil
}

// pool returns the devices to publish. It reports false if GPUs are missing because their
// numbers could not be written.
func (d *Devices) pool(
	ctx context.Context, s inventory.Snapshot, owners dra.Owners, divisions dra.Divisions, c config.DRA,
) (dra.Pool, bool) {
	if owners == nil || s.Generation == 0 || s.Stale != "" && s.Driver == (inventory.Driver{}) {
		return d.pools.Value(), true // before the first scan the GPUs are unknown
	}
	inSlice, leaves := false, false
	for _, g := range s.GPUs {
		inSlice = inSlice || owners[g.UUID].InSlice()
		leaves = leaves || owners[g.UUID] == dra.LeavesPlugin
	}
	// The first slice contains the first GPU: an empty slice would be an additional write
	// for each starting node.
	if !inSlice && (leaves || c.Mode == config.DRAOff) {
		return dra.Pool{Name: d.o.Node, Driver: d.o.Driver}, true
	}
	if divisions == nil {
		return d.pools.Value(), true
	}
	err := d.assignNumbers(ctx, s.GPUs)
	numbers := d.Numbers()
	if err != nil {
		owners = maps.Clone(owners)
		maps.DeleteFunc(owners, func(uuid string, _ dra.Ownership) bool {
			_, has := numbers[uuid]
			return !has
		})
	}
	d.steady = dra.Steady(s, d.steady, divisions)
	pool := dra.New(d.steady, d.o.Node, numbers, owners, divisions).SharedBy(c.ShareBy, c.Shares)
	pool.Driver = d.o.Driver
	if problem := fmt.Sprint(err); problem != d.problem {
		d.problem = problem
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "New GPUs are not published")
		}
	}
	return pool, err == nil
}

// reset makes the published state unknown, because another process may lead now. It
// returns the number of the next term.
func (d *Devices) reset() (term int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.term++
	d.pools.Publish(dra.Pool{})
	d.publication.Publish(Publication{})
	d.publishedUnknown.Store(false)
	clear(d.retracted)
	if d.o.StateDir != "" { // without a state directory no other process can know
		d.published.Publish(nil)
	}
	return d.term
}

// inTerm calls update if the term has not ended: a hanging disk may respond later.
func (d *Devices) inTerm(term int, update func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.term == term {
		update()
	}
}

// assignNumbers gives a number to each GPU without a number. The numbers are on disk
// before their first use, so that a published name stays with its GPU.
func (d *Devices) assignNumbers(ctx context.Context, gpus []inventory.GPU) error {
	now := d.Numbers()
	next := now.With(gpus)
	if maps.Equal(next, now) {
		return nil
	}
	if d.o.StateDir != "" {
		err := d.onFiles(ctx, func() error {
			return statefile.WriteStateIf(filepath.Join(d.o.StateDir, numbersFile), numbersState{fileVersion, next},
				d.o.Lead)
		})
		if err != nil {
			return fmt.Errorf("write the numbers of GPUs: %w", err)
		}
	}
	d.setNumbers(next)
	return nil
}

// numbersState is the file with the numbers of GPUs.
type numbersState struct {
	Version int         `json:"version"`
	Numbers dra.Numbers `json:"numbers"`
}

// readNumbers reads the numbers from disk. Without a file the known numbers are kept.
func (d *Devices) readNumbers() error {
	if d.o.StateDir == "" {
		return nil
	}
	var state numbersState
	found, err := statefile.ReadState(filepath.Join(d.o.StateDir, numbersFile), maxFile, fileVersion, &state)
	if err != nil {
		return fmt.Errorf("read the numbers of GPUs, which are kept as %s: %w", numbersFile+statefile.Damaged, err)
	}
	if found && state.Numbers != nil {
		d.setNumbers(state.Numbers)
	}
	return nil
}

// KnownNumbers returns the GPU numbers in a state directory; none if there is no file. It
// writes nothing.
func KnownNumbers(stateDir string) (dra.Numbers, error) {
	text, err := statefile.Read(filepath.Join(stateDir, numbersFile), maxFile)
	if statefile.IsAbsent(err) {
		return dra.Numbers{}, nil
	}
	var state numbersState
	if err == nil {
		err = json.Unmarshal(text, &state)
	}
	if err != nil {
		return nil, fmt.Errorf("read the numbers of GPUs: %w", err)
	}
	return state.Numbers, nil
}
