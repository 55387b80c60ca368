package recording

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

const (
	// maxEarly is how far before its recorded time a call may come and still wait for its answer.
	// Earlier calls get the previous answer.
	maxEarly = time.Second
	// maxAge is how long after its time an answer is still used if there is a later one: a Monitor
	// that asks less often gets current answers.
	maxAge = 200 * time.Millisecond
	// scanDelay is the delay after which a recorded scan is requested if the Monitor does not start
	// it.
	scanDelay = 50 * time.Millisecond
)

// A Player is a driver with the answers of a recording, at the same times after its start.
type Player struct {
	recording *Recording
	shift     time.Duration // difference between the times of the recording and the present

	mu       sync.Mutex // guards all following fields
	tracks   map[string]*track
	events   []line // events still to come
	sessions int
}

// A track is the calls with the same key, in order.
type track struct {
	lines []line
	next  int
	calls map[time.Time]bool // the made calls, by recorded time
}

// Play returns a driver that starts now.
func (r *Recording) Play() *Player {
	p := &Player{recording: r, shift: time.Since(r.began), tracks: map[string]*track{}}
	for _, l := range r.lines {
		switch {
		case l.Call == callEvent:
			p.events = append(p.events, l)
		case !strings.HasPrefix(l.Call, "request"):
			t := p.tracks[l.key()]
			if t == nil {
				t = &track{calls: map[time.Time]bool{}}
				p.tracks[l.key()] = t
			}
			t.lines = append(t.lines, l)
		}
	}
	return p
}

// Follow sends the recorded requests to the Monitor, and requests scans that the Monitor does not
// start by itself. It returns at the end of the recording, or when ctx ends.
func (p *Player) Follow(ctx context.Context, m *monitor.Monitor) {
	var requests sync.WaitGroup
	defer requests.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines, end := slices.Clone(p.recording.lines), p.recording.began.Add(p.recording.Length())
	order.Sort(lines, func(a, b line) int { return due(a).Compare(due(b)) })
	for _, l := range lines {
		request, ok := p.request(l, m)
		if !ok || due(l).After(end) {
			continue
		}
		if p.wait(ctx, due(l)) != nil {
			return
		}
		requests.Go(func() { request(ctx) })
	}
	_ = p.wait(ctx, end)
}

// due is when a line's request goes to the Monitor.
func due(l line) time.Time {
	if l.Call == callScan {
		return l.At.Add(scanDelay)
	}
	return l.At
}

// request returns the request of a line to the Monitor.
func (p *Player) request(l line, m *monitor.Monitor) (func(context.Context), bool) {
	switch l.Call {
	case callScan:
		return func(ctx context.Context) {
			p.mu.Lock()
			begun := p.tracks[l.key()].calls[l.At]
			p.mu.Unlock()
			if !begun {
				_, _ = m.Look(ctx) // the driver may be released
			}
		}, true
	case requestClear:
		return func(ctx context.Context) { _ = m.Clear(ctx, l.GPU) }, true
	case requestQuiesce:
		return func(ctx context.Context) { _ = m.Quiesce(ctx, string(l.Args) == "true") }, true
	case requestResume:
		return func(ctx context.Context) { _ = m.Resume(ctx) }, true
	case requestPolicy:
		var policy health.Policy
		if json.Unmarshal(l.Args, &policy) != nil {
			return nil, false
		}
		return func(ctx context.Context) { _ = m.Apply(ctx, policy) }, true
	}
	return nil, false
}

