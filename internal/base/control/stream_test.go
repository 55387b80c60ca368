package control_test

import (
	"bufio"
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

func TestFollow(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	_, stop := start(t, socket)

	enough := errors.New("enough")
	var got []int
	err := control.Follow(t.Context(), socket, "count", nil, func(i int) error {
		if got = append(got, i); i == 1000 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) || len(got) != 1001 || got[7] != 7 {
		t.Errorf("Follow() = %v after %d values", err, len(got))
	}
	take := func(string) error { return nil }
	if err := control.Follow(t.Context(), socket, "break", nil, take); err == nil ||
		err.Error() != "the monitor has ended" {
		t.Errorf("Follow() = %v, want the sentence of the daemon", err)
	}
	if err := control.Follow(t.Context(), socket, "braek", nil, take); err == nil ||
		!strings.Contains(err.Error(), "bad, break, count, echo, fail, large, once") {
		t.Errorf("Follow() = %v, want the names of the known calls", err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	if err := control.Follow(ctx, socket, "once", nil, func(string) error { cancel(); return nil }); !errors.Is(err,
		control.ErrEnded) {
		t.Errorf("Follow() = %v when its ctx ends", err)
	}
	followed := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- control.Follow(t.Context(), socket, "once", nil, func(string) error { close(followed); return nil })
	}()
	select {
	case <-followed:
	case err := <-ended:
		t.Fatalf("Follow() = %v before the first value", err)
	}
	stop()
	if err := <-ended; !errors.Is(err, control.ErrEnded) {
		t.Errorf("Follow() = %v when the daemon ends", err)
	}
	if err := control.Follow(t.Context(), socket, "once", nil, take); !errors.Is(err, control.ErrNoDaemon) {
		t.Errorf("Follow() = %v without a daemon", err)
	}
}

// TestFollowersAreBounded: a follower over the limit is refused, other calls are answered, and a
// follower that leaves makes room.
func TestFollowersAreBounded(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	const limit = 8
	follow := func(ctx context.Context, took chan<- struct{}) error {
		return control.Follow(ctx, socket, "once", nil, func(string) error { took <- struct{}{}; return nil })
	}
	ctx, cancel := context.WithCancel(t.Context())
	took, ended := make(chan struct{}, limit+1), make(chan error, limit)
	for range limit {
		go func() { ended <- follow(ctx, took) }()
	}
	for range limit {
		select {
		case <-took:
		case err := <-ended:
			t.Fatal(err)
		case <-time.After(patience):
			t.Fatal("a follower receives nothing")
		}
	}
	if err := follow(t.Context(), took); err == nil || !strings.Contains(err.Error(), "8 clients follow") {
		t.Errorf("one more: %v, want that there are too many", err)
	}
	if err := control.Call(t.Context(), socket, "echo", nil, nil); err != nil {
		t.Errorf("another call: %v", err)
	}
	cancel()
	for range limit {
		if err := <-ended; !errors.Is(err, control.ErrEnded) {
			t.Errorf("a follower ended with %v", err)
		}
	}
	again, stop := context.WithCancel(t.Context())
	defer stop()
	poll.Until(t, "there is room again", func() bool { // the server sees the ends a little later
		return errors.Is(control.Follow(again, socket, "once", nil, func(string) error { stop(); return nil }),
			control.ErrEnded)
	})
}

// TestFollowRequestInParts: bytes after the request, such as the end of the line, do
// not end the call.
func TestFollowRequestInParts(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	_, stop := start(t, socket)
	client, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	answers := bufio.NewScanner(client)
	if _, err := fmt.Fprint(client, `{"call": "count"}`); err != nil || !answers.Scan() {
		t.Fatalf("no value: %v, %v", err, answers.Err())
	}
	if _, err := fmt.Fprintln(client); err != nil {
		t.Fatal(err)
	}
	for range 20_000 { // more than was on the way
		if !answers.Scan() {
			t.Fatalf("the server has ended the call: %v", answers.Err())
		}
	}
	stop()
}

// TestFollowerThatDoesNotRead: the end of the server does not wait for the follower.
func TestFollowerThatDoesNotRead(t *testing.T) {
	t.Parallel()
	poll.Once(t, "the end with a follower that does not read", 20*time.Second, func() { // a message has 30 s
		socket := filepath.Join(t.TempDir(), "c.sock")
		_, stop := start(t, socket)
		silent, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
		if _, err := fmt.Fprintln(silent, `{"call": "large"}`); err != nil {
			t.Fatal(err)
		}
		// The server waits for the client from the begin of the value on.
		if _, err := io.ReadFull(silent, make([]byte, len("{}\n{"))); err != nil {
			t.Fatal(err)
		}
		stop()
	})
}

// TestAValueThatCannotBeEncoded: the client is told.
func TestAValueThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	err := control.Follow(t.Context(), socket, "bad", nil, func(any) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "encode a value") {
		t.Errorf("Follow() = %v, want that the value cannot be encoded", err)
	}
}

// TestFollowerThatLeaves: the call ends.
func TestFollowerThatLeaves(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	begun, left := make(chan struct{}), make(chan struct{})
	server := control.NewServer(socket, nil, map[string]control.Stream{
		"wait": func(ctx context.Context, _ json.RawMessage, _ func(any) error) error {
			close(begun)
			<-ctx.Done()
			close(left)
			return errors.New("broken")
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	var client net.Conn
	poll.Until(t, "a server answers", func() (answers bool) {
		var err error
		client, err = net.Dial("unix", socket)
		return err == nil
	})
	if _, err := fmt.Fprintln(client, `{"call": "wait"}`); err != nil {
		t.Fatal(err)
	}
	<-begun
	_ = client.Close()
	select {
	case <-left:
	case <-time.After(patience):
		t.Fatal("the call goes on without its client")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
