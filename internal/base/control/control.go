// Package control provides the daemon's local control socket. A command of the operator, run from
// the same binary, sends calls to the running daemon: queries of the state, and orders. The
// handlers define the meaning of each named call.
//
// A call is one connection: the client sends one JSON object {"call", "arguments", "deadline"} and
// receives one JSON object with either "result" or "error". A followed call receives an empty
// object immediately, and then results until either side closes the connection. Only root
// and the daemon's own user may connect.
//
// A call starts no change after the client has gone or the deadline has passed: an operator who
// gave up finds no late change. See callContext.
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
	// maxRequest limits a request, in bytes. The largest request, a fault with a layout of MIG
	// devices, has a few hundred.
	maxRequest = 64 << 10
	// answerTimeout limits a client's wait for the first answer. The deadline of the call is
	// farewellTimeout earlier, so that the daemon's own reason arrives.
	answerTimeout = 30 * time.Second
	// busyPause is the pause before a client reconnects to a daemon whose backlog is full.
	busyPause = 50 * time.Millisecond
	// maxAnswer limits an answer, in bytes. The status of a node with thousands of replicas has a
	// few hundred thousand.
	maxAnswer = 16 << 20
)

// A Handler answers one kind of call. The result is sent as JSON, and the error as text.
type Handler func(ctx context.Context, arguments json.RawMessage) (any, error)

// A Stream answers a followed call: each value passed to send reaches the client as JSON. After an
// error of send, the client accepts no more values. ctx ends when the client has gone or the server
// stops. Any other error is sent to the client as text.
type Stream func(ctx context.Context, arguments json.RawMessage, send func(any) error) error

var (
	// ErrNoDaemon is wrapped by the error of a Call if no daemon listens at the socket.
	ErrNoDaemon = errors.New("no daemon answers")
	// ErrSilent is wrapped by the error of a Call or Follow without an answer in time.
	ErrSilent = errors.New("the daemon does not answer")
	// ErrEnded is wrapped by the error of a Call or Follow whose connection ended or that could not be
	// sent.
	ErrEnded = errors.New("the daemon has ended the connection")
)

type request struct {
	Call      string          `json:"call"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
	Deadline  instant         `json:"deadline,omitzero"` // no change may start later
}

type response struct {
	Result json.RawMessage `json:"result,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// Call makes one call to the daemon at a socket and decodes the answer into result, unless result
// is nil. It waits for the answer until ctx ends, and for 30 s at most.
func Call(ctx context.Context, socket, call string, arguments, result any) error {
	conn, err := dial(ctx, socket, call, arguments)
	if err != nil {
		return err
	}
	defer conn.close()
	var a response
	if err := json.NewDecoder(io.LimitReader(conn, maxAnswer)).Decode(&a); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) { // the process was killed
			err = ErrEnded
		}
		return conn.explain(ctx, fmt.Errorf("read the daemon's answer to %s: %w", call, err))
	}
	return a.decode(call, result)
}

// Follow makes a call and passes each result to take, until ctx ends, take fails, or the daemon or
// the connection ends. The first answer may take 30 s. The error is the error of take, wraps
// ErrNoDaemon, ErrSilent or ErrEnded, or is the daemon's error.
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
		conn.stopWaiting()
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

// A caller is a connection with a sent request.
type caller struct {
	net.Conn
	socket   string
	patience time.Duration // how long the first answer may take
	late     *time.Timer   // ends the wait for the first answer; nil afterwards
	stop     func() bool
}

// dial connects to the daemon at a socket and sends a request. Reads fail after the end of ctx, or
// if the first answer takes too long.
func dial(ctx context.Context, socket, call string, arguments any) (*caller, error) {
	encoded, err := json.Marshal(arguments)
	if err != nil {
		return nil, fmt.Errorf("encode arguments of %s: %w", call, err)
	}
	c := &caller{socket: socket, patience: answerTimeout}
	wanted := answerTimeout - farewellTimeout
	if own, limited := ctx.Deadline(); limited && time.Until(own) < wanted {
		wanted = max(0, time.Until(own))
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

// connect connects to the daemon. While the daemon's backlog is full, it retries until the time
// over.
func (c *caller) connect(ctx context.Context, over time.Time) error {
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
		switch {
		case err == nil:
			end := func() { _ = conn.SetDeadline(time.Unix(1, 0)) }
			c.Conn, c.late, c.stop = conn, time.AfterFunc(time.Until(over), end), context.AfterFunc(ctx, end)
			return nil
		case ctx.Err() != nil: // the end of ctx says nothing about the daemon
			return c.explain(ctx, fmt.Errorf("connect to the daemon at %s: %w", c.socket, ctx.Err()))
		case !errors.Is(err, syscall.EAGAIN):
			return fmt.Errorf("%w at %s: %w; start the daemon, or set its socket with --control-socket",
				ErrNoDaemon, c.socket, err)
		case time.Now().After(over):
			return c.silent()
		}
		select {
		case <-ctx.Done(): // the next attempt returns the error
		case <-time.After(busyPause):
		}
	}
}

// silent returns the error of a call without an answer in time.
func (c *caller) silent() error {
	return fmt.Errorf("%w at %s within %v; read its log, or restart its pod", ErrSilent, c.socket, c.patience)
}

// explain returns the error of a call: the first answer did not arrive in time, or err.
func (c *caller) explain(ctx context.Context, err error) error {
	late := c.late != nil && !c.late.Stop()
	if late || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return c.silent()
	}
	return err
}

// stopWaiting ends the limit of the wait for the first answer.
func (c *caller) stopWaiting() {
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

// decode decodes the result into result, unless result is nil. It returns the error in the answer.
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
