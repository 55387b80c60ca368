package daemon

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/recording"
)

// RecordArguments are the arguments of CallRecordStart.
type RecordArguments struct {
	// Redact replaces UUIDs and PCI addresses.
	Redact bool `json:"redact"`
}

// RecordAnswer is the answer to CallRecordStart.
type RecordAnswer struct {
	// Dir is the folder of the recording.
	Dir string `json:"dir"`
}

// startRecording starts a recording.
func (d *daemon) startRecording(_ context.Context, a RecordArguments) (any, error) {
	dir := d.startup.Record
	if dir == "" && d.startup.StateDir != "" {
		dir = filepath.Join(d.startup.StateDir, "recordings")
	}
	if dir == "" {
		return nil, errors.New("no directory for the recording: start the daemon with --record or --state-dir")
	}
	return RecordAnswer{dir}, d.recorder.Start(recording.Options{
		Dir: dir, Redact: a.Redact, Program: version.String(), BootID: BootID(d.node), StateDir: d.startup.StateDir,
		Policy: d.watcher.Configs().Value().Health,
	})
}

// recordFromStart starts the configured recording. GPUs are also served if it fails.
func (d *daemon) recordFromStart(ctx context.Context) {
	if d.startup.Record == "" {
		return
	}
	if _, err := d.startRecording(ctx, RecordArguments{Redact: d.startup.RecordRedact}); err != nil {
		klog.FromContext(ctx).Info("Cannot record the driver's answers", "dir", d.startup.Record, "reason", err.Error())
	}
}

// requests returns the monitor for callers whose requests are to be recorded.
func (d *daemon) requests() requests {
	return requests{recording.Requests{Monitor: d.monitor, Recorder: &d.recorder}, d.proofs}
}

// requests are requests to the monitor. While the driver is released, no process of a CUDA
// check uses it.
type requests struct {
	recording.Requests
	proofs *cudacheck.Proofs
}

// proofsPatience is the longest wait for processes of CUDA checks to end.
const proofsPatience = 5 * time.Second

// Quiesce releases the driver, and returns when the processes of CUDA checks have also
// ended.
func (r requests) Quiesce(ctx context.Context, allocate bool) error {
	err := r.Requests.Quiesce(ctx, allocate)
	ctx, cancel := context.WithTimeout(ctx, proofsPatience)
	defer cancel()
	return errors.Join(err, r.proofs.Release(ctx))
}
