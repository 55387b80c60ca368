package telemetry_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// dial opens a connection from an address of this machine.
func dial(t *testing.T, from, to string) net.Conn {
	t.Helper()
	d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// started returns the address of a running server.
func started(t testing.TB, o telemetry.Options) string {
	t.Helper()
	at := freeAddress(t)
	o.Address = feed.New(at)
	start(t, o)
	poll.Until(t, "it serves", func() bool { code, _ := get(t, at, "/healthz"); return code == http.StatusOK })
	return at
}

// wantServing fails the test unless scrapes and probes are answered.
func wantServing(t *testing.T, at, while string) {
	t.Helper()
	for _, path := range []string{"/metrics", "/healthz"} {
		if code, body := get(t, at, path); code != http.StatusOK {
			t.Errorf("%s, %s is answered with %d: %s", while, path, code, body)
		}
	}
}

// TestManyConnections: a client that opens a thousand connections, with and without requests, loses
// only its own connections.
func TestManyConnections(t *testing.T) {
	t.Parallel()
	at := started(t, telemetry.Options{})
	before := runtime.NumGoroutine()
	const hostile = "127.0.0.2"
	quiet := dial(t, "127.0.0.3", at) // such as Prometheus between two scrapes
	if _, err := io.WriteString(quiet, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(quiet)
	answer, err := http.ReadResponse(reader, nil)
	if err != nil || answer.Body.Close() != nil {
		t.Fatalf("no answer: %v", err)
	}
	var group sync.WaitGroup
	var refused atomic.Int32
	for i := range 1000 {
		c := dial(t, hostile, at)
		if i%2 == 0 {
			if _, err := io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
				refused.Add(1)
			}
		}
		if i%100 == 0 {
			wantServing(t, at, fmt.Sprintf("after %d connections", i))
		}
		group.Go(func() { _, _ = io.Copy(io.Discard, c) }) // ends when the server closes the connection
	}
	wantServing(t, at, "after 1,000 connections")
	if goroutines := runtime.NumGoroutine() - before; goroutines > 1000+200 { // one per connection belongs to this test
		t.Errorf("%d goroutines more", goroutines)
	}
	if _, err := io.WriteString(quiet, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err = http.ReadResponse(reader, nil)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Errorf("another client's connection was closed: %v", err)
	}
	if answer != nil {
		_ = answer.Body.Close()
	}
}

// TestSlowHeader: a connection without a complete request is closed, however many bytes trickle in.
func TestSlowHeader(t *testing.T) {
	t.Parallel()
	at := started(t, telemetry.Options{})
	c := dial(t, "127.0.0.1", at)
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, c)
		ended <- err
	}()
	late := time.After(patience)
	pace := time.NewTicker(200 * time.Millisecond)
	defer pace.Stop()
	if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: a\r\n"); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		select {
		case err := <-ended:
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error(err)
			}
			return
		case <-pace.C:
			_, _ = fmt.Fprintf(c, "X-%d: a\r\n", i) // may be closed already
		case <-late: // the header would be too large only after minutes
			t.Fatal("the connection stays open")
		}
	}
}

// TestClientsThatDoNotRead: unread answers do not block other scrapes.
func TestClientsThatDoNotRead(t *testing.T) {
	t.Parallel()
	large := status.Status{Version: strings.Repeat("v", 8_000_000)} // exceeds the buffers of a connection
	at := started(t, telemetry.Options{Status: func(context.Context) (status.Status, error) { return large, nil }})
	for i := range 20 {
		c := dial(t, fmt.Sprintf("127.0.0.%d", 2+i%10), at)
		if err := c.(*net.TCPConn).SetReadBuffer(1); err != nil { // the kernel's smallest window
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		first := make([]byte, 1) // the answer has begun
		if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(first); err != nil {
			t.Fatal(err)
		}
		wantServing(t, at, fmt.Sprintf("beside %d clients that do not read", i+1))
	}
}

// TestScrapesWithoutAPlace: a scrape waits for a place and is refused after a timeout. The refusal
// is logged once.
func TestScrapesWithoutAPlace(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a scrape waits 5 s for its place: make test-all runs it")
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	at := freeAddress(t)
	free := make(chan struct{})
	startLogged(t, telemetry.Options{Address: feed.New(at), Status: func(context.Context) (status.Status, error) {
		<-free
		return status.Status{}, nil
	}}, logger)
	poll.Until(t, "it serves", func() bool { code, _ := get(t, at, "/healthz"); return code == http.StatusOK })
	codes := make(chan int, 8)
	for range cap(codes) {
		go func() {
			code, _ := get(t, at, "/metrics")
			codes <- code
		}()
	}
	for range 4 { // the others have places
		if code := <-codes; code != http.StatusServiceUnavailable {
			t.Errorf("a scrape without a place is answered with %d", code)
		}
	}
	close(free)
	for range 4 {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("a scrape with a place is answered with %d", code)
		}
	}
	wantServing(t, at, "afterwards")
	if logged := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Count(logged,
		"Refused a scrape: too many") != 1 {
		t.Errorf("logged: %s", logged)
	}
}

// TestRequests: other methods and paths and large requests are refused.
func TestRequests(t *testing.T) {
	t.Parallel()
	at := started(t, telemetry.Options{})
	for name, tt := range map[string]struct {
		request string
		want    int
	}{
		"HEAD": {"HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusOK},
		"POST": {"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
			http.StatusMethodNotAllowed},
		"PUT":                {"PUT /healthz HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusMethodNotAllowed},
		"DELETE":             {"DELETE /readyz HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusMethodNotAllowed},
		"CONNECT":            {"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", http.StatusNotFound},
		"another path":       {"GET /debug/pprof/ HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusNotFound},
		"a path that climbs": {"GET /metrics/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusTemporaryRedirect},
		"a large header": {"GET /metrics HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("a", 64<<10) + "\r\n\r\n",
			http.StatusRequestHeaderFieldsTooLarge},
		"many headers": {"GET /metrics HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: a\r\n", 10_000) + "\r\n",
			http.StatusRequestHeaderFieldsTooLarge},
		"no HTTP": {"hello\r\n\r\n", http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, "127.0.0.1", at)
			if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = io.WriteString(c, tt.request) }() // the answer may come before the whole request is read
			method, _, _ := strings.Cut(tt.request, " ")
			answer, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			if answer.StatusCode != tt.want {
				t.Errorf("answered with %s, want %d", answer.Status, tt.want)
			}
		})
	}
}

// TestEndWithOpenConnections: the server stops soon, whatever its clients do.
func TestEndWithOpenConnections(t *testing.T) {
	t.Parallel()
	poll.Once(t, "the connection is closed", 4*time.Second, func() { // a request has 5 s
		at := freeAddress(t)
		address := feed.New(at)
		start(t, telemetry.Options{Address: address})
		poll.Until(t, "it serves", func() bool { code, _ := get(t, at, "/healthz"); return code == http.StatusOK })
		c := dial(t, "127.0.0.1", at)
		if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost"); err != nil {
			t.Fatal(err)
		}
		address.Publish("")
		if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) ||
			errors.Is(err, context.DeadlineExceeded) {
			t.Error("the connection stays open")
		}
	})
}
