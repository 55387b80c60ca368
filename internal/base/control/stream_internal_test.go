package control

// These tests are inside because a client has 30 seconds to read a value, and the deadline of a socket
// needs the real clock.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestFollowersThatDoNotReadLoseTheirPlaces: others are let in. Such a follower finds no
// sentence after a part of a value.
func TestFollowersThatDoNotReadLoseTheirPlaces(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	begin, left := make(chan struct{}), make(chan error, maxStreams)
	server := NewServer(socket, nil, map[string]Stream{
		"count": func(ctx context.Context, _ json.RawMessage, send func(any) error) error {
			for <-begin; ctx.Err() == nil; {
				if err := send(strings.Repeat("x", 1<<16)); err != nil {
					left <- err
					return err
				}
			}
			return ctx.Err()
		},
		"one": func(_ context.Context, _ json.RawMessage, send func(any) error) error { return send("a value") },
	})
	server.sendTimeout = time.Nanosecond // over before each value: whatever fits into the socket arrives
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	var followers [maxStreams]net.Conn
	for i := range followers {
		poll.Until(t, "a server answers", func() (answers bool) {
			var err error
			followers[i], err = net.Dial("unix", socket)
			return err == nil
		})
		t.Cleanup(func() { _ = followers[i].Close() })
		_, err := fmt.Fprintln(followers[i], `{"call": "count"}`)
		_, readErr := io.ReadFull(followers[i], make([]byte, len("{}\n"))) // the follower has a place
		if err := errors.Join(err, readErr); err != nil {
			t.Fatal(err)
		}
	}
	enough := errors.New("enough")
	follow := func() error { return Follow(t.Context(), socket, "one", nil, func(string) error { return enough }) }
	if errors.Is(follow(), enough) {
		t.Error("there is a place for one more")
	}
	close(begin)
	poll.Until(t, "a follower that reads is let in", func() bool { return errors.Is(follow(), enough) })
	for range followers {
		if err := <-left; err == nil {
			t.Error("a follower that does not read receives values")
		}
	}
	for _, f := range followers {
		if text, err := io.ReadAll(f); err != nil || len(text) < 1<<16 || bytes.Contains(text, []byte("error")) {
			t.Errorf("%d bytes, %v, or an answer after a part of a value", len(text), err)
		}
	}
}

// TestDeadlineOfALateServer: bytes that arrived before the deadline are read after it.
func TestDeadlineOfALateServer(t *testing.T) {
	t.Parallel()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, sent := unix.Write(ends[1], []byte("on time"))
	conn, err := net.FileConn(os.NewFile(uintptr(ends[0]), "socket"))
	if err := errors.Join(sent, err, conn.SetDeadline(time.Unix(1, 0))); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	read := func(want string, wantErr error) {
		text := make([]byte, 10)
		if n, err := (client{conn.(*net.UnixConn)}).Read(text); string(text[:n]) != want || !errors.Is(err, wantErr) {
			t.Errorf("Read() = %q, %v, want %q, %v", text[:n], err, want, wantErr)
		}
	}
	read("on time", nil)
	read("", os.ErrDeadlineExceeded)
	_ = unix.Close(ends[1])
	read("", io.EOF)
}
