package recording

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// queued is the greatest number of lines that wait for the disk. A scan has about ten lines.
const queued = 1024

// patience is how long the start and the end of a recording wait for the disk.
const patience = 2 * time.Second

// Options are the options of a recording.
type Options struct {
	// Dir is the folder for the files; Start creates it.
	Dir string
	// Redact replaces the UUIDs and PCI addresses of the node.
	Redact bool
	// Files is the greatest number of files, including earlier recordings; by default 4. Size is
	// the greatest size of a file; by default 16 MiB.
	Files int
	Size  int64
	// Program is the version of the program, BootID the node's boot ID, and StateDir the folder of
	// the ledger of faults. Each may be empty.
	Program, BootID, StateDir string
	// Policy is the health policy in force.
	Policy health.Policy
	// Create creates a file that must not exist yet; nil creates files on disk.
	Create func(path string) (io.WriteCloser, error)
}

// A Recorder records between Start and Stop. The zero value is ready for use. Its methods are safe
// for concurrent use.
type Recorder struct {
	mu      sync.Mutex // guards starts and stops
	running atomic.Pointer[recording]
}

// A recording lasts from Start to Stop.
type recording struct {
	entries chan pendingLine
	dropped atomic.Int64
	stop    chan struct{} // closed to stop the recording
	stopped chan struct{} // closed when all lines are on disk
	err     error         // error of the disk; valid once stopped
}

// A pendingLine is a line with values that are not encoded yet.
type pendingLine struct {
	line
	args, value any
	err         error
}

// Start begins a recording. It returns an error if a recording is running or the folder cannot be
// written.
func (r *Recorder) Start(o Options) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running.Load() != nil {
		return errors.New("a recording is running: stop it with record stop")
	}
	rec := &recording{entries: make(chan pendingLine, queued), stop: make(chan struct{}), stopped: make(chan struct{})}
	made := make(chan error, 1)
	go func() {
		w, err := newWriter(o)
		made <- err
		if err == nil {
			rec.run(w)
		}
	}()
	select {
	case err := <-made:
		if err == nil {
			r.running.Store(rec)
		}
		return err
	case <-time.After(patience):
		close(rec.stop)
		return errors.New("record: the disk does not answer")
	}
}

// Stop ends the recording. It returns an error if there is none, if the disk does not answer in
// time, or if lines are missing.
func (r *Recorder) Stop() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := r.running.Swap(nil)
	if rec == nil {
		return errors.New("no recording is running")
	}
	rec.add(pendingLine{line: line{At: time.Now(), Call: callEnd}})
	close(rec.stop)
	select {
	case <-rec.stopped:
		return rec.err
	case <-time.After(patience):
		return errors.New("the disk does not answer: the end of the recording may be missing")
	}
}

// run writes lines until the end. No other goroutine waits for the disk.
func (r *recording) run(w *writer) {
	defer close(r.stopped)
	for {
		select {
		case e := <-r.entries:
			w.write(e, &r.dropped)
			continue
		default:
		}
		w.flush(&r.dropped)
		select {
		case e := <-r.entries:
			w.write(e, &r.dropped)
		case <-r.stop:
			for len(r.entries) > 0 {
				w.write(<-r.entries, &r.dropped)
			}
			r.err = w.close(&r.dropped)
			return
		}
	}
}

// add queues a line, or counts it as dropped. It does not wait.
func (r *recording) add(e pendingLine) {
	select {
	case r.entries <- e:
	default:
		r.dropped.Add(1)
	}
}

// note records a line with the present time, if a recording is running.
func (r *Recorder) note(e pendingLine) {
	if rec := r.running.Load(); rec != nil {
		e.At = time.Now()
		rec.add(e)
	}
}

// Requests is a Monitor whose requests with influence on verdicts are recorded.
type Requests struct {
	*monitor.Monitor
	Recorder *Recorder
}

