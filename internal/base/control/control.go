// Package control is the daemon's local control socket: how an operator, by another invocation of
// the same binary, asks a running daemon what it sees or tells it to do something. It carries named
// calls; their meaning is that of the handlers.
//
// A call is one connection: the client sends one JSON object {"call", "arguments", "deadline"} and
// receives one JSON object with either "result" or "error". A call that is followed receives an
// empty object at once, and then such objects until one of both ends closes the connection. Only
// the daemon's own user, root in a cluster, may connect.
//
// A call whose client has gone, or has waited to its deadline, changes nothing that it has not
// begun: an operator who gave up does not find the change made later. See callContext.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

const (
	// maxRequest bounds one request, in bytes. The largest, a fault with a layout of MIG devices,
	// takes some hundred.
	maxRequest = 64 << 10
	// answerTimeout is how long a client waits for the first answer. The deadline of its call is
	// farewellTimeout earlier, so that the daemon's own reason arrives.
	answerTimeout = 30 * time.Second
	// busyPause is the pause before a client connects again to a daemon whose backlog is full.
	busyPause = 50 * time.Millisecond
	// maxAnswer bounds one answer, in bytes. The status of a node with thousands of replicas takes
	// some hundred thousand.
	maxAnswer = 16 << 20
)

// A Handler answers one kind of call. What it returns is sent as JSON; the sentence of its error is
// sent as it is.
type Handler func(ctx context.Context, arguments json.RawMessage) (any, error)

// A Stream answers a call that is followed, with its arguments: each value that it sends reaches
// the client as JSON. The error of send says that the client takes no more values. Its ctx ends
// when the client has gone or the server ends; the sentence of another error is sent as it is.
type Stream func(ctx context.Context, arguments json.RawMessage, send func(any) error) error

var (
	// ErrNoDaemon is wrapped by the error of a Call that found nobody at the socket.
	ErrNoDaemon = errors.New("no daemon answers")
	// ErrSilent is wrapped by the error of a Call or Follow that got no answer in time.
	ErrSilent = errors.New("the daemon does not answer")
	// ErrEnded is wrapped by the error of a Follow whose connection ended, and of a Call that could
	// not be sent.
	ErrEnded = errors.New("the daemon has ended the connection")
)

type request struct {
	Call      string          `json:"call"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
	Deadline  instant         `json:"deadline,omitzero"` // nothing is to begin after it
}

type response struct {
	Result json.RawMessage `json:"result,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// Call makes one call to the daemon at the given socket and decodes its result into result, unless
// that is nil. It waits for the answer until ctx ends, and for 30 s at most.
func Call(ctx context.Context, socket, call string, arguments, result any) error {
	conn, err := dial(ctx, socket, call, arguments)
	if err != nil {
		return err
	}
	defer conn.close()
	var a response
	if err := json.NewDecoder(io.LimitReader(conn, maxAnswer)).Decode(&a); err != nil {
		return conn.explain(ctx, fmt.Errorf("read the daemon's answer to %s: %w", call, err))
	}
	return a.decode(call, result)
}

// Follow makes a call with arguments and passes each of its results to take, until ctx ends, take
// fails, or the daemon or the connection ends. The first answer may take 30 s. Follow returns the
// error of take, an error that wraps ErrNoDaemon, ErrSilent or ErrEnded, or what the daemon
// refused.
func Follow[T any](ctx context.Context, socket, call string, arguments any, take func(T) error) error {
	conn, err := dial(ctx, socket, call, arguments)
	if err != nil {
		return err
	}
	defer conn.close()
	limited := &io.LimitedReader{R: conn}
	for answers := json.NewDecoder(limited); ; {
		limited.N = maxAnswer // of each answer
		var a response
		if err := answers.Decode(&a); err != nil {
			return conn.explain(ctx, fmt.Errorf("%w: %w", ErrEnded, err))
		}
		conn.answered()
		if a.Result == nil && a.Error == "" {
			continue // the daemon has begun
		}
		var result T
		if err := a.decode(call, &result); err != nil {
			return err
		}
		if err := take(result); err != nil {
			return err
		}
	}
}

// A caller is a connection on which a request was sent.
type caller struct {
	net.Conn
	socket   string
	patience time.Duration // how long the first answer may take
	late     *time.Timer   // ends the wait for the first answer; nil once that has come
	stop     func() bool
}

// dial connects to the daemon at a socket and sends a request. Nothing can be read any more once
// ctx has ended, or the first answer takes too long.
func dial(ctx context.Context, socket, call string, arguments any) (*caller, error) {
	encoded, err := json.Marshal(arguments)
	if err != nil {
		return nil, fmt.Errorf("encode arguments of %s: %w", call, err)
	}
	c := &caller{socket: socket, patience: answerTimeout}
	wanted := answerTimeout - farewellTimeout
	if own, limited := ctx.Deadline(); limited && time.Until(own) < wanted {
		wanted = time.Until(own)
		c.patience = wanted.Round(time.Millisecond)
	}
	deadline := now() + instant(wanted)
	if err := c.connect(ctx, time.Now().Add(c.patience)); err != nil {
		return nil, err
	}
	if err := json.NewEncoder(c).Encode(request{Call: call, Arguments: encoded, Deadline: deadline}); err != nil {
		c.close()
		return nil, c.explain(ctx, fmt.Errorf("send %s to the daemon: %w: %w", call, ErrEnded, err))
	}
	return c, nil
}

// connect connects to the daemon. While the backlog of a daemon is full, it tries again until the
// time is over.
func (c *caller) connect(ctx context.Context, over time.Time) error {
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
		switch {
		case err == nil:
			end := func() { _ = conn.SetDeadline(time.Unix(1, 0)) }
			c.Conn, c.late, c.stop = conn, time.AfterFunc(time.Until(over), end), context.AfterFunc(ctx, end)
			return nil
		case !errors.Is(err, syscall.EAGAIN):
			return fmt.Errorf("%w at %s: %w; start the daemon, or set its socket with --control-socket",
				ErrNoDaemon, c.socket, err)
		case time.Now().After(over):
			return c.silent()
		}
		select {
		case <-ctx.Done():
			return c.explain(ctx, fmt.Errorf("connect to the daemon at %s: %w", c.socket, ctx.Err()))
		case <-time.After(busyPause):
		}
	}
}

// silent returns the error of a call that got no answer in time.
func (c *caller) silent() error {
	return fmt.Errorf("%w at %s within %v, and will not start the requested change; read its log, or restart its pod",
		ErrSilent, c.socket, c.patience)
}

// explain returns the error of a call: that the first answer did not come in time, or err.
func (c *caller) explain(ctx context.Context, err error) error {
	late := c.late != nil && !c.late.Stop()
	if late || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return c.silent()
	}
	return err
}

// answered notes that the first answer has come.
func (c *caller) answered() {
	if c.late != nil && c.late.Stop() {
		c.late = nil
	}
}

func (c *caller) close() {
	c.stop()
	if c.late != nil {
		c.late.Stop()
	}
	_ = c.Close()
}

// decode decodes the result into result, unless that is nil. It returns the error of the answer.
func (a response) decode(call string, result any) error {
	if a.Error != "" {
		return errors.New(terminal.Line(a.Error)) // another program may listen there
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(a.Result, result); err != nil {
		return fmt.Errorf("decode the daemon's answer to %s: %w", call, err)
	}
	return nil
}
