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
func (w *gpuWing) startRecording(_ context.Context, a RecordArguments) (any, error) {
	dir := w.startup.Record
	if dir == "" && w.startup.StateDir != "" {
		dir = filepath.Join(w.startup.StateDir, "recordings")
	}
	if dir == "" {
		return nil, errors.New("no directory for the recording: start the daemon with --record or --state-dir")
	}
	return RecordAnswer{dir}, w.recorder.Start(recording.Options{
		Dir: dir, Redact: a.Redact, Program: version.String(), BootID: BootID(w.node), StateDir: w.startup.StateDir,
		Policy: w.watcher.Configs().Value().Health,
	})
}

// recordFromStart starts the configured recording. GPUs are also served if it fails.
func (w *gpuWing) recordFromStart(ctx context.Context) {
	if w.startup.Record == "" {
		return
	}
	if _, err := w.startRecording(ctx, RecordArguments{Redact: w.startup.RecordRedact}); err != nil {
		klog.FromContext(ctx).Info("Cannot record the driver's answers", "dir", w.startup.Record, "reason", err.Error())
	}
}

// requests returns the monitor for callers whose requests are to be recorded.
func (w *gpuWing) requests() recording.Requests {
	return recording.Requests{Monitor: w.monitor, Recorder: &w.recorder}
}

// requests returns the same for callers that may release the driver.
func (d *daemon) requests() requests { return requests{d.gpus.requests(), d.maintenance.proofs} }

// requests are requests to the monitor. While the driver is released, no process of a CUDA
// check uses it.
type requests struct {
	recording.Requests
	proofs *cudacheck.Proofs
}

// proofsPatience is the longest wait for processes of CUDA checks to end.
const proofsPatience = 5 * time.Second

// Quiesce releases the driver, and returns when the processes of CUDA checks have also ended.
func (r requests) Quiesce(ctx context.Context, allocate bool) error {
	return r.endProofs(ctx, r.Requests.Quiesce(ctx, allocate))
}

// QuiesceForChange is Quiesce before a change of the driver.
func (r requests) QuiesceForChange(ctx context.Context) error {
	return r.endProofs(ctx, r.Requests.QuiesceForChange(ctx))
}

// endProofs waits until the processes of CUDA checks have ended. It returns err joined with its own
// error.
func (r requests) endProofs(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, proofsPatience)
	defer cancel()
	return errors.Join(err, r.proofs.Release(ctx))
}
