package nvidia

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	// gpuPatience limits the wait for a call about a GPU before the other GPUs are called.
	gpuPatience = 2 * time.Second
	// nodePatience limits the wait for a call about no GPU.
	nodePatience = 10 * time.Second
	// shortPatience replaces gpuPatience while calls about two GPUs hang: a look at many hanging
	// GPUs must not take long.
	shortPatience = 500 * time.Millisecond
	// jobPatience limits a job about a GPU, even if the calls return.
	jobPatience = 10 * time.Second
	// openPatience is nodePatience for opening a session: the driver may have to load firmware.
	openPatience = time.Minute
)

// A callRecord records the running call into the driver. Each GPU of a session has a callRecord,
// and all calls about no GPU share one. Calls of one callRecord are sequential.
type callRecord struct {
	gpu            int         // index, or inventory.NoGPU
	count          Metrics     // of the driver
	isJobAbandoned atomic.Bool // a job was abandoned

	mu       sync.Mutex // guards the fields below
	function string     // empty between two calls
	since    time.Time  // start of the call, or of the job between two calls
}

// begin records the start of a call, or with an empty name the start of a job.
func (r *callRecord) begin(function string) {
	now := time.Now()
	r.mu.Lock()
	r.function, r.since = function, now
	r.mu.Unlock()
}

// end records the result of the call.
func (r *callRecord) end(ret nvml.Return) {
	now := time.Now()
	r.mu.Lock()
	function, took := r.function, now.Sub(r.since)
	r.function, r.since = "", now
	r.mu.Unlock()
	countCall(r.count, function, took, ret)
}

// call returns the running call.
func (r *callRecord) call() inventory.Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return inventory.Call{Function: r.function, GPU: r.gpu, Since: r.since}
}

// remainingPatience returns the rest of a caller's patience.
func (r *callRecord) remainingPatience(patience time.Duration) time.Duration {
	return patience - time.Since(r.call().Since)
}

// A worker makes calls into the driver, in jobs, one job at a time, for callers with limited
// patience. A call into the driver cannot be cancelled: if a call does not return, the caller
// abandons the job, the job continues in its thread, and the next job gets another thread. At most
// one job of each record is abandoned at any time.
//
// There is a goroutine only while a job is running.
type worker struct {
	inUse chan struct{} // holds a token while a caller has the worker

	mu            sync.Mutex // guards the fields below
	abandonedJobs []*job     // abandoned jobs that are still running
	jobEnded      chan struct{}
	late          []func() // functions to run for abandoned jobs that have ended, when the worker is taken next
}

// A job makes calls of one record.
type job struct {
	record *callRecord
	began  time.Time
	late   func()
	done   chan struct{} // closed when it is
	panic  error         // the panic value; written before done is closed
}

func newWorker() *worker {
	return &worker{inUse: make(chan struct{}, 1), jobEnded: make(chan struct{})}
}

// do takes the worker and runs a job.
func (w *worker) do(ctx context.Context, r *callRecord, patience time.Duration, f, late func()) error {
	if err := w.take(ctx); err != nil {
		return err
	}
	defer w.release()
	return w.job(ctx, r, patience, f, late)
}

// job runs f in a job of a record and waits until f is done, ctx ends, or a call of f takes longer
// than patience. f as a whole may take jobPatience if it is about a GPU, and any time otherwise.
// The error says why f was abandoned: the caller must then not access the results of f, and late,
// if not nil, runs after the end of f. The caller has the worker.
//
// While an abandoned job of the same record is running, the error is an inventory.Stall, and f does
// not run.
func (w *worker) job(ctx context.Context, r *callRecord, patience time.Duration, f, late func()) error {
	if err := w.awaitRoom(ctx, r, patience); err != nil {
		return err
	}
	return w.run(ctx, r, patience, f, late)
}

// take waits until the worker is free, and takes it.
func (w *worker) take(ctx context.Context) error {
	if ctx.Err() == nil { // after the end of ctx no job may begin, even if the worker is free
		select {
		case w.inUse <- struct{}{}:
			w.runLate()
			return nil
		case <-ctx.Done():
		}
	}
	return endOfContext(ctx)
}

// release releases the worker.
func (w *worker) release() { <-w.inUse }

// runLate runs the late functions of abandoned jobs that have ended. The caller has the worker.
func (w *worker) runLate() {
	w.mu.Lock()
	late := w.late
	w.late = nil
	w.mu.Unlock()
	for _, f := range late {
		f()
	}
}

