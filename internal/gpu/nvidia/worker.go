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
	// gpuPatience is how long a call about one GPU may take before the other GPUs are asked without
	// waiting for it.
	gpuPatience = 2 * time.Second
	// nodePatience is how long a call about no GPU may take before nobody waits for it any more.
	nodePatience = 10 * time.Second
	// shortPatience is gpuPatience while calls about two GPUs hang: a look at many that hang must not
	// take long.
	shortPatience = 500 * time.Millisecond
	// jobPatience is how long a job about one GPU may take although its calls return.
	jobPatience = 10 * time.Second
	// openPatience is nodePatience for opening a session: the driver may have to load firmware.
	openPatience = time.Minute
)

// A callRecord says which call into the driver is under way. Each GPU of a session has one, and
// there is one for all calls that are about no GPU: calls of one callRecord come one after the
// other.
type callRecord struct {
	gpu   int         // index, or inventory.NoGPU
	count Metrics     // of the driver
	alone atomic.Bool // a job was given up

	mu       sync.Mutex // guards all following fields
	function string     // empty between two calls
	since    time.Time  // when that call, or the job between two calls, began
}

// begin notes that a function is about to be called, or with an empty name that a job begins.
func (r *callRecord) begin(function string) {
	now := time.Now()
	r.mu.Lock()
	r.function, r.since = function, now
	r.mu.Unlock()
}

// end notes that it returned, and what.
func (r *callRecord) end(ret nvml.Return) {
	now := time.Now()
	r.mu.Lock()
	function, took := r.function, now.Sub(r.since)
	r.function, r.since = "", now
	r.mu.Unlock()
	counted(r.count, function, took, ret)
}

// call returns the call that is under way.
func (r *callRecord) call() inventory.Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return inventory.Call{Function: r.function, GPU: r.gpu, Since: r.since}
}

// left returns how much of a caller's patience is left.
func (r *callRecord) left(patience time.Duration) time.Duration {
	return patience - time.Since(r.call().Since)
}

// A worker makes calls into the driver, in jobs, one job at a time, for callers that cannot wait
// for ever. A call into the driver cannot be cancelled: where one does not return, its caller gives
// the job up, the job goes on in its thread, and the next job gets another thread. Of each record
// no more than one job is ever given up at the same time.
//
// There is a goroutine only while a job is being done.
type worker struct {
	inUse chan struct{} // holds a token while the worker is in use

	mu      sync.Mutex // guards all following fields
	givenUp []*job     // whose callers did not wait, and that are not done
	freed   chan struct{}
	late    []func() // to run when the worker is taken next, for jobs that were given up and are done since
}

// A job is calls of one record.
type job struct {
	record *callRecord
	began  time.Time
	late   func()
	done   chan struct{} // closed when it is
	panic  error         // why it stopped half-way; nil if it did not. Written before done is closed.
}

func newWorker() *worker {
	return &worker{inUse: make(chan struct{}, 1), freed: make(chan struct{})}
}

// do takes the worker, and does a job.
func (w *worker) do(ctx context.Context, r *callRecord, patience time.Duration, f, late func()) error {
	if err := w.take(ctx); err != nil {
		return err
	}
	defer w.release()
	return w.job(ctx, r, patience, f, late)
}

// job runs f in a job of a record and waits until f is done, ctx ends, or a call of f takes longer
// than patience. While its calls return, f as a whole may take jobPatience if it is about a GPU,
// and any time if it is not. The error says why nobody waits for f any more; then the caller must
// not touch what f writes, and late runs later, once f is done, unless it is nil. The caller has
// the worker.
//
// While a job of the same record goes on that was given up, the error is an inventory.Stall, and f
// does not run.
func (w *worker) job(ctx context.Context, r *callRecord, patience time.Duration, f, late func()) error {
	if err := w.room(ctx, r, patience); err != nil {
		return err
	}
	return w.run(ctx, r, patience, f, late)
}

