package mig

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

const (
	journalFile    = "mig.json"
	journalVersion = 1
	// maxJournal is the size limit of the journal, in bytes. One GPU takes a few thousand.
	maxJournal = 1 << 20
	// diskTimeout limits one disk operation: a hanging disk must not keep GPUs from pods.
	diskTimeout = 5 * time.Second
)

var (
	// errNotRead prevents writes before the journal has been read.
	errNotRead = errors.New("the journal has not been read yet")
	// errPreviousLeader prevents writes while another process may still write the journal.
	errPreviousLeader = errors.New("another process of this program divides the GPUs")
)

// A journal is the state to keep across restarts: the change in progress of each GPU, and
// the instances created by this program. The driver stores neither. Only the leader writes
// the journal.
type journal struct {
	dir, boot string
	disk      *statefile.Disk
	changes   *feed.Feed[int] // counts changes of gpus and problem; 0 before the first

	mu      sync.Mutex               // guards all following fields
	problem error                    // why this process cannot write
	gpus    map[string]journalRecord // by UUID
}

func newJournal(dir, boot string) *journal {
	return &journal{dir: dir, boot: boot, disk: statefile.NewDisk(), changes: feed.New(0), problem: errNotRead}
}

// A journalForm is the file format.
type journalForm struct {
	Version int                      `json:"version"`
	GPUs    map[string]journalRecord `json:"gpus"`
}

// A journalRecord is the state of one GPU. It is immutable.
type journalRecord struct {
	// Boot is the node's boot ID at the time of writing; empty if unknown.
	Boot string `json:"boot,omitempty"`
	// Enabled says that this program created instances or enabled the MIG mode. Created are
	// the instances.
	Enabled bool       `json:"enabled,omitempty"`
	Created []instance `json:"made,omitempty"`
	// Change is the change in progress; nil if there is none.
	Change *change `json:"change,omitempty"`
	// restarted says that the node restarted after the record was written: instances are gone, and on
	// some models the mode.
	restarted bool
}

// A change has the division of a GPU before the change, and everything that the change creates. The
// hardware shows how far the change is.
type change struct {
	Layout  string     `json:"layout,omitempty"`
	Enabled bool       `json:"enabled"` // before the change
	Before  []instance `json:"before,omitempty"`
	Creates []instance `json:"creates,omitempty"`
}

// An instance is a GPU instance, identified by its place.
type instance struct {
	Profile  string    `json:"profile"`
	Start    int       `json:"start"`
	Size     int       `json:"size"`
	Computes []compute `json:"computes,omitempty"`
}

type compute struct {
	Start  int `json:"start"`
	Slices int `json:"slices"`
}

func instanceOf(i inventory.GPUInstance) instance {
	result := instance{Profile: i.Profile, Start: i.Start, Size: i.Size}
	for _, c := range i.Computes {
		result.Computes = append(result.Computes, compute{c.Start, c.Slices})
	}
	return result
}

// matches reports whether found is the instance i. Compute instances may be missing in
// found, and the driver chooses their places.
func (i instance) matches(found inventory.GPUInstance) bool {
	if i.Profile != found.Profile || i.Start != found.Start || i.Size != found.Size {
		return false
	}
	expected := map[int]int{} // number of compute instances by size
	for _, c := range i.Computes {
		expected[c.Slices]++
	}
	for _, c := range found.Computes {
		if expected[c.Slices]--; expected[c.Slices] < 0 {
			return false
		}
	}
	return true
}

// inventoried converts instances to the types of the inventory.
func inventoried(noted []instance) []inventory.GPUInstance {
	all := make([]inventory.GPUInstance, len(noted))
	for n, i := range noted {
		all[n] = inventory.GPUInstance{Profile: i.Profile, Start: i.Start, Size: i.Size}
		for _, c := range i.Computes {
			all[n].Computes = append(all[n].Computes, inventory.ComputeInstance{Start: c.Start, Slices: c.Slices})
		}
	}
	return all
}

// created reports whether this program created an instance.
func (r journalRecord) created(found inventory.GPUInstance) bool {
	same := func(i instance) bool { return i.matches(found) }
	return !r.restarted && (slices.ContainsFunc(r.Created, same) ||
		r.Change != nil && slices.ContainsFunc(r.Change.Creates, same))
}

// mode returns the MIG mode.
func mode(enabled bool) inventory.MIGMode {
	if enabled {
		return inventory.MIGEnabled
	}
	return inventory.MIGDisabled
}

