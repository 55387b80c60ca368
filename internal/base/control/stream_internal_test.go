package control

// This test is inside because a client has 30 seconds to read a value, and the deadline of a socket
// needs the real clock.

import (
	"bytes"
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
	var followers [maxStreams]net.Conn
	for i := range followers {
		poll.Until(t, "a server answers", func() (answers bool) {
			var err error
			followers[i], err = net.Dial("unix", socket)
			return err == nil
		})
		t.Cleanup(func() { _ = followers[i].Close() })
		if _, err := fmt.Fprintln(followers[i], `{"call": "count"}`); err != nil {
			t.Fatal(err)
		}
	}
	enough := errors.New("enough")
	follow := func() error { return Follow(t.Context(), socket, "one", nil, func(string) error { return enough }) }
	poll.Until(t, "there is no place for one more", func() bool { return !errors.Is(follow(), enough) })
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
