package kubeapi_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// TestFailuresLostByLibrary shows why this package reads watches itself (ADR 50). The Reflector, the
// RetryWatcher and the typed clients of client-go all watch by rest.Request.Watch. It reports these
// failures as a watch that ended without an error, and reads an event of any size into memory. The
// Client reports each of them as its Problem, and reads no more of an event than its limit.
func TestFailuresLostByLibrary(t *testing.T) {
	t.Parallel()
	const half = `{"type": "MODIFIED", "object": "`
	for name, tt := range map[string]struct {
		answer  func(io.Writer)
		problem string
		bytes   int64 // what the API server sends, if anybody reads it
	}{
		"no answer":         {func(io.Writer) { panic(http.ErrAbortHandler) }, "EOF", 0},
		"half of an event":  {func(w io.Writer) { fmt.Fprint(w, half) }, "unexpected EOF", int64(len(half))},
		"event without end": {func(w io.Writer) { fmt.Fprint(w, half); writeMegabytes(w, 64) }, "more than 4194304 bytes", int64(len(half)) + 64<<20},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var sent atomic.Int64 // bytes of the last watch
			answer := func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				if r.URL.Query().Get("watch") == "" {
					fmt.Fprint(w, `{"metadata": {"resourceVersion": "5"}, "items": []}`)
					return
				}
				c := &countingWriter{Writer: w}
				tt.answer(c)
				sent.Store(c.bytes)
			}
			server := httptest.NewServer(http.HandlerFunc(answer))
			t.Cleanup(server.Close)
			api, err := rest.UnversionedRESTClientFor(&rest.Config{Host: server.URL,
				ContentConfig: rest.ContentConfig{NegotiatedSerializer: scheme.Codecs.WithoutConversion()}})
			if err != nil {
				t.Fatal(err)
			}
			const canReplace = "client-go may now replace the code of this package: %v"
			watch, err := api.Get().AbsPath("/api/v1/nodes").Param("watch", "true").MaxRetries(0).Watch(t.Context())
			if err != nil {
				t.Fatalf(canReplace, err)
			}
			for event := range watch.ResultChan() {
				t.Errorf(canReplace, event)
			}
			server.Close() // waits for the handler
			if sent.Load() != tt.bytes {
				t.Errorf(canReplace, fmt.Sprintf("read %d of %d bytes", sent.Load(), tt.bytes))
			}

			client := answering(t, answer)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				client.Watch(ctx, unpaused{})
			}()
			t.Cleanup(func() { cancel(); <-ended })
			awaitProblem(t, client, tt.problem)
			if sent.Load() >= 64<<20 {
				t.Errorf("the Client has read %d bytes of an event", sent.Load())
			}
		})
	}
}

// writeMegabytes writes n MiB, or less if the reader goes away.
func writeMegabytes(w io.Writer, n int) {
	megabyte := strings.Repeat("x", 1<<20)
	for range n {
		if _, err := io.WriteString(w, megabyte); err != nil {
			return
		}
	}
}

// A countingWriter counts the bytes that were written.
type countingWriter struct {
	io.Writer
	bytes int64
}

func (w *countingWriter) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	w.bytes += int64(n)
	return n, err
}
