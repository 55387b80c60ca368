package control_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// dialed returns a connection to a server.
func dialed(t *testing.T, socket string) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// TestSilence: the error of a call, and of a followed call, says that the daemon accepts but is
// silent, even if the time was over before the connection.
func TestSilence(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	for name, ask := range map[string]func(context.Context) error{
		"Call": func(ctx context.Context) error { return control.Call(ctx, socket, "echo", nil, nil) },
		"Follow": func(ctx context.Context) error {
			return control.Follow(ctx, socket, "count", nil, func(int) error { return nil })
		},
	} {
		for limit, within := range map[time.Duration]string{100 * time.Millisecond: " within ", -time.Hour: " within 0s"} {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			err := ask(ctx)
			cancel()
			if !errors.Is(err, control.ErrSilent) || errors.Is(err, control.ErrNoDaemon) ||
				!strings.Contains(err.Error(), within) || !strings.Contains(err.Error(), socket) {
				t.Errorf("%s() = %v with %v left, want that the daemon does not answer", name, err, limit)
			}
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if err := ask(gone); err == nil || errors.Is(err, control.ErrNoDaemon) {
			t.Errorf("%s() = %v after its end, which says nothing about the daemon", name, err)
		}
	}
}

// TestCallWithoutCaller does not start; a running call learns of the end.
func TestCallWithoutCaller(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	type call struct {
		ctx  context.Context
		name string
	}
	came := make(chan call)
	stream := func(ctx context.Context, _ json.RawMessage, _ func(any) error) error {
		came <- call{ctx, "stream"}
		<-ctx.Done()
		return ctx.Err()
	}
	server := control.NewServer(socket, map[string]control.Handler{
		"change": func(ctx context.Context, _ json.RawMessage) (any, error) {
			return nil, stream(ctx, nil, nil)
		},
		"echo": func(context.Context, json.RawMessage) (any, error) { return nil, nil },
	}, map[string]control.Stream{"follow": stream})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	answers(t, socket)

	for _, name := range []string{"change", "follow"} {
		late := dialed(t, socket)
		// a nanosecond after the node's start
		if _, err := fmt.Fprintf(late, `{"call": %q, "deadline": 1}`, name); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(late); err != nil || !strings.Contains(string(answer), "nothing was begun") {
			t.Errorf("%s after its deadline is answered with %s, %v", name, answer, err)
		}
		waits := dialed(t, socket)
		if _, err := fmt.Fprintf(waits, `{"call": %q}`, name); err != nil {
			t.Fatal(err)
		}
		var c call
		select {
		case c = <-came:
		case <-time.After(patience):
			t.Fatalf("%s is not begun", name)
		}
		if err := waits.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if err := control.Call(t.Context(), socket, "echo", nil, nil); err != nil { // the server goes on meanwhile
			t.Fatal(err)
		}
		if err := c.ctx.Err(); err != nil {
			t.Errorf("%s ends for a client that only sends no more: %v", name, err)
		}
		_ = waits.Close()
		if c.ctx.Err() == nil {
			t.Errorf("%s is not told at once that its client has gone", name)
		}
		select {
		case <-c.ctx.Done():
		case <-time.After(patience):
			t.Errorf("%s is not told that its client has gone", name)
		}
	}
}

// TestIdleConnections: connections without a request block nobody, and the oldest is closed first.
func TestIdleConnections(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	// The longest time for an idle connection. Call 65 would wait as long if nothing was closed before.
	poll.Once(t, "200 calls beside idle connections", 5*time.Second, func() {
		var idle []*net.UnixConn
		for i := range 200 {
			idle = append(idle, dialed(t, socket))
			if i%2 == 0 {
				if _, err := io.WriteString(idle[i], `{"call": "ec`); err != nil && i < 64 {
					t.Fatal(err)
				}
			}
			if err := control.Call(t.Context(), socket, "echo", nil, nil); err != nil {
				t.Fatalf("beside %d idle connections: %v", i+1, err)
			}
		}
		if err := idle[0].SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(idle[0]); err != nil || !strings.Contains(string(answer), "read the request") {
			t.Errorf("the oldest one gets %s, %v", answer, err)
		}
		for _, c := range idle {
			_ = c.Close()
		}
	})
}
