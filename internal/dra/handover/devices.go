package handover

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

// retryInterval is the pace of tries while the numbers cannot be written, or it cannot be read what
// is published.
const retryInterval = 10 * time.Second

// DevicesOptions are the parts of the daemon that Devices use.
type DevicesOptions struct {
	// StateDir is the state directory; without one, numbers last as long as the process.
	StateDir string
	// Driver is the name of the driver; empty for dra.Driver.
	Driver string
	// Node is the name of the node.
	Node      string
	Snapshots *feed.Feed[inventory.Snapshot]
	Configs   *feed.Feed[config.Config]
	// Owners say who gives out each GPU; nil as long as that is not known. The Arbiter publishes them.
	Owners *feed.Feed[dra.Owners]
	// Divisions are how GPUs in MIG mode are divided for claims; nil as long as that is not known.
	// Without the feed none are.
	Divisions *feed.Feed[dra.Divisions]
	// Driverless is that of the Arbiter's Options.
	Driverless func() bool
	// Lead returns an error if this process does not lead now and so may write nothing. Without the
	// function this process always leads.
	Lead func() error
	// Clock is the clock to wait by; nil means the real one.
	Clock clock.Clock
}

// Devices are those of the node that are to be in slices. On disk they keep the numbers in the
// names of devices, and which GPUs may be in slices; package cluster publishes the slices. Make
// them with NewDevices; Run is called for each time in which this process leads.
type Devices struct {
	o           DevicesOptions
	pools       *feed.Feed[dra.Pool]
	published   *feed.Feed[map[string]bool]
	publication *feed.Feed[Publication]
	problem     string             // why numbers cannot be written, as it was told last
	steady      inventory.Snapshot // without what the MIG mode changes of GPUs whose mode claims switch

	disk *statefile.Disk // for all work on the files
	// the file said of GPUs that they may be in slices when last read or written; of the work on the
	// files
	onDisk bool
	lost   atomic.Bool // it is not known what is published

	mu      sync.Mutex  // guards all following fields, and changes of published
	hung    time.Time   // when the disk did not answer last; zero once it did
	term    int         // of the times in which this process leads
	numbers dra.Numbers // as on disk
	// left are GPUs that are in no slice any more, and that the device plugin has not got since; noted
	// are those of them on disk.
	left, noted map[string]bool
	// retracted are GPUs whose slices the kubelet has removed, and of which the file does not say
	// so yet; retractions changes when there is another one.
	retracted   map[string]bool
	retractions *feed.Feed[struct{}]
}

// A Publication is the part of the pool that is at the API server.
type Publication struct {
	// Slices and Devices are the numbers of slices and devices. Generation is that of the pool.
	Slices, Devices int
	Generation      int64
	// API is the version of resource.k8s.io that the API server serves. NoTaints says that it does not
	// keep the taints of devices, NoCounters that it keeps no counters, without which GPUs are not
	// divided for claims, and NoShares that it knows no devices that several claims can have.
	API                            string
	NoTaints, NoCounters, NoShares bool
	// Problem is why the slices at the API server are not as wanted, a sentence without a full stop;
	// empty if they are.
	Problem string
}

// NewDevices returns the devices of a node, of which nothing is known before Run.
func NewDevices(o DevicesOptions) *Devices {
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
		o: o, pools: feed.New(dra.Pool{}), published: feed.New(map[string]bool(nil)), publication: feed.New(Publication{}),
		disk: statefile.NewDisk(), numbers: dra.Numbers{}, left: map[string]bool{}, retracted: map[string]bool{},
		retractions: feed.New(struct{}{}),
	}
}

// Driverless reports whether no claim can be prepared on this node, because this process does not
// offer the driver to the kubelet. The kubelet removes the slices of the node then.
func (d *Devices) Driverless() bool { return d.o.Driverless() }

// Driver returns the name of the driver.
func (d *Devices) Driver() string { return d.o.Driver }

// Pools returns the feed of what is to be published. A pool without a name is not known yet. A pool
// without slices shall not exist.
func (d *Devices) Pools() *feed.Feed[dra.Pool] { return d.pools }

// Published returns the feed of the GPUs that may be in slices at the API server, by UUID. The
// value is nil if they are not known: then all GPUs may be in slices.
func (d *Devices) Published() *feed.Feed[map[string]bool] { return d.published }

// Publication returns the feed of what the API server has, as the publisher of slices says.
func (d *Devices) Publication() *feed.Feed[Publication] { return d.publication }

// GPU returns the UUID of the GPU that a device of a name is, or is a part of. It knows devices
// that are not in the pool now, too.
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

// Numbers returns the numbers in the names of devices. Nobody may change them.
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

// diskTimeout is how long the disk is waited for.
const diskTimeout = 2 * time.Second

// onFiles does work on the files, one work at a time. Once the disk has not answered, nobody waits
// for it again for a time: what does not need the files goes on.
func (d *Devices) onFiles(ctx context.Context, work func() error) error {
	d.mu.Lock()
	wait := d.hung.IsZero() || d.o.Clock.Since(d.hung) >= retryInterval
	d.mu.Unlock()
	err := statefile.ErrHangs
	if wait {
		err = d.disk.Do(ctx, diskTimeout, work)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.hung = time.Time{}
	}
	if errors.Is(err, statefile.ErrHangs) {
		if wait {
			d.hung = d.o.Clock.Now()
		}
		err = fmt.Errorf("%w; see to the disk of %s", err, d.o.StateDir)
	}
	return err
}

