// Package logwriter keeps the daemon from blocking on its log while nobody reads standard error.
package logwriter

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2/textlogger"
)

// maxKept is the maximum number of bytes waiting to be written: about 5,000 lines.
const maxKept = 1 << 20

// A Writer forwards its input in a separate goroutine that lives as long as the process. Create a
// Writer with New.
type Writer struct {
	to      io.Writer
	changed chan struct{}      // holds at most one notice
	flushes chan chan struct{} // each channel is closed when all earlier text was forwarded
	json    atomic.Bool        // the writer's own lines are JSON

	mu           sync.Mutex // guards the fields below
	buffer       []byte
	droppedLines int // lines dropped since the last notice
}

// New returns a Writer to the given writer. Only the Writer may write there from now on.
func New(to io.Writer) *Writer {
	w := &Writer{to: to, changed: make(chan struct{}, 1), flushes: make(chan chan struct{})}
	go w.run()
	return w
}

// Write stores text, whole lines only, for the forwarding goroutine. It never blocks and never
// fails. Text over the buffer size is dropped, and a later line reports the number of dropped
// lines.
func (w *Writer) Write(text []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.buffer)+len(text) > maxKept {
		w.droppedLines += lines(text)
		return len(text), nil
	}
	w.buffer = append(w.buffer, text...)
	select {
	case w.changed <- struct{}{}:
	default:
	}
	return len(text), nil
}

// FlushWithin returns when all earlier text was forwarded, or after the limit.
func (w *Writer) FlushWithin(limit time.Duration) {
	late := time.After(limit)
	flushed := make(chan struct{})
	select {
	case w.flushes <- flushed:
	case <-late:
		return
	}
	select {
	case <-flushed:
	case <-late:
	}
}

func (w *Writer) run() {
	for {
		select {
		case <-w.changed:
			w.pass()
		case flushed := <-w.flushes:
			w.pass()
			close(flushed)
		}
	}
}

// pass forwards the stored text. Text that cannot be written counts as dropped.
func (w *Writer) pass() {
	w.mu.Lock()
	kept, dropped := w.buffer, w.droppedLines
	w.buffer, w.droppedLines = nil, 0
	w.mu.Unlock()
	text := kept
	if dropped > 0 {
		text = append(text, w.notice(dropped)...)
	}
	if len(text) == 0 {
		return
	}
	if n, err := w.to.Write(text); err != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.droppedLines += dropped + lines(kept[min(n, len(kept)):])
	}
}

// notice returns the line that reports the number of dropped lines.
func (w *Writer) notice(dropped int) []byte {
	var line bytes.Buffer
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&line)))
	if w.json.Load() {
		log = logr.FromSlogHandler(newHandler(&line))
	}
	log.Info("Dropped log lines that could not be written", "lines", dropped)
	return line.Bytes()
}

func lines(text []byte) int { return bytes.Count(text, []byte("\n")) }
