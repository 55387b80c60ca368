package driverfetch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfetch"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}

// archive is larger than the buffers of a connection.
var archive = bytes.Repeat([]byte("0123456789abcdef"), 1<<19)

// A server sends the archive in parts if it is asked for one.
type server struct {
	*httptest.Server
	// answer answers a request in place of that; nil for none.
	answer func(w http.ResponseWriter, r *http.Request)

	mu     sync.Mutex
	ranges []string // of the requests, in their order
	sent   int      // bytes of the archive
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.ranges = append(s.ranges, r.Header.Get("Range"))
	answer := s.answer
	s.mu.Unlock()
	if answer != nil {
		answer(w, r)
		return
	}
	s.send(w, r)
}

// send sends what is asked for.
func (s *server) send(w http.ResponseWriter, r *http.Request) {
	http.ServeContent(&counting{w, s}, r, "", time.Time{}, bytes.NewReader(archive))
}

// let changes the answers.
func (s *server) let(answer func(w http.ResponseWriter, r *http.Request)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

func (s *server) seen() (ranges []string, sent int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ranges), s.sent
}

func (s *server) count(bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent += bytes
}

type counting struct {
	http.ResponseWriter
	server *server
}

func (c *counting) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.server.count(n)
	return n, err
}

// A node downloads archives to a directory.
type node struct {
	*testing.T
	options driverfetch.Options
	fetcher *driverfetch.Fetcher
	stop    func()

	mu     sync.Mutex
	placed []string // digests of the unpacked content
	refuse error    // of Unpack
}

func newNode(t *testing.T, s *server) *node {
	t.Helper()
	n := &node{T: t}
	n.options = driverfetch.Options{Directory: t.TempDir(), From: []string{s.URL}, Root: t.TempDir(), Unpack: n.unpack,
		Stall: 10 * time.Second, Pause: time.Millisecond, LongPause: time.Hour}
	return n
}

func (n *node) unpack(_ context.Context, file *os.File, digest string, progress func(int)) error {
	content, err := io.ReadAll(file)
	progress(50)
	n.mu.Lock()
	defer n.mu.Unlock()
	if got := standinkernel.Digest(content); got != digest {
		n.Errorf("unpacked %s, want %s", got, digest)
	}
	if n.refuse == nil {
		n.placed = append(n.placed, digest)
	}
	return errors.Join(err, n.refuse)
}

// start begins a new process.
func (n *node) start() *node {
	n.Helper()
	fetcher, err := driverfetch.New(n.options)
	if err != nil {
		n.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		fetcher.Run(ctx)
	}()
	n.fetcher, n.stop = fetcher, func() {
		cancel()
		<-done
	}
	n.Cleanup(n.stop)
	return n
}

func (n *node) ask(source, digest string) {
	n.Helper()
	if err := n.fetcher.Ask(source, digest); err != nil {
		n.Fatal(err)
	}
}

// awaitPlaced waits until archives are placed.
func (n *node) awaitPlaced(number int) {
	n.Helper()
	poll.Until(n.T, "the archive is placed", func() bool {
		if d := n.fetcher.Status(); d != nil && d.IsFinal {
			n.Fatal(d.Problem)
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.placed) == number
	})
	poll.Until(n.T, "nothing is left", func() bool { return len(n.left()) == 0 && n.fetcher.Status() == nil })
}

// awaitProblem returns the progress after a try has failed.
func (n *node) awaitProblem(want string) (d driverapi.Download) {
	n.Helper()
	poll.Until(n.T, "the problem "+want, func() bool {
		if now := n.fetcher.Status(); now != nil {
			d = *now
		}
		return strings.Contains(d.Problem, want) && (want != "" || d.Problem != "")
	})
	return d
}

