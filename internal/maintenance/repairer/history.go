package repairer

import (
	"context"
	"path/filepath"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// File is the name of the file, in the state directory, with the repairs of the last 24 hours.
const File = "repairs.json"

const (
	fileVersion = 1
	maxFile     = 1 << 20
	// diskPatience limits the wait for the disk.
	diskPatience = 2 * time.Second
)

// history is the content of the file.
type history struct {
	Version  int              `json:"version"`
	Attempts []repair.Attempt `json:"attempts"`
}

func (r *Repairs) path() string { return filepath.Join(r.options.StateDir, File) }

// load reads the repairs of earlier processes. A repair without an end was interrupted: its GPUs are
// judged by their readings.
func (r *Repairs) load(ctx context.Context) error {
	if r.options.StateDir == "" {
		return nil
	}
	found, err := statefile.Within(ctx, r.disk, diskPatience, func() (history, error) {
		var h history
		_, err := statefile.ReadState(r.path(), maxFile, fileVersion, &h)
		return h, err
	})
	if err != nil {
		return err
	}
	now := time.Now().UTC().Truncate(time.Second)
	r.attempts = repair.Recent(found.Attempts, now)
	for i := range r.attempts {
		if a := &r.attempts[i]; a.Ended.IsZero() {
			a.Ended, a.After = now, "the daemon ended during the repair"
		}
	}
	return nil
}

// save writes the repairs to the file. Without any, the file is removed.
func (r *Repairs) save(ctx context.Context) error {
	if r.options.StateDir == "" {
		return nil
	}
	h := history{Version: fileVersion, Attempts: append([]repair.Attempt(nil), r.attempts...)}
	return r.disk.Do(ctx, diskPatience, func() error {
		if len(h.Attempts) == 0 {
			return statefile.Remove(r.path())
		}
		return r.options.Write(r.path(), h)
	})
}