// awaitRoom waits until no job of a record is running. The caller has the worker.
func (w *worker) awaitRoom(ctx context.Context, r *callRecord, patience time.Duration) error {
	for {
		w.mu.Lock()
		i := slices.IndexFunc(w.abandonedJobs, func(j *job) bool { return j.record == r })
		if i < 0 {
			w.mu.Unlock()
			w.runLate()
			return nil
		}
		wait := w.abandonedJobs[i].remainingPatience(w.patienceLocked(r, patience))
		freed := w.jobEnded
		w.mu.Unlock()
		if wait <= 0 {
			return &inventory.Stall{Call: r.call()}
		}
		timer := time.NewTimer(wait)
		select {
		case <-freed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return endOfContext(ctx)
		}
		timer.Stop()
	}
}

// patienceLocked returns the limit of the wait for a call of a record.
func (w *worker) patienceLocked(r *callRecord, patience time.Duration) time.Duration {
	if r.gpu != inventory.NoGPU && len(w.abandonedJobs) > 1 {
		return min(patience, shortPatience)
	}
	return patience
}

// remainingPatience returns the rest of a caller's patience with a call of the job.
func (j *job) remainingPatience(patience time.Duration) time.Duration {
	left := j.record.remainingPatience(patience)
	if j.record.gpu == inventory.NoGPU {
		return left
	}
	return min(left, jobPatience-time.Since(j.began))
}

// run runs a job, after awaitRoom. The caller has the worker.
func (w *worker) run(ctx context.Context, r *callRecord, patience time.Duration, f, late func()) error {
	j := &job{record: r, began: time.Now(), late: late, done: make(chan struct{})}
	w.mu.Lock()
	patience = w.patienceLocked(r, patience)
	w.mu.Unlock()
	r.begin("")
	go w.finish(j, f)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	var err error
	for err == nil {
		select {
		case <-j.done:
			return j.panic
		case <-ctx.Done():
			err = endOfContext(ctx)
		case <-timer.C:
			if left := j.remainingPatience(patience); left > 0 {
				timer.Reset(left)
			} else {
				err = &inventory.Stall{Call: r.call()}
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-j.done:
		return j.panic
	default:
	}
	r.isJobAbandoned.Store(true)
	w.abandonedJobs = append(w.abandonedJobs, j)
	return err
}

// finish runs a job in a separate thread. A panic fails the job, and the process continues: an
// invalid answer about one GPU must not affect the others.
func (w *worker) finish(j *job, f func()) {
	func() {
		defer func() {
			if cause := recover(); cause != nil {
				j.panic = fmt.Errorf("invalid answer of the driver: %v", cause)
			}
		}()
		f()
	}()
	w.mu.Lock()
	defer w.mu.Unlock()
	close(j.done)
	if !slices.Contains(w.abandonedJobs, j) {
		return
	}
	w.abandonedJobs = slices.DeleteFunc(w.abandonedJobs, func(o *job) bool { return o == j })
	if j.late != nil {
		w.late = append(w.late, j.late)
	}
	close(w.jobEnded)
	w.jobEnded = make(chan struct{})
}

// drain waits until no job is running. Then the caller has the worker.
func (w *worker) drain(ctx context.Context) error {
	if err := w.take(ctx); err != nil {
		return err
	}
	for {
		w.mu.Lock()
		idle, freed := len(w.abandonedJobs) == 0, w.jobEnded
		w.mu.Unlock()
		if idle {
			w.runLate()
			return nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			w.release()
			if calls := w.hangingCalls(); len(calls) > 0 {
				return &inventory.Stall{Call: calls[0]}
			}
			return endOfContext(ctx)
		}
	}
}

// busy reports whether an abandoned job of a record is running.
func (w *worker) busy(r *callRecord) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.abandonedJobs, func(j *job) bool { return j.record == r })
}

// hangingCalls returns the abandoned calls, oldest first.
func (w *worker) hangingCalls() []inventory.Call {
	w.mu.Lock()
	defer w.mu.Unlock()
	calls := make([]inventory.Call, len(w.abandonedJobs))
	for i, j := range w.abandonedJobs {
		calls[i] = j.record.call()
	}
	return calls
}

// endOfContext returns the error of a caller whose ctx ended.
func endOfContext(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return inventory.ErrNoAnswer
	}
	return ctx.Err()
}