func (n *node) left() (all []string) {
	entries, err := os.ReadDir(n.options.Directory)
	if err != nil {
		n.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// hijack sends raw bytes and closes the connection.
func hijack(w http.ResponseWriter, parts ...[]byte) {
	c, _, err := w.(http.Hijacker).Hijack() //nolint:forcetypeassert // of net/http
	if err != nil {
		panic(err)
	}
	for _, p := range parts {
		_, _ = c.Write(p)
	}
	_ = c.Close()
}

// What servers answer. A problem is final if only a person can help.
func TestAnswers(t *testing.T) {
	t.Parallel()
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
	}
	redirect := func(to string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, to, http.StatusFound) }
	}
	half := archive[:len(archive)/2]
	for name, tt := range map[string]struct {
		answer  http.HandlerFunc
		want    string // of the problem; empty if the archive is placed
		isFinal bool
		keeps   bool // a part stays
	}{
		"a good one": {nil, "", false, false},
		"without a length": {func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush() //nolint:forcetypeassert // of net/http
			_, _ = w.Write(archive)
		}, "", false, false},
		"not found":         {status(404), "the server answers 404 Not Found", true, true},
		"forbidden":         {status(403), "the server answers 403 Forbidden", true, true},
		"an error":          {status(500), "the server answers 500 Internal Server Error", false, true},
		"too many requests": {status(429), "the server answers 429 Too Many Requests", false, true},
		"no content":        {status(204), "the server answers 204 No Content", true, true},
		"another file": {func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("#!/bin/sh")) },
			"and not sha256:" + standinkernel.Digest(archive) + ": correct driver.source or driver.sha256", true, false},
		"half an answer": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", len(archive)), half)
		}, "unexpected EOF", false, true},
		"half an answer without a length": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, []byte("HTTP/1.0 200 OK\r\n\r\n"), half)
		}, "correct driver.source or driver.sha256", true, false},
		"half a chunk": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, []byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n"), half)
		}, "", false, true},
		"more than its length": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, []byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"), archive)
		}, "correct driver.source or driver.sha256", true, false},
		"a part that nobody wants": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Range", "bytes 5-9/100")
			w.WriteHeader(http.StatusPartialContent)
		}, `the server was asked for the bytes from 0 on, and sends "bytes 5-9/100"`, false, true},
		"a huge file": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, []byte("HTTP/1.1 200 OK\r\nContent-Length: 9000000000\r\n\r\n"))
		}, "more than 8 GB", true, true},
		"more than the disk has": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, []byte("HTTP/1.1 200 OK\r\nContent-Length: 8589934592\r\n\r\n"))
		}, "", false, true}, // by the machine, no space or a short answer
		"garbage":              {func(w http.ResponseWriter, _ *http.Request) { hijack(w, []byte("SSH-2.0-a\r\n")) }, "malformed HTTP", false, true},
		"an endless head":      {func(w http.ResponseWriter, _ *http.Request) { hijack(w, []byte("HTTP/1.1 200 OK\r\nA: "), archive) }, "exceeded", false, true},
		"a redirect in a ring": {redirect("/"), "redirects more than 10 times", true, true},
		"a redirect to a file": {redirect("file:///etc/passwd"), "the server redirects to file:", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			s.answer = tt.answer
			n := newNode(t, s).start()
			n.ask(s.URL+"/d.tar.gz?token=secret", standinkernel.Digest(archive))
			if tt.answer == nil || name == "without a length" {
				n.awaitPlaced(1)
				return
			}
			d := n.awaitProblem(tt.want)
			if name != "more than the disk has" && d.IsFinal != tt.isFinal || strings.Contains(d.Problem+d.Source, "secret") {
				t.Errorf("the problem %q of %s is final: %v, want %v", d.Problem, d.Source, d.IsFinal, tt.isFinal)
			}
			n.stop()
			if left := n.left(); !tt.keeps && len(left) > 0 {
				t.Errorf("left: %v after %+v", left, d)
			}
			if len(n.placed) > 0 {
				t.Errorf("placed: %v", n.placed)
			}
		})
	}
}

// A cutting writer closes the connection after some bytes.
type cutting struct {
	http.ResponseWriter
	server *server
	left   int
}

func (c *cutting) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p[:min(len(p), c.left)])
	if c.left -= n; c.left == 0 {
		c.ResponseWriter.(http.Flusher).Flush() //nolint:forcetypeassert // of net/http
		c.server.count(n)
		panic(http.ErrAbortHandler)
	}
	return n, err
}

// An interrupted download goes on where it stopped, also in another process: no byte is sent twice.
func TestResume(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	n := newNode(t, s)
	digest := standinkernel.Digest(archive)
	at := len(archive) / 3
	// The connection ends in the middle, and then the server has an error until the process ends.
	var cuts sync.Once
	s.let(func(w http.ResponseWriter, r *http.Request) {
		isFirst := false
		cuts.Do(func() { isFirst = true })
		if isFirst {
			s.send(&cutting{w, s, at}, r)
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	n.start()
	n.ask(s.URL+"/d", digest)
	n.awaitProblem("503")
	n.stop()
	if info, err := os.Stat(filepath.Join(n.options.Directory, digest+".partial")); err != nil || info.Size() != int64(at) {
		t.Fatalf("the part: %v, %v; want %d bytes", info, err, at)
	}
	s.let(nil)
	n.start()
	n.ask(s.URL+"/d", digest)
	n.awaitPlaced(1)
	ranges, sent := s.seen()
	if ranges[0] != "" || ranges[len(ranges)-1] != fmt.Sprintf("bytes=%d-", at) || sent != len(archive) {
		t.Errorf("requests for %q, %d bytes sent; the archive has %d", ranges, sent, len(archive))
	}

	// A whole part, of a process that was killed before it could unpack it, needs no request.
	n.stop()
	if err := os.WriteFile(filepath.Join(n.options.Directory, digest+".partial"), archive, 0o600); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.ask(s.URL+"/d", digest)
	n.awaitPlaced(2)
	if now, _ := s.seen(); len(now) != len(ranges) {
		t.Errorf("%d requests for a whole part", len(now)-len(ranges))
	}
}

// A part that is of another file, and a server that cannot go on, make the download begin again.
func TestResumeThatIsNotPossible(t *testing.T) {
	t.Parallel()
	digest := standinkernel.Digest(archive)
	for name, tt := range map[string]struct {
		part   []byte
		answer func(s *server) http.HandlerFunc
		ranges []string
	}{
		"a part of another file": {make([]byte, 1000), nil, []string{"bytes=1000-", ""}},
		"a part that is longer":  {make([]byte, len(archive)+1), nil, []string{fmt.Sprintf("bytes=%d-", len(archive)+1), ""}},
		"a server without parts": {archive[:1000], func(*server) http.HandlerFunc {
			return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(archive) }
		}, []string{"bytes=1000-"}},
		"a server with another part": {archive[:1000], func(s *server) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Range") != "" {
					r.Header.Set("Range", "bytes=0-")
				}
				s.send(w, r)
			}
		}, []string{"bytes=1000-", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			if tt.answer != nil {
				s.answer = tt.answer(s)
			}
			n := newNode(t, s)
			if err := os.WriteFile(filepath.Join(n.options.Directory, digest+".partial"), tt.part, 0o600); err != nil {
				t.Fatal(err)
			}
			n.start()
			n.ask(s.URL+"/d", digest)
			n.awaitPlaced(1)
			if ranges, _ := s.seen(); cmp.Diff(tt.ranges, ranges) != "" {
				t.Errorf("requests for %q, want %q", ranges, tt.ranges)
			}
		})
	}
}

