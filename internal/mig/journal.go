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
	// maxJournal is the largest journal that is read, in bytes. One GPU takes a few thousand.
	maxJournal = 1 << 20
	// diskTimeout is how long a disk may take. GPUs are not kept from pods any longer because it
	// hangs.
	diskTimeout = 5 * time.Second
)

var (
	// errUnread is why nothing can be noted before the journal was read.
	errUnread = errors.New("the journal is not read yet")
	// errFormer is wrapped by the error while another process may still note something.
	errFormer = errors.New("another process of this program divides the GPUs")
)

// A journal is what must outlive the process: what is being changed of which GPU, and which
// instances this program made. The driver has neither. The process that leads writes it.
type journal struct {
	dir, boot string
	disk      *statefile.Disk
	news      *feed.Feed[int] // counts the changes of what was read, and of the problem; 0 as long as nothing is known

	mu      sync.Mutex               // guards all following fields
	problem error                    // why this process cannot write
	gpus    map[string]journalRecord // by UUID
}

func newJournal(dir, boot string) *journal {
	return &journal{dir: dir, boot: boot, disk: statefile.NewDisk(), news: feed.New(0), problem: errUnread}
}

// A journalForm is the form of the file.
type journalForm struct {
	Version int                      `json:"version"`
	GPUs    map[string]journalRecord `json:"gpus"`
}

// A journalRecord is what is noted of a GPU. It is immutable.
type journalRecord struct {
	// Boot is the node's boot ID when this was noted; empty if it was not known.
	Boot string `json:"boot,omitempty"`
	// Enabled says that this program made instances or switched the mode on, and Made has the
	// instances.
	Enabled bool       `json:"enabled,omitempty"`
	Made    []instance `json:"made,omitempty"`
	// Change is what is being changed; nil if nothing is.
	Change *change `json:"change,omitempty"`
	// lost says that the node was restarted since: instances are gone, and on some models the mode.
	lost bool
}

// A change is how a GPU was before, and all that is created until the change has ended. The
// hardware shows which part of it has happened.
type change struct {
	Layout  string     `json:"layout,omitempty"`
	Enabled bool       `json:"enabled"` // before
	Before  []instance `json:"before,omitempty"`
	Creates []instance `json:"creates,omitempty"`
}

// An instance is a GPU instance, by its place.
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
	noted := instance{Profile: i.Profile, Start: i.Start, Size: i.Size}
	for _, c := range i.Computes {
		noted.Computes = append(noted.Computes, compute{c.Start, c.Slices})
	}
	return noted
}

// is says whether an instance of the GPU is the noted one, of which not all compute instances need
// exist. Where these are in it is the driver's to decide.
func (i instance) is(found inventory.GPUInstance) bool {
	if i.Profile != found.Profile || i.Start != found.Start || i.Size != found.Size {
		return false
	}
	noted := map[int]int{} // how many, by their size
	for _, c := range i.Computes {
		noted[c.Slices]++
	}
	for _, c := range found.Computes {
		if noted[c.Slices]--; noted[c.Slices] < 0 {
			return false
		}
	}
	return true
}

// inventoried returns noted instances as the inventory has them.
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

// made says whether this program made an instance.
func (r journalRecord) made(found inventory.GPUInstance) bool {
	same := func(i instance) bool { return i.is(found) }
	return !r.lost && (slices.ContainsFunc(r.Made, same) || r.Change != nil && slices.ContainsFunc(r.Change.Creates, same))
}

// mode returns a mode by whether it is on.
func mode(enabled bool) inventory.MIGMode {
	if enabled {
		return inventory.MIGEnabled
	}
	return inventory.MIGDisabled
}

// load reads the journal until that succeeds and no former process may write it any more; begins is
// called before anything can be noted.
func (j *journal) load(ctx context.Context, o Options) {
	for {
		former := o.Former() // what it notes from now on may not be read
		read, err := statefile.Within(ctx, j.disk, diskTimeout, func() (map[string]journalRecord, error) {
			if j.dir == "" {
				return nil, errors.New("there is no state directory for the journal of MIG layouts")
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
		case former != nil:
			pause, err = later, fmt.Errorf("%w: %w", errFormer, former)
		default:
			o.Begins(ctx)
		}
		j.take(ctx, read, err)
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

// take keeps what was read, and the error if this process cannot write.
func (j *journal) take(ctx context.Context, read map[string]journalRecord, problem error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if problem != nil && fmt.Sprint(problem) != fmt.Sprint(j.problem) && !errors.Is(problem, errFormer) {
		klog.FromContext(ctx).Error(problem, "Cannot change MIG layouts as long as the journal cannot be written", "dir",
			j.dir)
	}
	if n := j.news.Value(); n == 0 || fmt.Sprint(problem) != fmt.Sprint(j.problem) || !reflect.DeepEqual(read, j.gpus) {
		defer j.news.Publish(n + 1)
	}
	j.gpus, j.problem = read, problem
}

// read reads the file.
func (j *journal) read(ctx context.Context) map[string]journalRecord {
	p, gpus := journalForm{}, map[string]journalRecord{}
	if _, err := statefile.ReadState(filepath.Join(j.dir, journalFile), maxJournal, journalVersion, &p); err != nil {
		klog.FromContext(ctx).Error(err, "The MIG journal cannot be read: no instance counts as made by this program", "dir",
			j.dir)
		return gpus
	}
	for uuid, r := range p.GPUs {
		if j.boot != "" && r.Boot != "" && j.boot != r.Boot {
			r.Change, r.lost = nil, true
		}
		gpus[uuid] = r
	}
	return gpus
}

// writable returns why this process cannot note anything; nil if it can.
func (j *journal) writable() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.problem
}

// record returns what is noted of a GPU.
func (j *journal) record(uuid string) journalRecord {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.gpus[uuid]
}

// begin notes a change before its first step. If an earlier process began it, the note of how the
// GPU was before stays.
func (j *journal) begin(ctx context.Context, c layout.GPUChange, name string) error {
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
	if r.lost {
		r = journalRecord{}
	}
	r.Boot, r.Change = j.boot, &next
	return j.write(ctx, c.GPU.UUID, r)
}

// end notes that nothing is being changed of a GPU, and which of its instances this program made.
func (j *journal) end(ctx context.Context, found layout.GPU) error {
	if found.Unread != "" {
		return nil
	}
	before := j.record(found.UUID)
	r := journalRecord{Boot: j.boot}
	for _, i := range found.Instances {
		if before.made(i) {
			r.Made = append(r.Made, instanceOf(i))
		}
	}
	switched := before.Enabled || before.Change != nil && !before.Change.Enabled || len(r.Made) > 0
	r.Enabled = found.Mode == inventory.MIGEnabled && switched
	if !r.Enabled {
		r = journalRecord{}
	}
	if reflect.DeepEqual(r, before) {
		return nil
	}
	return j.write(ctx, found.UUID, r)
}

// write replaces what is noted of a GPU, and returns once it is on the disk.
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
		if err := statefile.WriteState(filepath.Join(j.dir, journalFile), journalForm{journalVersion, gpus}); err != nil {
			return err
		}
		j.mu.Lock()
		defer j.mu.Unlock()
		j.gpus = gpus
		return nil
	})
}
