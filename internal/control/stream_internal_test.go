package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// TestFollowersThatDoNotReadLoseTheirPlaces: others are let in.
func TestFollowersThatDoNotReadLoseTheirPlaces(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	begin := make(chan struct{})
	server := NewServer(socket, nil, map[string]Stream{
		"count": func(ctx context.Context, send func(any) error) error {
			for <-begin; ctx.Err() == nil; {
				if err := send("a value"); err != nil {
					return err
				}
			}
			return ctx.Err()
		},
		"one": func(_ context.Context, send func(any) error) error { return send("a value") },
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
	deadline := time.Now().Add(time.Minute)
	for range maxStreams {
		var silent net.Conn
		for err := errors.New("not yet"); err != nil; {
			if silent, err = net.Dial("unix", socket); err != nil && time.Now().After(deadline) {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() { _ = silent.Close() })
		if _, err := fmt.Fprintln(silent, `{"call": "count"}`); err != nil {
			t.Fatal(err)
		}
	}
	for len(server.followed) < maxStreams {
		if time.Now().After(deadline) {
			t.Fatal("they have no places")
		}
	}
	enough := errors.New("enough")
	follow := func() error { return Follow(t.Context(), socket, "one", func(string) error { return enough }) }
	if err := follow(); err == nil || errors.Is(err, enough) {
		t.Fatalf("one more is let in: %v", err)
	}
	close(begin)
	for err := follow(); !errors.Is(err, enough); err = follow() {
		if time.Now().After(deadline) {
			t.Fatalf("a follower that reads is refused still: %v", err)
		}
	}
}