// Deliver records the request and passes it to the Monitor.
func (r Requests) Deliver(ctx context.Context, e inventory.Event) error {
	r.Recorder.note(pendingLine{line: line{Call: callEvent}, value: e})
	return r.Monitor.Deliver(ctx, e)
}

// Clear records the request and passes it to the Monitor.
func (r Requests) Clear(ctx context.Context, uuid string) error {
	r.Recorder.note(pendingLine{line: line{Call: requestClear, GPU: uuid}})
	return r.Monitor.Clear(ctx, uuid)
}

// Quiesce records the request and passes it to the Monitor.
func (r Requests) Quiesce(ctx context.Context, allocate bool) error {
	r.Recorder.note(pendingLine{line: line{Call: requestQuiesce}, args: allocate})
	return r.Monitor.Quiesce(ctx, allocate)
}

// QuiesceForChange records the request as one of Quiesce and passes it to the Monitor.
func (r Requests) QuiesceForChange(ctx context.Context) error {
	r.Recorder.note(pendingLine{line: line{Call: requestQuiesce}, args: false})
	return r.Monitor.QuiesceForChange(ctx)
}

// Resume records the request and passes it to the Monitor.
func (r Requests) Resume(ctx context.Context) error {
	r.Recorder.note(pendingLine{line: line{Call: requestResume}})
	return r.Monitor.Resume(ctx)
}

// Apply records the request and passes it to the Monitor.
func (r Requests) Apply(ctx context.Context, p health.Policy) error {
	r.Recorder.note(pendingLine{line: line{Call: requestPolicy}, args: p})
	return r.Monitor.Apply(ctx, p)
}

// Driver returns a driver whose sessions are recorded while a recording is running. Otherwise a
// call costs one more read of a pointer.
func (r *Recorder) Driver(d monitor.Driver) monitor.Driver { return &driver{Driver: d, recorder: r} }

type driver struct {
	monitor.Driver
	recorder *Recorder
	sessions int // used only by the goroutine that opens sessions
}

func (d *driver) Open(ctx context.Context) (monitor.Session, error) {
	next := &session{recorder: d.recorder, number: d.sessions + 1}
	s, err := recorded(next, callOpen, "", nil, func() (monitor.Session, error) { return d.Driver.Open(ctx) })
	if err != nil {
		return nil, err
	}
	d.sessions++
	next.Session = s
	return next, nil
}

// A session records the answers of another session.
type session struct {
	monitor.Session
	recorder *Recorder
	number   int
	closing  atomic.Bool // the end of the events is not recorded
}

// recorded makes a call and records it. It omits values that are a Session.
func recorded[T any](s *session, call, gpu string, args any, f func() (T, error)) (T, error) {
	rec := s.recorder.running.Load()
	if rec == nil {
		return f()
	}
	began := time.Now()
	value, err := f()
	e := pendingLine{line: line{At: began, Took: time.Since(began), Call: call, Session: s.number, GPU: gpu},
		args: args,
		err:  err}
	switch any(value).(type) {
	case nothing, monitor.Session, inventory.Sample:
	default:
		e.value = value
	}
	rec.add(e)
	return value, err
}

// nothing is the value of calls that return only an error.
type nothing struct{}

func acted(s *session, call, gpu string, args any, f func() error) error {
	_, err := recorded(s, call, gpu, args, func() (nothing, error) { return nothing{}, f() })
	return err
}

func (s *session) Scan(ctx context.Context) (inventory.Snapshot, error) {
	return recorded(s, callScan, "", nil, func() (inventory.Snapshot, error) { return s.Session.Scan(ctx) })
}

func (s *session) Read(ctx context.Context, uuid string) (inventory.Reading, error) {
	return recorded(s, callRead, uuid, nil, func() (inventory.Reading, error) { return s.Session.Read(ctx, uuid) })
}

