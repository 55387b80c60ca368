// Package control is the daemon's local control socket: how an operator, by another invocation of the same binary, asks a running daemon
// what it sees or tells it to do something. It carries named calls; their meaning is that of the handlers.
//
// A call is one connection: the client sends one JSON object {"call", "arguments"} and receives one JSON object with either "result" or
// "error". A call that is followed receives such objects until one of both ends closes the connection. Only the daemon's own user, root in
// a cluster, may connect.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

const (
	// maxRequest bounds one request, in bytes. The largest, a fault with a layout of MIG devices, takes some hundred.
	maxRequest = 64 << 10
	// maxAnswer bounds one answer, in bytes. The status of a node with thousands of replicas takes some hundred thousand.
	maxAnswer = 16 << 20
)

// A Handler answers one kind of call. What it returns is sent as JSON; the sentence of its error is sent as it is.
type Handler func(ctx context.Context, arguments json.RawMessage) (any, error)

// A Stream answers a call that is followed, with its arguments: each value that it sends reaches the client as JSON. The error of send says
// that the client takes no more values. Its ctx ends when the client has gone or the server ends; the sentence of another error is sent as
// it is.
type Stream func(ctx context.Context, arguments json.RawMessage, send func(any) error) error

var (
	// ErrNoDaemon is wrapped by the error of a Call that found nobody at the socket.
	ErrNoDaemon = errors.New("no daemon answers")
	// ErrEnded is wrapped by the error of a Follow whose connection ended, and of a Call that could not be sent.
	ErrEnded = errors.New("the daemon has ended the connection")
)

type request struct {
	Call      string          `json:"call"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
}

type response struct {
	Result json.RawMessage `json:"result,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// Call makes one call to the daemon at the given socket and decodes its result into result, unless that is nil.
func Call(ctx context.Context, socket, call string, arguments, result any) error {
	conn, err := dial(ctx, socket, call, arguments)
	if err != nil {
		return err
	}
	defer conn.close()
	var a response
	if err := json.NewDecoder(io.LimitReader(conn, maxAnswer)).Decode(&a); err != nil {
		return fmt.Errorf("read the daemon's answer to %s: %w", call, err)
	}
	return a.decode(call, result)
}

// Follow makes a call with arguments and passes each of its results to take, until ctx ends, take fails, or the daemon or the connection
// ends. It returns the error of take, an error that wraps ErrNoDaemon or ErrEnded, or what the daemon refused.
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
			return fmt.Errorf("%w: %w", ErrEnded, err)
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
	stop func() bool
}

// dial connects to the daemon at a socket and sends a request. Nothing can be read any more once ctx has ended.
func dial(ctx context.Context, socket, call string, arguments any) (*caller, error) {
	encoded, err := json.Marshal(arguments)
	if err != nil {
		return nil, fmt.Errorf("encode arguments of %s: %w", call, err)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("%w at %s: %w; start the daemon, or set its socket with --control-socket", ErrNoDaemon, socket, err)
	}
	c := &caller{conn, context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })}
	if err := json.NewEncoder(conn).Encode(request{Call: call, Arguments: encoded}); err != nil {
		c.close()
		return nil, fmt.Errorf("send %s to the daemon: %w: %w", call, ErrEnded, err)
	}
	return c, nil
}

func (c *caller) close() {
	c.stop()
	_ = c.Close()
}

// decode decodes the result into result, unless that is nil. It returns the error of the answer.
func (a response) decode(call string, result any) error {
	if a.Error != "" {
		return errors.New(a.Error)
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(a.Result, result); err != nil {
		return fmt.Errorf("decode the daemon's answer to %s: %w", call, err)
	}
	return nil
}