// A server that hangs, before its answer or in the middle of it, is given up, and the download goes on.
func TestServerThatHangs(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	n := newNode(t, s)
	n.options.Stall = time.Second
	var tries int
	s.let(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		tries++
		try := tries
		s.mu.Unlock()
		switch try {
		case 1:
			<-r.Context().Done()
		case 2:
			w.Header().Set("Content-Length", fmt.Sprint(len(archive)))
			_, _ = w.Write(archive[:1<<20])
			w.(http.Flusher).Flush() //nolint:forcetypeassert // of net/http
			<-r.Context().Done()
		default:
			s.send(w, r)
		}
	})
	n.start()
	n.ask(s.URL+"/d", standinkernel.Digest(archive))
	n.awaitPlaced(1)
	// On a slow machine the third try may be given up as well, and the next one has a range again.
	if ranges, _ := s.seen(); len(ranges) < 3 || ranges[2] != fmt.Sprintf("bytes=%d-", 1<<20) {
		t.Errorf("requests for %q", ranges)
	}
}

// A full disk is given up, and its part goes: others need the space.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	s := newServer(t)
	n := newNode(t, s).start()
	ownprocess.LimitFiles(t, 1<<20)
	n.ask(s.URL+"/d", standinkernel.Digest(archive))
	d := n.awaitProblem("file too large")
	ownprocess.LimitFiles(t, 0)
	if left := n.left(); !d.IsFinal || len(left) > 0 {
		t.Errorf("%+v, left %v", d, left)
	}
}

// An archive that cannot be unpacked is not downloaded again.
func TestArchiveThatCannotBeUnpacked(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	n := newNode(t, s)
	n.options.LongPause, n.refuse = time.Millisecond, errors.New("pack it first")
	n.start()
	n.ask(s.URL+"/d", standinkernel.Digest(archive))
	if d := n.awaitProblem("pack it first"); !d.IsFinal {
		t.Errorf("%+v", d)
	}
	n.mu.Lock()
	n.refuse = nil
	n.mu.Unlock()
	poll.Until(t, "the archive is placed", func() bool { return n.fetcher.Status() == nil })
	if ranges, _ := s.seen(); len(ranges) != 1 || len(n.left()) > 0 {
		t.Errorf("%d requests, left %v", len(ranges), n.left())
	}
}

// Another archive takes the place of the present one, with its part, and an archive that nobody asks for
// any more is not downloaded on.
func TestAnotherArchive(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	hangs := func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write(archive[:1<<20])
		w.(http.Flusher).Flush() //nolint:forcetypeassert // of net/http
		<-r.Context().Done()
	}
	s.let(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/slow") {
			hangs(w, r)
			return
		}
		s.send(w, r)
	})
	n := newNode(t, s)
	old := filepath.Join(n.options.Directory, strings.Repeat("a", 64)+".partial")
	yesterday := time.Now().Add(-25 * time.Hour)
	if err := errors.Join(os.WriteFile(old, nil, 0o600), os.Chtimes(old, yesterday, yesterday)); err != nil {
		t.Fatal(err)
	}
	n.start()
	if left := n.left(); len(left) > 0 {
		t.Errorf("left of yesterday: %v", left)
	}
	other := strings.Repeat("b", 64)
	n.ask(s.URL+"/slow", other)
	poll.Until(t, "the first part", func() bool { d := n.fetcher.Status(); return d != nil && d.Done == 1<<20 })
	n.ask(s.URL+"/d", standinkernel.Digest(archive))
	n.awaitPlaced(1)

	n.stop()
	n.options.AskedFor, n.options.Stall = time.Millisecond, 300*time.Millisecond
	n.start()
	n.ask(s.URL+"/slow", other)
	poll.Until(t, "the end of a download that nobody asks for", func() bool { return n.fetcher.Status() == nil })
}
