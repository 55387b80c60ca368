package mig

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/layout"
)

const (
	journalFile    = "mig.json"
	lockFile       = "mig.lock"
	journalVersion = 1
	// maxJournal is the largest journal that is read, in bytes. One GPU takes a few thousand.
	maxJournal = 1 << 20
)

// A journal is what must outlive the process: what is being changed of which GPU, and which instances this program made. The driver has
// neither. The process that has the lock writes it.
type journal struct {
	dir, boot string

	mu     sync.Mutex        // guards all following fields
	unlock func()            // nil while another process has the lock
	gpus   map[string]record // by UUID
}

// A page is the file's form.
type page struct {
	Version int               `json:"version"`
	GPUs    map[string]record `json:"gpus"`
}

// A record is what is noted of a GPU. It is immutable.
type record struct {
	// Boot is the node's boot ID when this was noted; empty if it was not known.
	Boot string `json:"boot,omitempty"`
	// Enabled says that this program made instances or switched the mode on, and Made has the instances.
	Enabled bool       `json:"enabled,omitempty"`
	Made    []instance `json:"made,omitempty"`
	// Change is what is being changed; nil if nothing is.
	Change *change `json:"change,omitempty"`
	// lost says that the node was restarted since: instances are gone, and on some models the mode.
	lost bool
}

// A change is how a GPU was before, and all that is created until the change has ended: what of it has happened is told by the hardware.
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

// is says whether an instance of the GPU is the noted one, of which not all compute instances need exist.
func (i instance) is(found inventory.GPUInstance) bool {
	return i.Profile == found.Profile && i.Start == found.Start && i.Size == found.Size &&
		!slices.ContainsFunc(found.Computes, func(c inventory.ComputeInstance) bool {
			return !slices.Contains(i.Computes, compute{c.Start, c.Slices})
		})
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
func (r record) made(found inventory.GPUInstance) bool {
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

// open takes the lock, if no other process has it, and reads what the last process noted.
func (j *journal) open(ctx context.Context) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case j.unlock != nil:
		return nil
	case j.dir == "":
		return errors.New("there is no state directory for the journal of MIG layouts")
	}
	unlock, err := files.Lock(filepath.Join(j.dir, lockFile))
	if err == nil {
		j.unlock = unlock
	}
	j.readLocked(ctx)
	return err
}

// readLocked reads the file.
func (j *journal) readLocked(ctx context.Context) {
	p := page{}
	j.gpus = map[string]record{}
	if _, err := files.ReadState(filepath.Join(j.dir, journalFile), maxJournal, journalVersion, &p); err != nil {
		klog.FromContext(ctx).Error(err, "The MIG journal cannot be read: no instance counts as made by this program", "dir", j.dir)
		return
	}
	for uuid, r := range p.GPUs {
		if j.boot != "" && r.Boot != "" && j.boot != r.Boot {
			r.Change, r.lost = nil, true
		}
		j.gpus[uuid] = r
	}
}

// close gives the lock back.
func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.unlock != nil {
		j.unlock()
		j.unlock = nil
	}
}

// record returns what is noted of a GPU.
func (j *journal) record(uuid string) record {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.gpus[uuid]
}

// begin notes a change before its first step. Of a change that an earlier process began, how the GPU was before stays noted.
func (j *journal) begin(c layout.GPUChange, name string) error {
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
		r = record{}
	}
	r.Boot, r.Change = j.boot, &next
	return j.write(c.GPU.UUID, r)
}

// end notes that nothing is being changed of a GPU, and which of its instances this program made.
func (j *journal) end(found layout.GPU) error {
	if found.Unread != "" {
		return nil
	}
	before := j.record(found.UUID)
	r := record{Boot: j.boot}
	for _, i := range found.Instances {
		if before.made(i) {
			r.Made = append(r.Made, instanceOf(i))
		}
	}
	switched := before.Enabled || before.Change != nil && !before.Change.Enabled || len(r.Made) > 0
	r.Enabled = found.Mode == inventory.MIGEnabled && switched
	if !r.Enabled {
		r = record{}
	}
	if reflect.DeepEqual(r, before) {
		return nil
	}
	return j.write(found.UUID, r)
}

// write replaces what is noted of a GPU, and returns once it is on the disk.
func (j *journal) write(uuid string, r record) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.unlock == nil {
		return errors.New("another process of this program writes the journal")
	}
	gpus := maps.Clone(j.gpus)
	gpus[uuid] = r
	if !r.Enabled && r.Change == nil {
		delete(gpus, uuid)
	}
	if err := files.WriteState(filepath.Join(j.dir, journalFile), page{journalVersion, gpus}); err != nil {
		return err
	}
	j.gpus = gpus
	return nil
}
