package logwriter_test

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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/logwriter"
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
	w := logwriter.New(writer)
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
	fmt.Fprintln(logwriter.New(writer), "Ready")
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
	w := logwriter.New(to)
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
	w := logwriter.New(to)
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

// blocked is a writer whose first call waits until it is released.
type blocked struct {
	called, released chan struct{}
	bytes.Buffer
}

func (b *blocked) Write(text []byte) (int, error) {
	select {
	case b.called <- struct{}{}:
	default:
	}
	<-b.released
	return b.Buffer.Write(text)
}

// While nothing can be written, the buffer keeps as many bytes as fit, in any number of writes. The
// notice counts every other line, also a single one.
func TestHowMuchIsKept(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	half := strings.Repeat("x", size/2-1) + "\n"
	for _, test := range []struct {
		writes        []string
		kept, dropped int
	}{
		{[]string{half}, size / 2, 0},
		{[]string{half, half}, size, 0},
		{[]string{half, half, half}, size, 1},
		{[]string{half, half, half, "\n"}, size, 2},
		{[]string{half, half, "\n"}, size, 1},
	} {
		to := &blocked{called: make(chan struct{}), released: make(chan struct{})}
		w := logwriter.New(to)
		fmt.Fprint(w, "first\n")
		<-to.called
		for _, text := range test.writes {
			if n, err := fmt.Fprint(w, text); n != len(text) || err != nil {
				t.Errorf("%d of %d bytes, %v", n, len(text), err)
			}
		}
		close(to.released)
		w.FlushWithin(patience)
		got, notice := strings.TrimPrefix(to.String(), "first\n"), ""
		if i := strings.LastIndex(got, "x\n") + 2; i < len(got) {
			got, notice = got[:i], got[i:]
		}
		want := fmt.Sprintf("lines=%d\n", test.dropped)
		if len(got) != test.kept || (notice != "") != (test.dropped > 0) ||
			test.dropped > 0 && !strings.HasSuffix(notice, want) {
			t.Errorf("%d writes: %d bytes kept, want %d; the notice is %q, want %q", len(test.writes), len(got),
				test.kept, notice, want)
		}
	}
}
