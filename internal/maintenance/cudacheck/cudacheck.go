// Package cudacheck verifies that CUDA works on the devices of the node. Once per boot, driver
// version and reset, each idle device runs a computation, and the verdict is kept on disk. Devices
// are held until CUDA is proven.
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
	// diskPatience limits the wait for the disk.
	diskPatience = 2 * time.Second
)

// Options configure Proofs.
type Options struct {
	Configs   *feed.Feed[config.Config]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Prove runs a computation on a device, by UUID.
	Prove func(ctx context.Context, uuid string) cuda.Proof
	// Reserve keeps the whole GPU of a device from new users until release is called. The error says
	// who uses the device, or why the users are not known.
	Reserve func(ctx context.Context, d Device) (release func(), err error)
	// Report reports why CUDA does not work on a device to the health of the device; nil means that
	// CUDA works. It fails if ctx ends.
	Report func(ctx context.Context, uuid string, f *cuda.Failure) error
	// Lead returns why this process does not lead; nil if it leads.
	Lead func() error
	// StateDir is the folder for the verdicts; empty for none. BootID is the boot ID of the node.
	StateDir, BootID string
	// Disk accesses the file; nil means a Disk of Proofs' own.
	Disk *statefile.Disk
}

// Proofs prove that CUDA works. Create Proofs with New. Follow runs always, and Run while this
// process leads.
type Proofs struct {
	options Options
	disk    *statefile.Disk
	records *feed.Feed[Records]
	status  *feed.Feed[Status]
	began   time.Time
	toProve chan string // UUIDs of devices to prove once more
	tries   *tries
	isRead  bool    // whether the file was read; belongs to New, then to Run
	onDisk  Records // the contents of the file as far as known; belongs to Run
}

// Status is the progress of Proofs.
type Status struct {
	// Waiting says why devices are not proven yet, by UUID.
	Waiting map[string]string
	// InUse are the waiting devices that are in use.
	InUse map[string]bool
	// Retry is the time of the next try of a failed device, by UUID.
	Retry map[string]time.Time
	// Done is the time from the start of this process to the first verdicts on all devices; 0 before.
	Done time.Duration
	// Unsaved is why the verdicts on disk are out of date; empty if they are up to date.
	Unsaved string
}

// fileFormat is the format of the file.
type fileFormat struct {
	Version int     `json:"version"`
	Devices Records `json:"devices"`
}

// New returns Proofs with the verdicts of earlier processes, if the configuration wants proofs.
// Unreadable verdicts are proven again.
func New(ctx context.Context, o Options) *Proofs {
	if o.Disk == nil {
		o.Disk = statefile.NewDisk()
	}
	p := &Proofs{
		options: o, disk: o.Disk, records: feed.New(Records(nil)), status: feed.New(Status{}), began: time.Now(),
		toProve: make(chan string, 8), tries: newTries(),
	}
	if o.Configs.Value().Validate {
		p.recall(ctx)
	}
	return p
}

// recall reads the verdicts of earlier processes, once. Verdicts received meanwhile from another
// process have precedence.
func (p *Proofs) recall(ctx context.Context) {
	if p.isRead || p.options.StateDir == "" {
		return
	}
	p.isRead = true
	if p.records.Value() != nil {
		return
	}
	saved, err := statefile.Within(ctx, p.disk, diskPatience, func() (f fileFormat, err error) {
		_, err = statefile.ReadState(p.path(), maxFile, fileVersion, &f)
		return f, err
	})
	if err != nil {
		klog.FromContext(ctx).Info("Starting without the earlier verdicts on CUDA", "dir", p.options.StateDir, "reason",
			err.Error())
		return
	}
	p.onDisk = saved.Devices
	p.records.Publish(p.onDisk)
}

func (p *Proofs) path() string { return filepath.Join(p.options.StateDir, File) }

// Records is the feed of the verdicts.
func (p *Proofs) Records() *feed.Feed[Records] { return p.records }

// Changed returns a channel that is closed when the records change.
func (p *Proofs) Changed() <-chan struct{} {
	_, changed := p.records.Latest()
	return changed
}

// Status is the feed of the progress; empty in a process that does not lead.
func (p *Proofs) Status() *feed.Feed[Status] { return p.status }

// Unproven returns why devices of the Snapshot may not be given to pods, by UUID; nil if the
// configuration wants no proofs.
func (p *Proofs) Unproven(s inventory.Snapshot) map[string]string {
	if !p.options.Configs.Value().Validate {
		return nil
	}
	return p.records.Value().Unproven(s, p.options.BootID)
}

// Again discards the verdict on a device, by UUID: CUDA is proven once more. It does nothing if the
// configuration wants no proofs, or while this process does not lead.
func (p *Proofs) Again(uuid string) {
	if !p.options.Configs.Value().Validate || p.options.Lead() != nil {
		return
	}
	select {
	case p.toProve <- uuid:
	default: // the queue already has requests
	}
}

// Follow reports the verdicts to the health of the devices until ctx ends.
func (p *Proofs) Follow(ctx context.Context) error {
	told := map[string]bool{}
	for {
		records, recordsChanged := p.records.Latest()
		s, snapshotChanged := p.options.Snapshots.Latest()
		c, configChanged := p.options.Configs.Latest()
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
			if p.options.Report(ctx, d.UUID, failure) != nil {
				return nil
			}
			told[d.UUID] = bad
		}
		if !feed.WaitAny(ctx, recordsChanged, snapshotChanged, configChanged) {
			return nil
		}
	}
}
