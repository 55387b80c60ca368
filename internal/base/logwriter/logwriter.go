// Package logwriter keeps logging from blocking the daemon while nobody reads its standard error.
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

// maxKept is how many bytes wait at most to be written: some 5,000 lines.
const maxKept = 1 << 20

// A Writer passes on what is written to it, in a goroutine of its own, which lives as long as the
// process. Make one with New.
type Writer struct {
	to      io.Writer
	changed chan struct{}      // holds one notice
	flushes chan chan struct{} // closed when everything written before was passed on
	json    atomic.Bool        // the writer's own lines are JSON

	mu      sync.Mutex // guards what follows
	kept    []byte
	dropped int // lines, since a line said how many
}

// New returns a Writer to w. Only the Writer may write to w from now on.
func New(to io.Writer) *Writer {
	w := &Writer{to: to, changed: make(chan struct{}, 1), flushes: make(chan chan struct{})}
	go w.run()
	return w
}

// Write keeps text, whole lines, until it can be passed on. It never blocks and never fails: text
// for which there is no room is dropped. A later line says how many lines were.
func (w *Writer) Write(text []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.kept)+len(text) > maxKept {
		w.dropped += lines(text)
		return len(text), nil
	}
	w.kept = append(w.kept, text...)
	select {
	case w.changed <- struct{}{}:
	default:
	}
	return len(text), nil
}

// FlushWithin returns when everything written before was passed on, and no later than after limit.
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

// pass passes on what is kept. What cannot be written counts as dropped.
func (w *Writer) pass() {
	w.mu.Lock()
	kept, dropped := w.kept, w.dropped
	w.kept, w.dropped = nil, 0
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
		w.dropped += dropped + lines(kept[min(n, len(kept)):])
	}
}

// notice is the line that says how many lines were dropped.
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