// Run reads the files of an earlier process, and follows the GPUs until ctx ends. Then it returns
// nil, and forgets what it has read. The error wraps dra.ErrOtherName if an earlier lead publishes
// devices under another name of the driver than this process.
func (d *Devices) Run(ctx context.Context) error {
	known := false
	term := d.forget() // what was noted when the last time ended
	defer d.forget()
	for {
		if !known || d.Lost() { // an operator who removes the damaged file says that nothing is published
			err := d.onFiles(ctx, func() error { return errors.Join(d.readPublished(term), d.readNumbers()) })
			if errors.Is(err, dra.ErrOtherName) {
				return err
			}
			if known = err == nil; !known && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Cannot read which GPUs are in slices")
			}
		}
		snapshot, looked := d.o.Snapshots.Latest()
		owners, decided := d.o.Owners.Latest()
		c, configured := d.o.Configs.Latest()
		divisions, divided := d.o.Divisions.Latest()
		_, retracted := d.retractions.Latest()
		complete := known
		if known {
			var pool dra.Pool
			if pool, complete = d.pool(ctx, snapshot, owners, divisions, c.DRA); !pool.Equal(d.pools.Value()) {
				d.pools.Publish(pool)
			}
			complete = d.settle(ctx, snapshot) == nil && complete
		}
		var again <-chan time.Time
		if !complete || d.Lost() {
			again = d.o.Clock.After(retryInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-looked:
		case <-decided:
		case <-configured:
		case <-divided:
		case <-retracted:
		case <-again:
		}
	}
}

// settle writes what the file does not say yet of GPUs that are in no slice any more. A driverless
// process whose file is lost goes on as if all GPUs might be in slices.
func (d *Devices) settle(ctx context.Context, s inventory.Snapshot) error {
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
	if d.owes() {
		return d.onFiles(ctx, d.writeReturned)
	}
	return nil
}

// pool returns the devices to publish. It reports false if GPUs are missing there whose numbers
// could not be written.
func (d *Devices) pool(
	ctx context.Context, s inventory.Snapshot, owners dra.Owners, divisions dra.Divisions, c config.DRA,
) (dra.Pool, bool) {
	if owners == nil || s.Generation == 0 || s.Stale != "" && s.Driver == (inventory.Driver{}) {
		return d.pools.Value(), true // a node that was never looked at is not one without GPUs
	}
	inSlice, leaves := false, false
	for _, g := range s.GPUs {
		inSlice = inSlice || owners[g.UUID].InSlice()
		leaves = leaves || owners[g.UUID] == dra.LeavesPlugin
	}
	// The first slice has the first GPU: an empty one would be a write more for each node that starts.
	if !inSlice && (leaves || c.Mode == config.DRAOff) {
		return dra.Pool{Name: d.o.Node, Driver: d.o.Driver}, true
	}
	if divisions == nil {
		return d.pools.Value(), true
	}
	err := d.number(ctx, s.GPUs)
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

// forget has nothing be known: another process may lead now. It returns the number of the time in
// which this process leads next.
func (d *Devices) forget() (term int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.term++
	d.pools.Publish(dra.Pool{})
	d.publication.Publish(Publication{})
	d.lost.Store(false)
	clear(d.retracted)
	if d.o.StateDir != "" { // otherwise nobody else knows it
		d.published.Publish(nil)
	}
	return d.term
}

// during calls tell if no other time to lead has begun or ended since the one with a number: a disk
// that hangs answers later.
func (d *Devices) during(term int, tell func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.term == term {
		tell()
	}
}

// number gives a number to each GPU that has none. The numbers are on disk before anybody knows of
// them: a name that was published stays with its GPU.
func (d *Devices) number(ctx context.Context, gpus []inventory.GPU) error {
	now := d.Numbers()
	next := now.With(gpus)
	if maps.Equal(next, now) {
		return nil
	}
	if d.o.StateDir != "" {
		err := d.onFiles(ctx, func() error {
			return statefile.WriteStateIf(filepath.Join(d.o.StateDir, numbersFile), numbersState{fileVersion, next}, d.o.Lead)
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

// readNumbers reads the numbers on disk. Without a file those stay that are known.
func (d *Devices) readNumbers() error {
	if d.o.StateDir == "" {
		return nil
	}
	var kept numbersState
	found, err := statefile.ReadState(filepath.Join(d.o.StateDir, numbersFile), maxFile, fileVersion, &kept)
	if err != nil {
		return fmt.Errorf("read the numbers of GPUs, which are kept as %s: %w", numbersFile+statefile.Damaged, err)
	}
	if found && kept.Numbers != nil {
		d.setNumbers(kept.Numbers)
	}
	return nil
}

// KnownNumbers returns the numbers of GPUs in a state directory, without a change of it; none if
// there are none.
func KnownNumbers(stateDir string) (dra.Numbers, error) {
	text, err := statefile.Read(filepath.Join(stateDir, numbersFile), maxFile)
	if statefile.IsAbsent(err) {
		return dra.Numbers{}, nil
	}
	var kept numbersState
	if err == nil {
		err = json.Unmarshal(text, &kept)
	}
	if err != nil {
		return nil, fmt.Errorf("read the numbers of GPUs: %w", err)
	}
	return kept.Numbers, nil
}
