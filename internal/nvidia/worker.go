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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

const (
	// gpuPatience is how long a call about one GPU may take before the other GPUs are asked without waiting for it.
	gpuPatience = 2 * time.Second
	// nodePatience is how long a call about no GPU may take before nobody waits for it any more.
	nodePatience = 10 * time.Second
	// roomPatience is how long a call about a GPU may take while no other GPU can be asked without risking one more thread.
	roomPatience = 5 * time.Second
	// openPatience is nodePatience for opening a session: the driver may have to load firmware.
	openPatience = time.Minute
)

// A record says which call into the driver is under way. Each GPU of a session has one, and there is one for all calls that are
// about no GPU: calls of one record are made one after the other.
type record struct {
	gpu   int         // index, or inventory.NoGPU
	pulse *pulse      // of all records of the driver
	count Metrics     // of the driver
	alone atomic.Bool // a job was given up

	mu       sync.Mutex // guards all following fields
	function string     // empty between two calls
	since    time.Time  // when that call, or the job between two calls, began
}

// A pulse is when a call into the driver returned last, in nanoseconds since 1970.
type pulse struct{ atomic.Int64 }

// beats reports whether a call returned a short while ago: the driver lives.
func (p *pulse) beats() bool { return time.Since(time.Unix(0, p.Load())) < nodePatience }

// begin notes that a function is about to be called, or with an empty name that a job begins.
func (r *record) begin(function string) {
	now := time.Now()
	r.mu.Lock()
	r.function, r.since = function, now
	r.mu.Unlock()
}

// end notes that it returned, and what.
func (r *record) end(ret nvml.Return) {
	now := time.Now()
	r.pulse.Store(now.UnixNano())
	r.mu.Lock()
	function, took := r.function, now.Sub(r.since)
	r.function, r.since = "", now
	r.mu.Unlock()
	counted(r.count, function, took, ret)
}

// call returns the call that is under way.
func (r *record) call() inventory.Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return inventory.Call{Function: r.function, GPU: r.gpu, Since: r.since}
}

// left returns how much of a caller's patience is left.
func (r *record) left(patience time.Duration) time.Duration {
	return patience - time.Since(r.call().Since)
}

// A worker makes calls into the driver, in jobs, one job at a time, for callers that cannot wait for ever. A call into the driver
// cannot be cancelled: where one does not return, its caller gives the job up, the job goes on in its thread, and the next
// job gets another thread. No more jobs than most are ever given up at the same time.
//
// There is a goroutine only while a job is being done.
type worker struct {
	most int
	turn chan struct{} // holds a token while somebody uses the worker

	mu      sync.Mutex // guards all following fields
	givenUp []*job     // whose callers did not wait, and that are not done
	freed   chan struct{}
	late    []func() // to run in the next turn, for jobs that were given up and are done since
}

// A job is calls of one record.
type job struct {
	record *record
	late   func()
	done   chan struct{} // closed when it is
}

func newWorker(most int) *worker {
	return &worker{most: most, turn: make(chan struct{}, 1), freed: make(chan struct{})}
}

// do is job in a turn of its own.
func (w *worker) do(ctx context.Context, r *record, patience time.Duration, f, late func()) error {
	if err := w.take(ctx); err != nil {
		return err
	}
	defer w.release()
	return w.job(ctx, r, patience, f, late)
}

// job runs f in a job of a record and waits until f is done, ctx ends, or a call of f takes longer than patience: the time that f
// takes as a whole has no limit while its calls return. The error says why nobody waits for f any more; then the caller must not
// touch what f writes, and late runs in a later turn once f is done, unless it is nil. The caller has the turn.
//
// While a call of the same record hangs the error is an inventory.Stall, and while no thread is left it is
// inventory.ErrNotAsked, or inventory.ErrNoAnswer if no call returned for a while: then f does not run.
func (w *worker) job(ctx context.Context, r *record, patience time.Duration, f, late func()) error {
	if err := w.room(ctx, r, patience); err != nil {
		return err
	}
	return w.run(ctx, r, patience, f, late)
}

// take waits for the caller's turn.
func (w *worker) take(ctx context.Context) error {
	if ctx.Err() == nil { // else no job may begin, though it be the turn
		select {
		case w.turn <- struct{}{}:
			w.settle()
			return nil
		case <-ctx.Done():
		}
	}
	return stopped(ctx)
}

// release gives the turn back.
func (w *worker) release() { <-w.turn }

// settle runs the late functions of jobs that ended after they were given up. The caller has the turn.
func (w *worker) settle() {
	w.mu.Lock()
	late := w.late
	w.late = nil
	w.mu.Unlock()
	for _, f := range late {
		f()
	}
}

// room waits until a job of a record may begin: until none of the record is under way, and one thread is free. The caller has the
// turn.
func (w *worker) room(ctx context.Context, r *record, patience time.Duration) error {
	for {
		w.mu.Lock()
		same := slices.ContainsFunc(w.givenUp, func(j *job) bool { return j.record == r })
		full := len(w.givenUp) >= w.most
		wait := r.left(patience)
		if !same && full {
			wait = 0
			for _, j := range w.givenUp {
				wait = max(wait, j.record.left(roomPatience))
			}
		}
		freed := w.freed
		w.mu.Unlock()
		switch {
		case !same && !full:
			w.settle()
			return nil
		case wait <= 0 && same:
			return &inventory.Stall{Call: r.call()}
		case wait <= 0:
			return w.exhausted(r)
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

// exhausted is the error of a job for which there is no thread.
func (w *worker) exhausted(r *record) error {
	kind := inventory.ErrNotAsked
	if !r.pulse.beats() {
		kind = inventory.ErrNoAnswer
	}
	return fmt.Errorf("%w: %d calls hang, so no other call is made", kind, w.most)
}

// run does a job for which there is room. The caller has the turn.
func (w *worker) run(ctx context.Context, r *record, patience time.Duration, f, late func()) error {
	j := &job{record: r, late: late, done: make(chan struct{})}
	r.begin("")
	go w.finish(j, f)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	var err error
	for err == nil {
		select {
		case <-j.done:
			return nil
		case <-ctx.Done():
			err = stopped(ctx)
		case <-timer.C:
			if left := r.left(patience); left > 0 {
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
		return nil
	default:
	}
	r.alone.Store(true)
	w.givenUp = append(w.givenUp, j)
	return err
}

// finish does a job, in a thread of its own.
func (w *worker) finish(j *job, f func()) {
	f()
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

// drain waits until no job is under way. Then the caller has the turn.
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
