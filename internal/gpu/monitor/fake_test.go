package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// withoutLog returns a context whose log nobody reads.
func withoutLog(ctx context.Context) context.Context { return klog.NewContext(ctx, klog.Logger{}) }

// node is a fake of a node and its driver. Tests change it with set; calls see what it is when they
// are made.
type node struct {
	mu sync.Mutex // guards all following fields

	gpus      []inventory.GPU
	leftOut   []inventory.LeftOut
	control   inventory.ControlNodes
	readings  map[string]inventory.Reading // by UUID; a GPU without one answers well
	openErr   error
	scanErr   error
	readErr   map[string]error
	busy      map[string]func() error // as readErr
	sampleErr map[string]error
	hung      bool          // nothing answers
	delay     time.Duration // how long each call takes
	deaf      bool          // sessions end their events at once
	gate      chan struct{} // if not nil, scans wait until it is closed

	processes map[string][]inventory.Process // by UUID

	limits map[string]int // of memory, by UUID and cgroup

	useErr  error    // of Processes, MemoryLimit and Clean
	cleaned []string // UUID and remnant

	opened, closed, scans, reads, retries, samples int
	current                                        *session
}

// newNode returns a node with n good GPUs.
func newNode(n int) *node {
	d := &node{readings: map[string]inventory.Reading{}, readErr: map[string]error{}}
	for i := range n {
		d.gpus = append(d.gpus, gpu(i))
	}
	return d
}

func gpu(i int) inventory.GPU {
	return inventory.GPU{
		UUID: uuid(i), Index: i, Minor: i, Model: "fake", NUMANode: inventory.NoNUMANode,
		Health: inventory.Health{State: inventory.Healthy},
	}
}

func uuid(i int) string { return "GPU-" + string(rune('a'+i)) }

var good = inventory.Reading{RecoveryAction: inventory.Known(inventory.RecoveryNone)}

func asks(a inventory.RecoveryAction) inventory.Reading {
	return inventory.Reading{RecoveryAction: inventory.Known(a)}
}

func (n *node) set(change func(*node)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(n)
}

func (n *node) count(which func(*node) int) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return which(n)
}

func opened(n *node) int { return n.opened }
func closed(n *node) int { return n.closed }
func scans(n *node) int  { return n.scans }

// send has the driver report an event.
func (n *node) send(e inventory.Event) {
	n.mu.Lock()
	s := n.current
	n.mu.Unlock()
	s.events <- e
}

func (n *node) xid(i int, code uint64) {
	n.send(inventory.Event{Kind: inventory.EventXID, UUID: uuid(i), XID: code, GI: inventory.Unattributed,
		CI: inventory.Unattributed})
}

func (n *node) Open(ctx context.Context) (monitor.Session, error) {
	if err := n.answers(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.openErr != nil {
		return nil, n.openErr
	}
	if n.current != nil {
		return nil, errors.New("a session is open")
	}
	n.opened++
	n.current = &session{node: n, events: make(chan inventory.Event, 1000), done: make(chan struct{})}
	return n.current, nil
}

// answers returns after a while if the driver hangs.
func (n *node) answers(ctx context.Context) error {
	n.mu.Lock()
	hung, delay := n.hung, n.delay
	n.mu.Unlock()
	if hung {
		delay = 5 * time.Second
	}
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		if !hung { // a driver that hangs gives no answer, whichever of the two ends first
			return ctx.Err()
		}
	}
	if hung {
		return inventory.ErrNoAnswer
	}
	return nil
}

type session struct {
	node   *node
	events chan inventory.Event
	done   chan struct{}
}