// take waits until no other caller has the worker.
func (w *worker) take(ctx context.Context) error {
	if ctx.Err() == nil { // else no job may begin, also if the worker is free
		select {
		case w.inUse <- struct{}{}:
			w.settle()
			return nil
		case <-ctx.Done():
		}
	}
	return stopped(ctx)
}

// release gives the worker back.
func (w *worker) release() { <-w.inUse }

// settle runs the late functions of jobs that ended after they were given up. The caller has the
// worker.
func (w *worker) settle() {
	w.mu.Lock()
	late := w.late
	w.late = nil
	w.mu.Unlock()
	for _, f := range late {
		f()
	}
}

// room waits until a job of a record may begin: until none of the record is under way. The caller
// has the worker.
func (w *worker) room(ctx context.Context, r *callRecord, patience time.Duration) error {
	for {
		w.mu.Lock()
		i := slices.IndexFunc(w.givenUp, func(j *job) bool { return j.record == r })
		if i < 0 {
			w.mu.Unlock()
			w.settle()
			return nil
		}
		wait := w.givenUp[i].left(w.patienceLocked(r, patience))
		freed := w.freed
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
			return stopped(ctx)
		}
		timer.Stop()
	}
}

// patienceLocked returns how long a call of a record is waited for.
func (w *worker) patienceLocked(r *callRecord, patience time.Duration) time.Duration {
	if r.gpu != inventory.NoGPU && len(w.givenUp) > 1 {
		return min(patience, shortPatience)
	}
	return patience
}

// left returns how much of a caller's patience with a call of the job is left.
func (j *job) left(patience time.Duration) time.Duration {
	left := j.record.left(patience)
	if j.record.gpu == inventory.NoGPU {
		return left
	}
	return min(left, jobPatience-time.Since(j.began))
}

// run does a job for which there is room. The caller has the worker.
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
			err = stopped(ctx)
		case <-timer.C:
			if left := j.left(patience); left > 0 {
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
	r.alone.Store(true)
	w.givenUp = append(w.givenUp, j)
	return err
}

// finish does a job, in a thread of its own. A job that panics fails, and the process goes on: what
// the driver says of one GPU does not take the others down.
func (w *worker) finish(j *job, f func()) {
	func() {
		defer func() {
			if cause := recover(); cause != nil {
				j.panic = fmt.Errorf("what the driver said could not be read: %v", cause)
			}
		}()
		f()
	}()
	w.mu.Lock()
	defer w.mu.Unlock()
	close(j.done)
	if !slices.Contains(w.givenUp, j) {
		return
	}
	w.givenUp = slices.DeleteFunc(w.givenUp, func(o *job) bool { return o == j })
	if j.late != nil {
		w.late = append(w.late, j.late)
	}
	close(w.freed)
	w.freed = make(chan struct{})
}

// drain waits until no job is under way. Then the caller has the worker.
func (w *worker) drain(ctx context.Context) error {
	if err := w.take(ctx); err != nil {
		return err
	}
	for {
		w.mu.Lock()
		idle, freed := len(w.givenUp) == 0, w.freed
		w.mu.Unlock()
		if idle {
			w.settle()
			return nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			w.release()
			if calls := w.hanging(); len(calls) > 0 {
				return &inventory.Stall{Call: calls[0]}
			}
			return stopped(ctx)
		}
	}
}

// busy reports whether a job of a record goes on that was given up.
func (w *worker) busy(r *callRecord) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.givenUp, func(j *job) bool { return j.record == r })
}

// hanging returns the calls that nobody waits for any more, the oldest first.
func (w *worker) hanging() []inventory.Call {
	w.mu.Lock()
	defer w.mu.Unlock()
	calls := make([]inventory.Call, len(w.givenUp))
	for i, j := range w.givenUp {
		calls[i] = j.record.call()
	}
	return calls
}

// stopped says why a caller whose ctx ended goes without an answer.
func stopped(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return inventory.ErrNoAnswer
	}
	return ctx.Err()
}
