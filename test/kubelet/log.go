package kubelet

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Kind says what an Event is about.
type Kind int

// The kinds of events. Resource is set in all but Started and Stopped.
const (
	Started     Kind = iota + 1 // kubelet listens
	Stopped                     // kubelet's process has ended
	Registering                 // a Register call has come in
	Registered                  // it was accepted; ListAndWatch follows
	Refused                     // it was not: Err
	Listed                      // a list was received (Time) and taken in: Devices
	StreamEnded                 // a ListAndWatch stream has ended (Time), and its endpoint was stopped: Err
	Preferred                   // GetPreferredAllocation was answered: IDs, Err
	Allocated                   // Allocate was answered: IDs asked for, Pod, Err
	PreStarted                  // PreStartContainer was answered: IDs, Err
	Crash                       // kubelet would have crashed here: Err
	Forgotten                   // kubelet counts devices as free that it is just allocating to a pod: IDs, Pod
)

var kindNames = [...]string{
	Started: "started", Stopped: "stopped", Registering: "registering", Registered: "registered", Refused: "refused",
	Listed: "listed", StreamEnded: "stream ended", Preferred: "preferred", Allocated: "allocated",
	PreStarted: "pre-started", Crash: "crash", Forgotten: "forgotten",
}

func (k Kind) String() string {
	if k > 0 && int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}

// An Event is one thing that kubelet saw or did. Nobody may change one.
type Event struct {
	Seq      int       // counts from 1, over restarts
	Time     time.Time // when it happened; for a list, when it was received; for a stream, when it ended
	Kind     Kind
	Resource string
	Endpoint string // path of the plugin socket, where there is one
	Devices  []*v1beta1.Device
	IDs      []string
	Pod      string // Forgotten: empty where the devices are those of an admission that failed before
	Err      error
}

func (e Event) String() string {
	s := fmt.Sprintf("%d %s %s", e.Seq, e.Kind, e.Resource)
	switch {
	case e.Err != nil:
		return s + ": " + e.Err.Error()
	case e.Kind == Forgotten:
		return fmt.Sprintf("%s %v of %s", s, e.IDs, e.Pod)
	case e.Kind == Listed:
		return fmt.Sprintf("%s %d devices", s, len(e.Devices))
	default:
		return s
	}
}

// Is returns a condition for Next: an event of that kind about that resource ("" for Started and
// Stopped).
func Is(kind Kind, resource string) func(Event) bool {
	return func(e Event) bool { return e.Kind == kind && e.Resource == resource }
}

// logLength bounds the log of a kubelet that runs for days below `make run`; no test comes near it.
const logLength = 1 << 16

// eventLog is the ordered log of what kubelet saw.
type eventLog struct {
	mu      sync.Mutex // guards all following fields
	last    int        // Seq of the newest event
	events  []Event    // the newest ones, in order
	changed chan struct{}
}

func newEventLog() *eventLog { return &eventLog{changed: make(chan struct{})} }

// add appends an event, now unless it has a time already.
func (l *eventLog) add(e Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	e.Seq = l.last
	if len(l.events) == logLength {
		l.events = slices.Clone(l.events[logLength/2:])
	}
	l.events = append(l.events, e)
	close(l.changed)
	l.changed = make(chan struct{})
}

// after returns the events with a Seq over seq, and a channel that is closed at the next one.
func (l *eventLog) after(seq int) ([]Event, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	dropped := l.last - len(l.events)
	from := min(max(seq-dropped, 0), len(l.events))
	return l.events[from:len(l.events):len(l.events)], l.changed
}

// Mark returns the Seq of the newest event; what happens from now on comes after it.
func (k *Kubelet) Mark() int {
	k.log.mu.Lock()
	defer k.log.mu.Unlock()
	return k.log.last
}

// Events returns what happened after a Mark, oldest first; 0 means from the start. Only the newest
// 32,768 or more are kept.
func (k *Kubelet) Events(after int) []Event {
	events, _ := k.log.after(after)
	return slices.Clone(events)
}

// Follow returns what happened after a Mark and goes on with what happens, until ctx ends or the
// loop is left.
func (k *Kubelet) Follow(ctx context.Context, after int) iter.Seq[Event] {
	return func(yield func(Event) bool) {
		for {
			events, changed := k.log.after(after)
			for _, e := range events {
				if !yield(e) {
					return
				}
				after = e.Seq
			}
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
		}
	}
}

// Next waits for the first event after a Mark for which match holds.
func (k *Kubelet) Next(ctx context.Context, after int, match func(Event) bool) (Event, error) {
	for e := range k.Follow(ctx, after) {
		if match(e) {
			return e, nil
		}
	}
	return Event{}, fmt.Errorf("wait for kubelet: %w (seen: %v)", context.Cause(ctx), k.Events(after))
}

// WaitFor waits until done holds; it is asked at once and after every event. Conditions that come
// true by a clock alone are not seen.
func (k *Kubelet) WaitFor(ctx context.Context, done func() bool) error {
	for {
		_, changed := k.log.after(0)
		if done() {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for kubelet: %w (shows %v)", context.Cause(ctx), k.Resources())
		case <-changed:
		}
	}
}
