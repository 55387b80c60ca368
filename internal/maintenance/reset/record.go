package reset

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// File is the name of the file, in the state directory, that lists GPUs during a reset.
const File = "reset.json"

const (
	fileVersion = 1
	maxFile     = 1 << 20
	// diskPatience limits the wait for the disk.
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

// note writes the progress of a reset. A note that is not written in time is withdrawn.
func (a *attempt) note(ctx context.Context, p Phase) error {
	now := &record{Version: fileVersion, GPUs: a.status.GPUs, Since: a.status.Since, Phase: p, Boot: a.options.BootID}
	if err := a.setRecord(ctx, now); err != nil {
		_ = a.forget(context.WithoutCancel(ctx)) // a hanging disk removes the file later
		return fmt.Errorf("no GPU was reset, because the reset cannot be noted: %w", err)
	}
	return nil
}

// forget removes the note of a reset.
func (r *Resets) forget(ctx context.Context) error { return r.setRecord(ctx, nil) }

// setRecord makes the file match the wanted record; nil means no file. The error is
// statefile.ErrHangs if the disk does not answer. The disk then catches up later.
func (r *Resets) setRecord(ctx context.Context, wanted *record) error {
	if r.options.StateDir == "" {
		return nil
	}
	r.wantedRecord.Store(wanted)
	return r.disk.Do(ctx, diskPatience, r.syncFile)
}

// syncFile writes and removes the file until the file matches the wanted record.
func (r *Resets) syncFile() (err error) {
	for {
		wanted := r.wantedRecord.Load()
		if wanted == nil {
			err = statefile.Remove(r.path())
		} else {
			err = r.options.Write(r.path(), wanted)
		}
		if r.wantedRecord.Load() == wanted {
			return err
		}
	}
}

// Run shows and ends a reset of an earlier process: the health of the GPUs follows from their
// readings. The GPUs stay withdrawn while the earlier process may still reset them. Run returns nil
// when ctx ends. Only the leading process may call Run.
func (r *Resets) Run(ctx context.Context) error {
	if err := r.takeOver(ctx); err != nil {
		klog.FromContext(ctx).Info("Cannot read whether an earlier process was resetting GPUs", "reason", err.Error())
	}
	<-ctx.Done()
	return nil
}

func (r *Resets) takeOver(ctx context.Context) error {
	if r.options.StateDir == "" || !r.busy.TryLock() { // this process is resetting GPUs
		return nil
	}
	defer r.busy.Unlock()
	var withdrawn *record // GPUs are withdrawn for the reset
	for {
		// First, because the previous leader removes the note before it ends.
		previous, changed := r.options.PreviousLeader()
		found, err := r.interruptedRecord(ctx)
		switch {
		case found != nil && found.Boot != "" && r.options.BootID != "" && found.Boot != r.options.BootID:
			return r.forget(ctx)
		case found == nil && withdrawn == nil:
			return err
		case found == nil && err == nil:
			r.showInterrupted(ctx, withdrawn, "see the log of the previous leader for the result; "+judgedByReadings)
			return nil
		case previous == "" && found != nil:
			why := "the daemon ended before the GPUs were reset"
			if found.Phase == PhaseResetting {
				why = "the daemon ended during the reset: it is not known whether the GPUs were reset, and " +
					judgedByReadings
			}
			r.showInterrupted(ctx, found, why)
			return r.forget(ctx)
		case found != nil:
			withdrawn = found
			r.withdraw(ctx, Status{GPUs: found.GPUs, Phase: found.Phase, Since: found.Since,
				Reason: previous + " led before and may still reset them"})
		}
		select {
		case <-changed:
		case <-time.After(queryInterval):
		case <-ctx.Done():
			if withdrawn != nil { // the leading process then withdraws the GPUs
				r.status.Publish(Status{})
				r.endHold(context.WithoutCancel(ctx), withdrawn.GPUs)
			}
			return nil
		}
	}
}

// judgedByReadings is the end of a sentence about GPUs that may or may not have been reset.
const judgedByReadings = "they are judged by their readings"

// interruptedRecord returns the note of an earlier process; nil if there is none.
func (r *Resets) interruptedRecord(ctx context.Context) (*record, error) {
	return statefile.Within(ctx, r.disk, diskPatience, func() (*record, error) {
		var found record
		if is, err := statefile.ReadState(r.path(), maxFile, fileVersion, &found); !is {
			return nil, err
		}
		return &found, nil
	})
}

// showInterrupted shows an unfinished reset of an earlier process. The health of the GPUs follows
// from their readings again.
func (r *Resets) showInterrupted(ctx context.Context, left *record, why string) {
	klog.FromContext(ctx).Info("A reset of GPUs was interrupted", "gpus", left.GPUs, "since", left.Since)
	r.status.Publish(Status{GPUs: left.GPUs, Phase: PhaseInterrupted, Since: left.Since, Reason: why})
	r.endHold(ctx, left.GPUs)
}
