package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestFollowersThatDoNotReadLoseTheirPlaces: others are let in.
func TestFollowersThatDoNotReadLoseTheirPlaces(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	begin := make(chan struct{})
	server := NewServer(socket, nil, map[string]Stream{
		"count": func(ctx context.Context, _ json.RawMessage, send func(any) error) error {
			for <-begin; ctx.Err() == nil; {
				if err := send("a value"); err != nil {
					return err
				}
			}
			return ctx.Err()
		},
		"one": func(_ context.Context, _ json.RawMessage, send func(any) error) error { return send("a value") },
	})
	server.sendTimeout = 50 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	for range maxStreams {
		if _, err := fmt.Fprintln(connect(t, socket), `{"call": "count"}`); err != nil {
			t.Fatal(err)
		}
	}
	poll.Until(t, "they have places", func() bool { return len(server.streamSlots) == maxStreams })
	enough := errors.New("enough")
	follow := func() error { return Follow(t.Context(), socket, "one", nil, func(string) error { return enough }) }
	if err := follow(); err == nil || errors.Is(err, enough) {
		t.Fatalf("one more is let in: %v", err)
	}
	close(begin)
	poll.Until(t, "a follower that reads is let in", func() bool { return errors.Is(follow(), enough) })
}

// TestAValueThatCannotBeEncoded: the client is told.
func TestAValueThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	server := NewServer(socket, nil, map[string]Stream{
		"bad": func(_ context.Context, _ json.RawMessage, send func(any) error) error { return send(func() {}) },
	})
	go func() { _ = server.Run(t.Context()) }()
	_ = connect(t, socket).Close()
	err := Follow(t.Context(), socket, "bad", nil, func(any) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "encode a value") {
		t.Errorf("Follow() = %v, want that the value cannot be encoded", err)
	}
}

// connect connects to a server during its start.
func connect(t *testing.T, socket string) net.Conn {
	t.Helper()
	var conn net.Conn
	poll.Until(t, "a server answers", func() bool {
		var err error
		conn, err = net.Dial("unix", socket)
		return err == nil
	})
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestStreamEnd: a client that has gone or does not read receives nothing. Another client
// learns why the stream ended.
func TestStreamEnd(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for name, tt := range map[string]struct {
		closes bool // the client
		run    Stream
		want   error
	}{
		"the client has gone": {true, func(ctx context.Context, _ json.RawMessage,
			_ func(any) error) error {
			<-ctx.Done()
			return broken
		}, nil},
		"the client does not read": {false, func(_ context.Context, _ json.RawMessage, send func(any) error) error {
			for {
				if err := send(strings.Repeat("x", 1<<16)); err != nil {
					return err
				}
			}
		}, nil},
		"the stream breaks": {false, func(context.Context, json.RawMessage, func(any) error) error { return broken },
			broken},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s.sock"),
				Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			client := connect(t, listener.Addr().String())
			conn, err := listener.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if tt.closes {
				_ = client.Close()
			}
			server := NewServer("", nil, map[string]Stream{"run": tt.run})
			server.sendTimeout = 50 * time.Millisecond
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := server.stream(ctx, conn, request{Call: "run"}); !errors.Is(err, tt.want) || ctx.Err() != nil {
				t.Errorf("stream() = %v, want %v", err, tt.want)
			}
		})
	}
}

// TestConnectionsThatCannotBeAccepted take no room from later ones, and are tried again until the
// end.
func TestConnectionsThatCannotBeAccepted(t *testing.T) {
	t.Parallel()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "c.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		server := NewServer("", nil, nil)
		life, end := context.WithTimeout(t.Context(), 2*maxCalls*checkOften)
		defer end()
		if err := server.accept(t.Context(), life, listener); err != nil || life.Err() == nil {
			t.Errorf("accept() = %v before the end: %v", err, life.Err() == nil)
		}
		if len(server.connectionSlots) != 0 {
			t.Errorf("%d places are taken by nobody", len(server.connectionSlots))
		}
	})
}