func (s *session) Scan(ctx context.Context) (inventory.Snapshot, error) {
	if err := s.node.answers(ctx); err != nil {
		return inventory.Snapshot{}, err
	}
	s.node.mu.Lock()
	gate := s.node.gate
	s.node.mu.Unlock()
	if gate != nil {
		<-gate
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	s.node.scans++
	if s.node.scanErr != nil {
		return inventory.Snapshot{}, s.node.scanErr
	}
	return inventory.Snapshot{
		Driver: inventory.Driver{Version: "580.95.05"}, Control: s.node.control,
		GPUs: slices.Clone(s.node.gpus), LeftOut: slices.Clone(s.node.leftOut),
	}, nil
}

func (s *session) Read(ctx context.Context, uuid string) (inventory.Reading, error) {
	if err := s.node.answers(ctx); err != nil {
		return inventory.Reading{}, err
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	s.node.reads++
	if busy := s.node.busy[uuid]; busy != nil {
		return inventory.Reading{}, busy()
	}
	if err := s.node.readErr[uuid]; err != nil {
		return inventory.Reading{}, err
	}
	if r, ok := s.node.readings[uuid]; ok {
		return r, nil
	}
	return good, nil
}

func (s *session) Sample(ctx context.Context, uuid string, _ bool, _ func(context.Context)) (inventory.Sample, error) {
	if err := s.node.answers(ctx); err != nil {
		return inventory.Sample{}, err
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	s.node.samples++
	if err := s.node.sampleErr[uuid]; err != nil {
		return inventory.Sample{}, err
	}
	return inventory.Sample{UUID: uuid, Taken: time.Now()}, nil
}

func (s *session) Processes(ctx context.Context, uuid string) ([]inventory.Process, error) {
	if err := s.node.answers(ctx); err != nil {
		return nil, err
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	return s.node.processes[uuid], s.node.useErr
}

func (s *session) MemoryLimit(ctx context.Context, uuid, cgroup string) (int, error) {
	if err := s.node.answers(ctx); err != nil {
		return 0, err
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	mib, known := s.node.limits[uuid+" "+cgroup]
	if !known && s.node.useErr == nil {
		return 0, errors.New("no such cgroup")
	}
	return mib, s.node.useErr
}

// Clean also sets the count of memory errors to zero, as a driver does.
func (s *session) Clean(ctx context.Context, uuid string, what inventory.Remnant) error {
	if err := s.node.answers(ctx); err != nil {
		return err
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	s.node.cleaned = append(s.node.cleaned, uuid+" "+what.String())
	if r, ok := s.node.readings[uuid]; ok && what == inventory.RemnantECC && s.node.useErr == nil {
		r.UncorrectedECC = inventory.Known(uint64(0))
		s.node.readings[uuid] = r
	}
	return s.node.useErr
}

func (s *session) SetComputeMode(
	ctx context.Context, uuid string, mode inventory.ComputeMode,
) (inventory.ComputeMode, error) {
	if err := s.node.answers(ctx); err != nil {
		return 0, err
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	s.node.cleaned = append(s.node.cleaned, fmt.Sprintf("%s mode %d", uuid, mode))
	return inventory.ComputeProhibited, s.node.useErr
}

func (*session) Partitions(context.Context, string) (inventory.Partitions, error) {
	return inventory.Partitions{}, inventory.ErrNotSupported
}

func (*session) Repartition(context.Context, string, inventory.MIGStep) (func(context.Context) (int, error), error) {
	return nil, inventory.ErrNotSupported
}

func (*session) LostByClose(context.Context) (string, error) { return "", nil }

func (s *session) Next(ctx context.Context) (inventory.Event, error) {
	if s.node.count(func(n *node) int {
		if n.deaf {
			return 1
		}
		return 0
	}) == 1 {
		return inventory.Event{}, errors.New("the event set is undefined")
	}
	select {
	case e := <-s.events:
		return e, nil
	case <-s.done:
		return inventory.Event{}, errors.New("closed")
	case <-ctx.Done():
		return inventory.Event{}, ctx.Err()
	}
}

func (s *session) Retry(context.Context) error {
	s.node.set(func(n *node) { n.retries++ })
	return nil
}

func (s *session) Hanging() bool { return false }

func (s *session) Unwatched() []inventory.LeftOut { return nil }

func (s *session) Close(ctx context.Context) error {
	if err := s.node.answers(ctx); err != nil {
		return err
	}
	s.node.mu.Lock()
	defer s.node.mu.Unlock()
	close(s.done)
	s.node.current = nil
	s.node.closed++
	return nil
}
