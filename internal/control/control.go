// Package control is the daemon's local control socket: how an operator, by another invocation of the same binary,
// asks a running daemon what it sees or tells it to do something. It carries named calls; what they mean is up to
// whoever registers the handlers.
//
// A call is one connection: the client sends one JSON object {"call", "arguments"} and receives one JSON object with
// either "result" or "error". Only the daemon's own user, root in a cluster, may connect.
//
// Package cli makes both ends; nothing else needs to import it.
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

// ErrNoDaemon is wrapped by the error of a Call that found nobody at the socket.
var ErrNoDaemon = errors.New("no daemon answers")

type request struct {
	Call      string          `json:"call"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
}

type answer struct {
	Result json.RawMessage `json:"result,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// Call makes one call to the daemon at the given socket and decodes its result into result, unless that is nil.
func Call(ctx context.Context, socket, call string, arguments, result any) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("%w at %s: %w; start the daemon, or set its socket with --control-socket", ErrNoDaemon, socket, err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	encoded, err := json.Marshal(arguments)
	if err != nil {
		return fmt.Errorf("encode arguments of %s: %w", call, err)
	}
	if err := json.NewEncoder(conn).Encode(request{Call: call, Arguments: encoded}); err != nil {
		return fmt.Errorf("send %s to the daemon: %w", call, err)
	}
	var a answer
	if err := json.NewDecoder(io.LimitReader(conn, maxAnswer)).Decode(&a); err != nil {
		return fmt.Errorf("read the daemon's answer to %s: %w", call, err)
	}
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