func (s *session) Retry(ctx context.Context) error {
	return acted(s, callRetry, "", nil, func() error { return s.Session.Retry(ctx) })
}

// Sample records duration and error. No decision depends on the measurements.
func (s *session) Sample(ctx context.Context, uuid string, blocking bool,
	pause func(context.Context)) (inventory.Sample, error) {
	return recorded(s, callSample, uuid, nil, func() (inventory.Sample, error) {
		return s.Session.Sample(ctx, uuid, blocking, pause)
	})
}

func (s *session) Processes(ctx context.Context, uuid string) ([]inventory.Process, error) {
	return recorded(s, callProcesses, uuid, nil, func() ([]inventory.Process, error) {
		return s.Session.Processes(ctx, uuid)
	})
}

func (s *session) MemoryLimit(ctx context.Context, uuid, cgroup string) (int, error) {
	return recorded(s, callMemoryLimit, uuid, nil,
		func() (int, error) { return s.Session.MemoryLimit(ctx, uuid, cgroup) })
}

func (s *session) Clean(ctx context.Context, uuid string, what inventory.Remnant) error {
	return acted(s, callClean, uuid, what, func() error { return s.Session.Clean(ctx, uuid, what) })
}

func (s *session) SetComputeMode(
	ctx context.Context, uuid string, mode inventory.ComputeMode,
) (inventory.ComputeMode, error) {
	return recorded(s, callComputeMode, uuid, mode, func() (inventory.ComputeMode, error) {
		return s.Session.SetComputeMode(ctx, uuid, mode)
	})
}

func (s *session) Partitions(ctx context.Context, uuid string) (inventory.Partitions, error) {
	return recorded(s, callPartitions, uuid, nil, func() (inventory.Partitions, error) {
		return s.Session.Partitions(ctx, uuid)
	})
}

func (s *session) Repartition(ctx context.Context, uuid string,
	step inventory.MIGStep) (func(context.Context) (int, error), error) {
	var end func(context.Context) (int, error)
	err := acted(s, callRepartition, uuid, step, func() (err error) {
		end, err = s.Session.Repartition(ctx, uuid, step)
		return err
	})
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (int, error) {
		return recorded(s, callRepartitioned, uuid, step, func() (int, error) { return end(ctx) })
	}, nil
}

// Next records each event. A wait without an event is not recorded.
func (s *session) Next(ctx context.Context) (inventory.Event, error) {
	event, err := s.Session.Next(ctx)
	if ctx.Err() == nil && (err == nil || !s.closing.Load()) {
		e := pendingLine{line: line{Call: callEvent, Session: s.number}, err: err}
		if err == nil {
			e.value = event
		}
		s.recorder.note(e)
	}
	return event, err
}

func (s *session) LostByClose(ctx context.Context) (string, error) {
	return recorded(s, callLost, "", nil, func() (string, error) { return s.Session.LostByClose(ctx) })
}

func (s *session) Hanging() bool {
	hanging, _ := recorded(s, callHanging, "", nil, func() (bool, error) { return s.Session.Hanging(), nil })
	return hanging
}

func (s *session) Unwatched() []inventory.LeftOut {
	unwatched, _ := recorded(s, callUnwatched, "", nil, func() ([]inventory.LeftOut, error) {
		return s.Session.Unwatched(), nil
	})
	return unwatched
}

func (s *session) Close(ctx context.Context) error {
	s.closing.Store(true)
	err := acted(s, callClose, "", nil, func() error { return s.Session.Close(ctx) })
	s.closing.Store(err == nil)
	return err
}

// encode returns the encoded line.
func (e pendingLine) encode() (line, error) {
	l := e.line
	l.Error = failureOf(e.err)
	var err, wrong error
	if e.args != nil {
		l.Args, err = json.Marshal(e.args)
	}
	if e.value != nil && e.err == nil {
		l.Value, wrong = json.Marshal(e.value)
	}
	return l, errors.Join(err, wrong)
}