// wait waits until a time of the recording.
func (p *Player) wait(ctx context.Context, at time.Time) error {
	timer := time.NewTimer(time.Until(at.Add(p.shift)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var errUnrecorded = fmt.Errorf("%w: the recording has no call", inventory.ErrNotSupported)

// find returns the line that answers a call now, and skips outdated lines. A call before the time
// of the next line, or after the last line, gets the previous answer. But an error that asks for
// another session is returned only once: otherwise a Monitor would open sessions endlessly.
func (p *Player) find(call, gpu string, args any) (line, error) {
	l := line{Call: call, GPU: gpu}
	if args != nil {
		var err error
		if l.Args, err = json.Marshal(args); err != nil {
			return line{}, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.tracks[l.key()]
	if t == nil {
		return line{}, fmt.Errorf("%w of %s", errUnrecorded, strings.TrimSpace(l.key()))
	}
	now := time.Now().Add(-p.shift)
	for t.next+1 < len(t.lines) && t.lines[t.next+1].end().Before(now.Add(-maxAge)) {
		t.next++
	}
	if t.next == len(t.lines) || t.next > 0 && t.lines[t.next].At.After(now.Add(maxEarly)) {
		for i := t.next - 1; i >= 0; i-- {
			if !t.lines[i].renews() {
				return t.lines[i], nil
			}
		}
		if t.next == len(t.lines) {
			return line{}, fmt.Errorf("%w: the recording has no other answer to %s", inventory.ErrNoAnswer,
				strings.TrimSpace(l.key()))
		}
	}
	l = t.lines[t.next]
	t.calls[l.At] = true
	t.next++
	return l, nil
}

// answer returns the answer to a call, at its time.
func answer[T any](ctx context.Context, p *Player, call, gpu string, args any) (value T, err error) {
	l, err := p.find(call, gpu, args)
	if err != nil {
		return value, err
	}
	if err := p.wait(ctx, l.end()); err != nil {
		return value, err
	}
	if l.Error != nil {
		return value, l.Error.err(p.shift)
	}
	if l.Value != nil {
		err = json.Unmarshal(l.Value, &value)
	}
	return value, err
}

func act(ctx context.Context, p *Player, call, gpu string, args any) error {
	_, err := answer[nothing](ctx, p, call, gpu, args)
	return err
}

// Open returns the recorded answer. If the recording began in an open session, Open returns that
// session at once.
func (p *Player) Open(ctx context.Context) (monitor.Session, error) {
	p.mu.Lock()
	first := p.sessions == 0
	p.mu.Unlock()
	var number int
	if began := p.recording.lines[0]; first && began.Call != callOpen && began.Session > 0 {
		number = began.Session
	} else {
		l, err := p.find(callOpen, "", nil)
		if err == nil {
			// Time passes while a session opens. Otherwise, in virtual time, a fault of this moment
			// requests one session after another.
			end := l.end()
			if now := time.Now().Add(-p.shift); !end.After(now) {
				end = now.Add(1)
			}
			err = errors.Join(p.wait(ctx, end), l.Error.err(p.shift))
		}
		if err != nil {
			return nil, err
		}
		number = l.Session
	}
	p.mu.Lock()
	p.sessions++
	p.mu.Unlock()
	return &playedSession{Player: p, number: number, closed: make(chan struct{})}, nil
}

// A playedSession is a session of a Player. Calls without influence on verdicts are not played.
type playedSession struct {
	*Player
	unplayed
	number int
	closed chan struct{}
}

// unplayed are the calls that a Monitor makes only for others.
type unplayed struct{}

var errUnplayed = fmt.Errorf("%w: not played", inventory.ErrNotSupported)

func (unplayed) Sample(context.Context, string, bool, func(context.Context)) (inventory.Sample, error) {
	return inventory.Sample{}, errUnplayed
}

func (unplayed) Processes(context.Context, string) ([]inventory.Process, error) {
	return nil, errUnplayed
}

func (unplayed) MemoryLimit(context.Context, string, string) (int, error) { return 0, errUnplayed }

func (unplayed) Clean(context.Context, string, inventory.Remnant) error { return errUnplayed }

func (unplayed) SetComputeMode(context.Context, string, inventory.ComputeMode) (inventory.ComputeMode, error) {
	return 0, errUnplayed
}

func (unplayed) Partitions(context.Context, string) (inventory.Partitions, error) {
	return inventory.Partitions{}, errUnplayed
}

func (unplayed) Repartition(context.Context, string, inventory.MIGStep) (func(context.Context) (int, error), error) {
	return nil, errUnplayed
}

func (s *playedSession) Scan(ctx context.Context) (inventory.Snapshot, error) {
	return answer[inventory.Snapshot](ctx, s.Player, callScan, "", nil)
}

func (s *playedSession) Read(ctx context.Context, uuid string) (inventory.Reading, error) {
	return answer[inventory.Reading](ctx, s.Player, callRead, uuid, nil)
}

// Retry does nothing if the recording has no Retry: the Scans come from the recording.
func (s *playedSession) Retry(ctx context.Context) error {
	if err := act(ctx, s.Player, callRetry, "", nil); !errors.Is(err, errUnrecorded) {
		return err
	}
	return nil
}

func (s *playedSession) LostByClose(ctx context.Context) (string, error) {
	return answer[string](ctx, s.Player, callLost, "", nil)
}

var errClosed = errors.New("the session is closed")

// Next returns the recorded events, including events of the kernel log. It skips the end of the
// events of an earlier session.
func (s *playedSession) Next(ctx context.Context) (inventory.Event, error) {
	for {
		s.mu.Lock()
		for len(s.events) > 0 && s.events[0].Error != nil && s.events[0].Session < s.number {
			s.events = s.events[1:]
		}
		ends := s.recording.began.Add(1000 * time.Hour)
		if len(s.events) > 0 {
			ends = s.events[0].end()
		}
		s.mu.Unlock()
		timer := time.NewTimer(time.Until(ends.Add(s.shift)))
		select {
		case <-s.closed:
			timer.Stop()
			return inventory.Event{}, errClosed
		case <-ctx.Done():
			timer.Stop()
			return inventory.Event{}, ctx.Err()
		case <-timer.C:
		}
		s.mu.Lock()
		if len(s.events) == 0 {
			s.mu.Unlock()
			continue
		}
		l := s.events[0]
		s.events = s.events[1:]
		s.mu.Unlock()
		var e inventory.Event
		if l.Error != nil {
			return e, l.Error.err(s.shift)
		}
		err := json.Unmarshal(l.Value, &e)
		return e, err
	}
}

// Hanging and Unwatched return at once. They return the zero value if nothing was recorded.
func (s *playedSession) Hanging() bool { return atOnce[bool](s.Player, callHanging) }

func (s *playedSession) Unwatched() []inventory.LeftOut {
	return atOnce[[]inventory.LeftOut](s.Player, callUnwatched)
}

func atOnce[T any](p *Player, call string) (value T) {
	if l, err := p.find(call, "", nil); err == nil && l.Value != nil {
		_ = json.Unmarshal(l.Value, &value) // an edited file has no value
	}
	return value
}

func (s *playedSession) Close(ctx context.Context) error {
	l, err := s.find(callClose, "", nil)
	if err == nil && l.Session == s.number {
		if err := errors.Join(s.wait(ctx, l.end()), l.Error.err(s.shift)); err != nil {
			return err
		}
	}
	close(s.closed)
	return nil
}
