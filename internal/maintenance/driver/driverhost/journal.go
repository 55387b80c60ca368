package driverhost

import (
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

const (
	journalVersion = 1
	// maxLoads is how often the node may load a driver that is not confirmed.
	maxLoads = 2
)

// A journal is what must outlive the process and the boot.
type journal struct {
	Version int `json:"version"`
	// Loaded is the folder whose modules may be loaded. It is written before the first module is
	// loaded, and after the last module of another folder is unloaded.
	Loaded loaded `json:"loaded"`
	// Services are the services that were stopped, or are about to be. They are started again.
	Services []string `json:"services,omitempty"`
	Change   *change  `json:"change,omitempty"`
}

type loaded struct {
	Digest string `json:"digest,omitempty"`
	BootID string `json:"bootID,omitempty"`
}

// A change is the part of driverapi.Change that must outlive the process.
type change struct {
	From       string         `json:"from,omitempty"`
	To         string         `json:"to"`
	Step       driverapi.Step `json:"step"`
	Since      time.Time      `json:"since"`
	BootID     string         `json:"bootID"` // of the boot in which the step began
	AtNextBoot bool           `json:"atNextBoot,omitempty"`
	Reason     string         `json:"reason,omitempty"` // why the change is taken back, or has failed
	Loads      int            `json:"loads,omitempty"`
	Note       string         `json:"note,omitempty"` // of the caller
}

func (h *Host) path() string { return filepath.Join(h.o.Directory, driverapi.Journal) }

// write changes the journal. When it returns nil, the new journal is on the disk. After an error, the
// journal in memory is unchanged, and the file may have either.
func (h *Host) write(edit func(*journal)) error {
	next := h.journal
	next.Services = slices.Clone(next.Services)
	if next.Change != nil {
		c := *next.Change
		next.Change = &c
	}
	edit(&next)
	next.Version = journalVersion
	h.o.Step("before the journal")
	if err := statefile.WriteState(h.path(), next); err != nil {
		return err
	}
	if err := driverfolder.Sync(h.o.Directory); err != nil {
		return err
	}
	h.mu.Lock()
	h.journal = next
	h.mu.Unlock()
	h.o.Step("after the journal")
	return nil
}

// enter begins a step. edit changes the rest of the journal; it may be nil.
func (h *Host) enter(step driverapi.Step, edit func(*journal)) error {
	err := h.write(func(j *journal) {
		j.Change.Step, j.Change.Since, j.Change.BootID = step, time.Now().UTC().Truncate(time.Second), h.boot
		if edit != nil {
			edit(j)
		}
	})
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.percent, h.reason, h.holders = 0, "", nil
	klog.Background().Info("The driver's change has a new step", "step", step, "from", h.Change.From, "to", h.Change.To,
		"reason", h.Change.Reason)
	return nil
}

// fail records that the change failed. The loaded driver stays loaded.
func (h *Host) fail(reason string) error {
	return h.enter(driverapi.StepFailed, func(j *journal) { j.Change.Reason = reason })
}
