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

// queued is how many lines wait for the disk at most. There are about ten for each look.
const queued = 1024

// patience is how long the start and the end of a recording wait for the disk.
const patience = 2 * time.Second

// Options are what a recording is made with.
type Options struct {
	// Dir is the folder for the files; it is made.
	Dir string
	// Redact puts other UUIDs and PCI addresses in the place of those of the node.
	Redact bool
	// Files is how many files there are at most, 4, those of earlier recordings too; Size is how large
	// each gets, 16 MiB.
	Files int
	Size  int64
	// Program is the version of the program, BootID the node's boot ID, StateDir where the ledger of
	// faults is; each may be empty.
	Program, BootID, StateDir string
	// Policy is the health policy in force.
	Policy health.Policy
	// Create makes a file, which must not be there yet; nil for one on disk.
	Create func(path string) (io.WriteCloser, error)
}

// A Recorder records between Start and Stop. The zero value is ready for use. Its methods may be
// called by several goroutines.
type Recorder struct {
	mu      sync.Mutex // guards starts and stops
	running atomic.Pointer[recording]
}

// A recording is from start to stop.
type recording struct {
	entries chan pendingLine
	dropped atomic.Int64
	stop    chan struct{} // closed to stop it
	stopped chan struct{} // closed when all is on disk
	err     error         // of the disk, once stopped
}

// A pendingLine is a line whose values are not encoded yet.
type pendingLine struct {
	line
	args, value any
	err         error
}

// Start begins a recording. The error says that one is under way, or why the folder cannot be
// written.
func (r *Recorder) Start(o Options) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running.Load() != nil {
		return errors.New("a recording is under way: end it with record stop")
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

// Stop ends the recording. The error says that there is none, that the disk does not answer in
// time, or why lines are missing.
func (r *Recorder) Stop() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := r.running.Swap(nil)
	if rec == nil {
		return errors.New("there is no recording")
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

// run writes lines until the end. Only it waits for the disk.
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

// add has a line written, or counts it as dropped. It does not wait.
func (r *recording) add(e pendingLine) {
	select {
	case r.entries <- e:
	default:
		r.dropped.Add(1)
	}
}

// note records what happened now, if there is a recording.
func (r *Recorder) note(e pendingLine) {
	if rec := r.running.Load(); rec != nil {
		e.At = time.Now()
		rec.add(e)
	}
}

// Requests is a Monitor whose requests are recorded that verdicts follow from.
type Requests struct {
	*monitor.Monitor
	Recorder *Recorder
}

// Deliver records the request, and passes it to the Monitor.
func (r Requests) Deliver(ctx context.Context, e inventory.Event) error {
	r.Recorder.note(pendingLine{line: line{Call: callEvent}, value: e})
	return r.Monitor.Deliver(ctx, e)
}

// Clear records the request, and passes it to the Monitor.
func (r Requests) Clear(ctx context.Context, uuid string) error {
	r.Recorder.note(pendingLine{line: line{Call: requestClear, GPU: uuid}})
	return r.Monitor.Clear(ctx, uuid)
}

// Quiesce records the request, and passes it to the Monitor.
func (r Requests) Quiesce(ctx context.Context, allocate bool) error {
	r.Recorder.note(pendingLine{line: line{Call: requestQuiesce}, args: allocate})
	return r.Monitor.Quiesce(ctx, allocate)
}

// Resume records the request, and passes it to the Monitor.
func (r Requests) Resume(ctx context.Context) error {
	r.Recorder.note(pendingLine{line: line{Call: requestResume}})
	return r.Monitor.Resume(ctx)
}

// Apply records the request, and passes it to the Monitor.
func (r Requests) Apply(ctx context.Context, p health.Policy) error {
	r.Recorder.note(pendingLine{line: line{Call: requestPolicy}, args: p})
	return r.Monitor.Apply(ctx, p)
}

// Driver returns a driver whose sessions are recorded while there is a recording. Else a call costs
// a read of a pointer more.
func (r *Recorder) Driver(d monitor.Driver) monitor.Driver { return &driver{Driver: d, recorder: r} }

type driver struct {
	monitor.Driver
	recorder *Recorder
	sessions int // used by the goroutine that opens
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

// A session records what another one answers.
type session struct {
	monitor.Session
	recorder *Recorder
	number   int
	closing  atomic.Bool // the end of its events is not recorded
}

// recorded makes a call and records it. A Session as the value is left out.
func recorded[T any](s *session, call, gpu string, args any, f func() (T, error)) (T, error) {
	rec := s.recorder.running.Load()
	if rec == nil {
		return f()
	}
	began := time.Now()
	value, err := f()
	e := pendingLine{line: line{At: began, Took: time.Since(began), Call: call, Session: s.number, GPU: gpu}, args: args,
		err: err}
	switch any(value).(type) {
	case nothing, monitor.Session, inventory.Sample:
	default:
		e.value = value
	}
	rec.add(e)
	return value, err
}

// nothing is the value of calls that return an error alone.
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

// Sample records how long it took and whether it failed. Nothing is decided by what it measured.
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
	return recorded(s, callMemoryLimit, uuid, nil, func() (int, error) { return s.Session.MemoryLimit(ctx, uuid, cgroup) })
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

// Next records an event when it comes. A wait that ends without one is not recorded.
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

// encode returns the line.
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
