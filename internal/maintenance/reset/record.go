package reset

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
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

// keep has the file say what is wanted; nil is for no file. The error is statefile.ErrHangs when
// the disk does not answer. The disk does later what is wanted then.
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
			err = statefile.Remove(r.path())
		} else {
			err = r.options.Write(r.path(), wanted)
		}
		if r.noted.Load() == wanted {
			return err
		}
	}
}

// Run shows a reset that an earlier process began and did not end, and ends it: the GPUs are judged
// by their readings. They stay withdrawn as long as that process may still reset them. Run returns
// nil when ctx ends. It is for the process that leads.
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
	var shown *record // GPUs are withdrawn for it
	for {
		previous, changed := r.options.PreviousLeader() // first: it removes its note before it is no longer one
		left, err := r.left(ctx)
		switch {
		case left != nil && left.Boot != "" && r.options.BootID != "" && left.Boot != r.options.BootID:
			return r.forget(ctx)
		case left == nil && shown == nil:
			return err
		case left == nil && err == nil:
			r.interrupted(ctx, shown, "it ended in the process that had begun it and does not lead any more, whose log says how; "+judged)
			return nil
		case previous == "" && left != nil:
			why := "the daemon ended before the GPUs were reset"
			if left.Phase == PhaseResetting {
				why = "the daemon ended during the reset: it is not known whether the GPUs were reset, and " + judged
			}
			r.interrupted(ctx, left, why)
			return r.forget(ctx)
		case left != nil:
			shown = left
			r.withdraw(ctx, Status{GPUs: left.GPUs, Phase: left.Phase, Since: left.Since,
				Reason: previous + " led before and may still reset them"})
		}
		select {
		case <-changed:
		case <-time.After(askEvery):
		case <-ctx.Done():
			if shown != nil { // the process that leads then withdraws them
				r.status.Publish(Status{})
				r.giveBack(context.WithoutCancel(ctx), shown.GPUs)
			}
			return nil
		}
	}
}

// judged ends the sentence about GPUs of which it is not known whether they were reset.
const judged = "they are judged by their readings"

// left returns the note of an earlier process; nil if there is none.
func (r *Resets) left(ctx context.Context) (*record, error) {
	return statefile.Within(ctx, r.disk, diskPatience, func() (*record, error) {
		var found record
		if is, err := statefile.ReadState(r.path(), maxFile, fileVersion, &found); !is {
			return nil, err
		}
		return &found, nil
	})
}

// interrupted shows a reset that an earlier process did not end. The GPUs are judged as before.
func (r *Resets) interrupted(ctx context.Context, left *record, why string) {
	klog.FromContext(ctx).Info("A reset of GPUs was interrupted", "gpus", left.GPUs, "since", left.Since)
	r.status.Publish(Status{GPUs: left.GPUs, Phase: PhaseInterrupted, Since: left.Since, Reason: why})
	r.giveBack(ctx, left.GPUs)
}