// load reads the journal until a read succeeds and no previous leader may write the journal.
// It calls TakeOver before the first write.
func (j *journal) load(ctx context.Context, o Options) {
	for {
		previous := o.PreviousLeader() // before reading: the previous leader may write until it has ended
		read, err := statefile.Within(ctx, j.disk, diskTimeout, func() (map[string]journalRecord, error) {
			if j.dir == "" {
				return nil, errors.New("no state directory for the journal of MIG layouts")
			}
			if err := os.MkdirAll(j.dir, 0o700); err != nil {
				return nil, err
			}
			return j.read(ctx), nil
		})
		pause := retryFirst
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
		case previous != nil:
			pause, err = slowPoll, fmt.Errorf("%w: %w", errPreviousLeader, previous)
		default:
			o.TakeOver(ctx)
		}
		j.store(ctx, read, err)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// store keeps the records just read, and the error if this process cannot write.
func (j *journal) store(ctx context.Context, read map[string]journalRecord, problem error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if problem != nil && fmt.Sprint(problem) != fmt.Sprint(j.problem) && !errors.Is(problem, errPreviousLeader) {
		klog.FromContext(ctx).Error(problem, "Cannot change MIG layouts as long as the journal cannot be written",
			"dir", j.dir)
	}
	if n := j.changes.Value(); n == 0 || fmt.Sprint(problem) != fmt.Sprint(j.problem) ||
		!reflect.DeepEqual(read, j.gpus) {
		defer j.changes.Publish(n + 1)
	}
	j.gpus, j.problem = read, problem
}

// read returns the records in the file; none if the file is damaged.
func (j *journal) read(ctx context.Context) map[string]journalRecord {
	p, gpus := journalForm{}, map[string]journalRecord{}
	if _, err := statefile.ReadState(filepath.Join(j.dir, journalFile), maxJournal, journalVersion, &p); err != nil {
		klog.FromContext(ctx).Error(err, "The MIG journal cannot be read: no instance counts as made by this program",
			"dir", j.dir)
		return gpus
	}
	for uuid, r := range p.GPUs {
		if j.boot != "" && r.Boot != "" && j.boot != r.Boot {
			r.Change, r.restarted = nil, true
		}
		gpus[uuid] = r
	}
	return gpus
}

// writable returns why this process cannot write; nil if it can.
func (j *journal) writable() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.problem
}

// record returns the record of a GPU.
func (j *journal) record(uuid string) journalRecord {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.gpus[uuid]
}

// beginChange records a change before its first step. If an earlier process started the
// change, the recorded division before it stays.
func (j *journal) beginChange(ctx context.Context, c layout.GPUChange, name string) error {
	r := j.record(c.GPU.UUID)
	next := change{Layout: name, Enabled: c.Before.Mode == inventory.MIGEnabled}
	if r.Change != nil {
		next.Enabled, next.Before, next.Creates = r.Change.Enabled, r.Change.Before, slices.Clone(r.Change.Creates)
	} else {
		for _, p := range c.Before.Instances {
			next.Before = append(next.Before, instanceOf(p.GPUInstance))
		}
	}
	for _, s := range c.Steps {
		if s.Action == inventory.MIGCreateInstance {
			next.Creates = append(next.Creates, instanceOf(s.Part.GPUInstance))
		}
	}
	if r.restarted {
		r = journalRecord{}
	}
	r.Boot, r.Change = j.boot, &next
	return j.write(ctx, c.GPU.UUID, r)
}

// endChange records the end of a change, and the instances of the GPU created by this
// program.
func (j *journal) endChange(ctx context.Context, found layout.GPU) error {
	if found.Unread != "" {
		return nil
	}
	before := j.record(found.UUID)
	r := journalRecord{Boot: j.boot}
	for _, i := range found.Instances {
		if before.created(i) {
			r.Created = append(r.Created, instanceOf(i))
		}
	}
	switchedOn := before.Enabled || before.Change != nil && !before.Change.Enabled || len(r.Created) > 0
	r.Enabled = found.Mode == inventory.MIGEnabled && switchedOn
	if !r.Enabled {
		r = journalRecord{}
	}
	if reflect.DeepEqual(r, before) {
		return nil
	}
	return j.write(ctx, found.UUID, r)
}

// write replaces the record of a GPU, and returns when it is on disk.
func (j *journal) write(ctx context.Context, uuid string, r journalRecord) error {
	if err := j.writable(); err != nil {
		return err
	}
	return j.disk.Do(context.WithoutCancel(ctx), diskTimeout, func() error {
		j.mu.Lock()
		gpus := maps.Clone(j.gpus)
		j.mu.Unlock()
		gpus[uuid] = r
		if !r.Enabled && r.Change == nil {
			delete(gpus, uuid)
		}
		if err := statefile.WriteState(filepath.Join(j.dir, journalFile),
			journalForm{journalVersion, gpus}); err != nil {
			return err
		}
		j.mu.Lock()
		defer j.mu.Unlock()
		j.gpus = gpus
		return nil
	})
}
