// Package cudacheck is the owner of what is proven of CUDA on the devices of the node: once per
// boot, version of the driver and reset it has each device compute that nobody uses, and keeps the
// verdict on disk. Devices are held until CUDA is proven on them.
package cudacheck

import (
	"context"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// File is the name of the file with the verdicts in the state directory.
const File = "proofs.json"

const (
	fileVersion = 1
	maxFile     = 4 << 20
	// diskPatience is how long it is waited for the disk.
	diskPatience = 2 * time.Second
)

// Options are what Proofs are made of.
type Options struct {
	Configs   *feed.Feed[config.Config]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Prove has a device compute, by UUID.
	Prove func(ctx context.Context, uuid string) cuda.Proof
	// Reserve keeps a device, and all else of its GPU, from those who would use it until release is
	// called. The error says who uses it, or why that is not known.
	Reserve func(ctx context.Context, d Device) (release func(), err error)
	// Tell has the health of a device say why CUDA does not work on it; nothing with nil. The error
	// says that ctx ended.
	Tell func(ctx context.Context, uuid string, f *cuda.Failure) error
	// Lead returns why this process does not lead; nil if it does.
	Lead func() error
	// StateDir is where verdicts are kept; empty for nowhere. BootID is the boot ID of the node.
	StateDir, BootID string
	// Disk does the work on the file; nil is one of its own.
	Disk *statefile.Disk
}

// Proofs prove that CUDA works. New builds it; Follow runs always, and Run while this process
// leads.
type Proofs struct {
	options Options
	disk    *statefile.Disk
	records *feed.Feed[Records]
	status  *feed.Feed[Status]
	began   time.Time
	asked   chan string // UUIDs of devices that are to be proven once more
	tries   *tries
	read    bool    // whether the file was read; it belongs to New, and then to Run
	saved   Records // what the file is known to say; it belongs to Run, too
}

// Status is how far the Proofs are.
type Status struct {
	// Waiting says why devices are not proven yet, by UUID.
	Waiting map[string]string
	// InUse are the devices of them that wait for those who use them.
	InUse map[string]bool
	// Retry is when a device is tried again that failed, by UUID.
	Retry map[string]time.Time
	// Done is how long after the start of this process there was a verdict on each device for the
	// first time; 0 before.
	Done time.Duration
	// Unsaved is why the verdicts are not on disk as they are known; empty if they are.
	Unsaved string
}

// form is the form of the file.
type form struct {
	Version int     `json:"version"`
	Devices Records `json:"devices"`
}

// New returns Proofs that know what earlier processes proved, where the configuration wants proofs.
// What cannot be read is proven anew.
func New(ctx context.Context, o Options) *Proofs {
	if o.Disk == nil {
		o.Disk = statefile.NewDisk()
	}
	p := &Proofs{
		options: o, disk: o.Disk, records: feed.New(Records(nil)), status: feed.New(Status{}), began: time.Now(),
		asked: make(chan string, 8), tries: newTries(),
	}
	if o.Configs.Value().Validate {
		p.recall(ctx)
	}
	return p
}

// recall reads what earlier processes proved, once. A process that was told meanwhile knows better.
func (p *Proofs) recall(ctx context.Context) {
	if p.read || p.options.StateDir == "" {
		return
	}
	p.read = true
	if p.records.Value() != nil {
		return
	}
	saved, err := statefile.Within(ctx, p.disk, diskPatience, func() (f form, err error) {
		_, err = statefile.ReadState(p.path(), maxFile, fileVersion, &f)
		return f, err
	})
	if err != nil {
		klog.FromContext(ctx).Info("Beginning without what was proven of CUDA before", "dir", p.options.StateDir, "reason",
			err.Error())
		return
	}
	p.saved = saved.Devices
	p.records.Publish(p.saved)
}

func (p *Proofs) path() string { return filepath.Join(p.options.StateDir, File) }

// Records is the feed of the verdicts.
func (p *Proofs) Records() *feed.Feed[Records] { return p.records }

// Changed returns a channel that is closed when there are other records.
func (p *Proofs) Changed() <-chan struct{} {
	_, changed := p.records.Latest()
	return changed
}

// Status is the feed of how far the Proofs are; it says nothing in a process that does not lead.
func (p *Proofs) Status() *feed.Feed[Status] { return p.status }

// Unproven returns why devices of the Snapshot may not be given to pods, by UUID; nil where CUDA
// need not be proven.
func (p *Proofs) Unproven(s inventory.Snapshot) map[string]string {
	if !p.options.Configs.Value().Validate {
		return nil
	}
	return p.records.Value().Unproven(s, p.options.BootID)
}

// Again forgets the verdict on a device, by UUID, and has it be proven once more. It does nothing
// where CUDA need not be proven, or while this process does not lead.
func (p *Proofs) Again(uuid string) {
	if !p.options.Configs.Value().Validate || p.options.Lead() != nil {
		return
	}
	select {
	case p.asked <- uuid:
	default: // nobody reads what was asked before
	}
}

// Follow has the health of each device say what the verdict on it is, until ctx ends.
func (p *Proofs) Follow(ctx context.Context) error {
	told := map[string]bool{}
	for {
		records, decided := p.records.Latest()
		s, looked := p.options.Snapshots.Latest()
		c, configured := p.options.Configs.Latest()
		for _, d := range Devices(s) {
			v, valid := records.valid(s, p.options.BootID, d)
			bad := c.Validate && valid && v.Failure != nil
			if !bad && !told[d.UUID] {
				continue
			}
			var failure *cuda.Failure
			if bad {
				failure = v.Failure
			}
			if p.options.Tell(ctx, d.UUID, failure) != nil {
				return nil
			}
			told[d.UUID] = bad
		}
		if !feed.WaitAny(ctx, decided, looked, configured) {
			return nil
		}
	}
}
