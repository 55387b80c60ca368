package logwriter

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// patience limits every wait for an expected event.
const patience = time.Minute

// pipe returns a pipe with a buffer of one page.
func pipe(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = reader.Close(), writer.Close() })
	if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, writer.Fd(), syscall.F_SETPIPE_SZ, 4096); errno != 0 {
		t.Fatal(errno)
	}
	return reader, writer
}

// Nobody reads while more lines are written than the buffer holds. A late reader gets the first
// lines in order, and the last line has the number of dropped lines.
func TestWriteNeverBlocks(t *testing.T) {
	t.Parallel()
	reader, writer := pipe(t)
	w := New(writer)
	const total = 100_000 // lines of 100 bytes
	written := make(chan struct{})
	go func() {
		defer close(written)
		for i := range total {
			fmt.Fprintf(w, "%099d\n", i)
		}
	}()
	select {
	case <-written:
	case <-time.After(patience):
		t.Fatal("Write() blocks")
	}
	began := time.Now()
	w.FlushWithin(10 * time.Millisecond)
	if took := time.Since(began); took > patience {
		t.Errorf("FlushWithin(10ms) took %v", took)
	}

	read := make(chan []byte)
	go func() {
		text, _ := io.ReadAll(reader)
		read <- text
	}()
	w.FlushWithin(patience)
	w.FlushWithin(patience) // the first read may have missed the notice
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	got := strings.Split(strings.TrimSuffix(string(<-read), "\n"), "\n")
	kept := got[:len(got)-1]
	for i, line := range kept {
		if line != fmt.Sprintf("%099d", i) {
			t.Fatalf("line %d is %q", i, line)
		}
	}
	if want := fmt.Sprintf(`"Dropped log lines that could not be written" lines=%d`,
		total-len(kept)); !strings.HasSuffix(got[len(got)-1], want) {
		t.Errorf("after %d lines: %q, want %q", len(kept), got[len(got)-1], want)
	}
	if size := 100 * len(kept); size < 1<<19 || size > 2<<20+4096 {
		t.Errorf("%d bytes were kept", size)
	}
}

// Each write is forwarded at once, without a flush.
func TestLinesArePassedOn(t *testing.T) {
	t.Parallel()
	reader, writer := pipe(t)
	fmt.Fprintln(New(writer), "Ready")
	if err := reader.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(reader).ReadString('\n'); line != "Ready\n" {
		t.Errorf("it passed on %q, %v", line, err)
	}
}

// failing is a writer that fails until repaired.
type failing struct {
	mended atomic.Bool
	bytes.Buffer
}

func (f *failing) Write(text []byte) (int, error) {
	if !f.mended.Load() {
		return 0, syscall.EPIPE
	}
	return f.Buffer.Write(text)
}

// Lines that could not be written count as dropped, and their notice is not lost with them.
func TestWritesThatFailAreCounted(t *testing.T) {
	t.Parallel()
	to := &failing{}
	w := New(to)
	for range 3 {
		fmt.Fprint(w, "one\ntwo\n")
		w.FlushWithin(patience)
	}
	to.mended.Store(true)
	fmt.Fprint(w, "last\n")
	w.FlushWithin(patience)
	if got := to.String(); !strings.HasPrefix(got, "last\n") || !strings.HasSuffix(got, "lines=6\n") {
		t.Errorf("it wrote %q, want the last line and a notice of 6", got)
	}
	to.Reset()
	fmt.Fprint(w, "all is well\n")
	w.FlushWithin(patience)
	if got := to.String(); got != "all is well\n" {
		t.Errorf("it wrote %q, want no second notice", got)
	}
}

// writes is a writer that counts its calls.
type writes struct {
	atomic.Int64
	bytes.Buffer
}

func (w *writes) Write(text []byte) (int, error) {
	w.Add(1)
	return w.Buffer.Write(text)
}

// After a flush everything is written, and where there is nothing, nothing is.
func TestFlush(t *testing.T) {
	t.Parallel()
	to := &writes{}
	w := New(to)
	var want strings.Builder
	for i := range 100 {
		for _, to := range []io.Writer{w, &want} {
			fmt.Fprintln(to, i)
		}
		w.FlushWithin(patience)
		if got := to.String(); got != want.String() {
			t.Fatalf("after flush %d: %q", i, got)
		}
		w.FlushWithin(patience)
	}
	if n := to.Load(); n != 100 {
		t.Errorf("100 lines in %d writes", n)
	}
}

// The buffer keeps as many bytes as fit, in any number of writes.
func TestHowMuchIsKept(t *testing.T) {
	t.Parallel()
	line := bytes.Repeat([]byte("x"), maxKept/2-1)
	line = append(line, '\n')
	w := &Writer{changed: make(chan struct{}, 1)} // without a forwarding goroutine
	for i, want := range []int{maxKept / 2, maxKept, maxKept} {
		if n, err := w.Write(line); n != len(line) || err != nil || len(w.buffer) != want ||
			w.droppedLines != max(0, i-1) {
			t.Errorf("write %d: %d, %v; %d bytes kept, want %d; %d lines dropped", i, n, err, len(w.buffer), want,
				w.droppedLines)
		}
	}
	if _, _ = w.Write([]byte("\n")); len(w.buffer) != maxKept || w.droppedLines != 2 {
		t.Errorf("one byte more: %d bytes kept, %d lines dropped", len(w.buffer), w.droppedLines)
	}
}

// A single dropped line is also reported.
func TestOneDroppedLine(t *testing.T) {
	t.Parallel()
	var to bytes.Buffer
	w := &Writer{to: &to, droppedLines: 1}
	w.pass()
	if got := to.String(); !strings.HasSuffix(got, "lines=1\n") {
		t.Errorf("it wrote %q", got)
	}
}

// A flush forwards lines without a notice.
func TestFlushWithoutNotice(t *testing.T) {
	t.Parallel()
	var to bytes.Buffer
	w := &Writer{to: &to, changed: make(chan struct{}, 1), flushes: make(chan chan struct{}), buffer: []byte("a\n")}
	go w.run()
	w.FlushWithin(patience)
	if got := to.String(); got != "a\n" {
		t.Errorf("it wrote %q", got)
	}
}
