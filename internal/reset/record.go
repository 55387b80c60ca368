package reset

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

// File is the name of the file in the state directory that says that GPUs are being reset.
const File = "reset.json"

const (
	fileVersion = 1
	maxFile     = 1 << 20
	// diskPatience is how long it is waited for the disk.
	diskPatience = 2 * time.Second
)

// A record says that GPUs are being reset.
type record struct {
	Version int       `json:"version"`
	GPUs    []string  `json:"gpus"`
	Since   time.Time `json:"since"`
	// Phase is waiting or resetting.
	Phase Phase `json:"phase"`
	// Boot is the boot ID of the node then.
	Boot string `json:"boot,omitempty"`
}

func (r *Resets) path() string { return filepath.Join(r.options.StateDir, File) }

// note writes down how far a reset is. What cannot be noted in time is taken back.
func (a *attempt) note(ctx context.Context, p Phase) error {
	now := &record{Version: fileVersion, GPUs: a.status.GPUs, Since: a.status.Since, Phase: p, Boot: a.options.BootID}
	if err := a.keep(ctx, now); err != nil {
		_ = a.forget(context.WithoutCancel(ctx)) // a disk that does not answer removes it later
		return fmt.Errorf("no GPU is reset, as that cannot be noted: %w", err)
	}
	return nil
}

// forget removes the note.
func (r *Resets) forget(ctx context.Context) error { return r.keep(ctx, nil) }

// keep has the file say what is wanted; nil is for no file. The error is files.ErrHangs when the disk does not answer, which later does what
// is wanted then.
func (r *Resets) keep(ctx context.Context, wanted *record) error {
	if r.options.StateDir == "" {
		return nil
	}
	r.noted.Store(wanted)
	return r.disk.Do(ctx, diskPatience, r.settle)
}

// settle writes and removes the file until it says what is wanted.
func (r *Resets) settle() (err error) {
	for {
		wanted := r.noted.Load()
		if wanted == nil {
			err = files.Remove(r.path())
		} else {
			err = r.options.Write(r.path(), wanted)
		}
		if r.noted.Load() == wanted {
			return err
		}
	}
}

// Run shows a reset that an earlier process began and did not end, and ends it: the GPUs are judged by their readings. It returns nil when
// ctx ends. It is for the process that leads.
func (r *Resets) Run(ctx context.Context) error {
	if err := r.takeOver(ctx); err != nil {
		klog.FromContext(ctx).Info("Cannot read whether an earlier process was resetting GPUs", "reason", err.Error())
	}
	<-ctx.Done()
	return nil
}

func (r *Resets) takeOver(ctx context.Context) error {
	if r.options.StateDir == "" || !r.busy.TryLock() { // this process resets GPUs itself
		return nil
	}
	defer r.busy.Unlock()
	left, err := files.Within(ctx, r.disk, diskPatience, func() (left *record, err error) {
		var found record
		if is, err := files.ReadState(r.path(), maxFile, fileVersion, &found); !is {
			return nil, err
		}
		return &found, nil
	})
	if left == nil {
		return err
	}
	if left.Boot == "" || r.options.BootID == "" || left.Boot == r.options.BootID {
		why := "the daemon ended before the GPUs were reset"
		if left.Phase == PhaseResetting {
			why = "the daemon ended during the reset: it is not known whether the GPUs were reset, and they are judged by their readings"
		}
		klog.FromContext(ctx).Info("A reset of GPUs was interrupted", "gpus", left.GPUs, "since", left.Since)
		r.status.Publish(Status{GPUs: left.GPUs, Phase: PhaseInterrupted, Since: left.Since, Reason: why})
	}
	return r.forget(ctx)
}
