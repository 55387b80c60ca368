package kernellog_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/kernellog"
)

const soon = time.Minute

// record is a record of the log with an XID of the GPU at 0000:3b:00.0.
func record(xid int) string {
	return fmt.Sprintf("4,%d,5678901,-;NVRM: Xid (PCI:0000:3b:00): %d, pid=1234, name=python\n", xid, xid)
}

// follow runs a reader of what open gives and returns the XIDs that it delivers, and how it ended.
func follow(t *testing.T, open func() (io.ReadCloser, error)) (xids chan uint64, ended chan error, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	xids, ended = make(chan uint64), make(chan error, 1)
	r := kernellog.Reader{Open: open, Clock: clock.RealClock{},
		Deliver: func(ctx context.Context, e inventory.Event) error {
			if e.BDF != "0000:3b:00.0" || e.Kind != inventory.EventXID || !e.Logged {
				t.Errorf("got the event %+v", e)
			}
			select {
			case xids <- e.XID:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}}
	go func() { ended <- r.Run(ctx) }()
	return xids, ended, cancel
}

// want fails unless the next XIDs are the given ones.
func want(t *testing.T, xids <-chan uint64, codes ...uint64) {
	t.Helper()
	for _, code := range codes {
		select {
		case got := <-xids:
			if got != code {
				t.Fatalf("XID %d, want %d", got, code)
			}
		case <-time.After(soon):
			t.Fatalf("XID %d was not told within %v", code, soon)
		}
	}
}

// wantEnd fails unless the reader ends.
func wantEnd(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(soon):
		t.Fatalf("the reader did not end within %v", soon)
		return nil
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func opener(path string) func() (io.ReadCloser, error) {
	return func() (io.ReadCloser, error) { return kernellog.Open(path) }
}

// TestPipe follows a pipe whose writers come and go, before any has come, too.
func TestPipe(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	xids, ended, stop := follow(t, opener(path))
	for _, code := range []int{79, 119} {
		write(t, path, "6,1,1,-;usb 1-1: new device\n SUBSYSTEM=usb\n"+record(code))
		want(t, xids, uint64(code))
	}
	stop()
	if err := wantEnd(t, ended); err != nil {
		t.Errorf("ended with %v", err)
	}
}

// TestFile tells what comes after the reading begins, also line by line in pieces.
func TestFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := os.WriteFile(path, []byte(record(13)), 0o600); err != nil {
		t.Fatal(err)
	}
	opened := make(chan struct{})
	xids, _, _ := follow(t, func() (io.ReadCloser, error) {
		defer close(opened)
		return kernellog.Open(path)
	})
	<-opened
	line := record(62)
	write(t, path, line[:40])
	write(t, path, line[40:]+record(48))
	want(t, xids, 62, 48)
}

// TestWhatIsNoXID leaves it out, however long, and goes on.
func TestWhatIsNoXID(t *testing.T) {
	t.Parallel()
	long := "4,1,1,-;" + strings.Repeat("x", 1<<20) + "NVRM: Xid (PCI:0000:3b:00): 95, x\n"
	text := "\n\n4,1,1,-;NVRM: Xid (PCI:0000:3b:00): \n\x00\xff\n" + record(48) + long + record(79)
	xids, _, _ := follow(t, func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil })
	want(t, xids, 48, 79)
}

// TestBurst: ten thousand lines at once are all told, in order, to one who takes his time, and none
// is kept in memory.
func TestBurst(t *testing.T) {
	t.Parallel()
	const lines = 10_000
	text := &strings.Builder{}
	for i := range lines {
		text.WriteString(record(i + 1))
	}
	read := 0
	source := readerFunc(func(p []byte) (int, error) {
		if read == text.Len() {
			return 0, io.EOF
		}
		n := copy(p, text.String()[read:])
		read += n
		return n, nil
	})
	xids, _, _ := follow(t, func() (io.ReadCloser, error) { return source, nil })
	var before, after runtime.MemStats
	want(t, xids, 1)
	runtime.ReadMemStats(&before)
	for i := range uint64(lines - 1) {
		want(t, xids, i+2)
	}
	runtime.ReadMemStats(&after)
	if after.HeapAlloc > before.HeapAlloc+32<<20 {
		t.Errorf("%d bytes more in use after the burst", after.HeapAlloc-before.HeapAlloc)
	}
}

// TestLineWithoutEnd: as much of it is kept as a record can have, and what comes after it is told.
func TestLineWithoutEnd(t *testing.T) {
	const length = 256 << 20
	xs := bytes.Repeat([]byte("x"), 1<<20)
	left, end := length, strings.NewReader("\n"+record(79))
	source := readerFunc(func(p []byte) (int, error) {
		if left == 0 {
			return end.Read(p)
		}
		n := min(len(p), left, len(xs))
		left -= n
		return copy(p[:n], xs), nil
	})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	xids, _, _ := follow(t, func() (io.ReadCloser, error) { return source, nil })
	want(t, xids, 79)
	runtime.ReadMemStats(&after)
	if grown := after.HeapSys - min(before.HeapSys, after.HeapSys); grown > length/4 {
		t.Errorf("the heap grew by %d bytes for a line of %d", grown, length)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
func (f readerFunc) Close() error               { return nil }

// TestLogThatWraps goes on with what the kernel still has.
func TestLogThatWraps(t *testing.T) {
	t.Parallel()
	answers := []any{record(48), "4,1,1,-;NVRM: Xid (PCI:0000:3b", syscall.EPIPE, syscall.EPIPE, record(79)}
	xids, ended, _ := follow(t, func() (io.ReadCloser, error) {
		return readerFunc(func(p []byte) (int, error) {
			if len(answers) == 0 {
				return 0, &os.PathError{Op: "read", Path: "kmsg", Err: syscall.EIO}
			}
			next := answers[0]
			answers = answers[1:]
			if text, ok := next.(string); ok {
				return copy(p, text), nil
			}
			return 0, &os.PathError{Op: "read", Path: "kmsg", Err: next.(error)}
		}), nil
	})
	want(t, xids, 48, 79)
	if err := wantEnd(t, ended); !errors.Is(err, syscall.EIO) {
		t.Errorf("ended with %v, want the error of the log", err)
	}
}

// TestLogThatDoesNotAnswer keeps the end from nothing.
func TestLogThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	never := make(chan struct{})
	t.Cleanup(func() { close(never) })
	for name, open := range map[string]func(called chan<- struct{}) (io.ReadCloser, error){
		"open": func(called chan<- struct{}) (io.ReadCloser, error) {
			close(called)
			<-never
			return nil, io.EOF
		},
		"read": func(called chan<- struct{}) (io.ReadCloser, error) {
			return readerFunc(func([]byte) (int, error) {
				close(called)
				<-never
				return 0, io.EOF
			}), nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			called := make(chan struct{})
			_, ended, stop := follow(t, func() (io.ReadCloser, error) { return open(called) })
			select {
			case <-called:
			case <-time.After(soon):
				t.Fatalf("not called within %v", soon)
			}
			stop()
			if err := wantEnd(t, ended); err != nil {
				t.Errorf("ended with %v", err)
			}
		})
	}
}

// TestEndWhileNothingComes: a read that waits is ended, and one that has nobody to tell its XID.
func TestEndWhileNothingComes(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(path, os.O_RDWR, 0) // as long as it is open, a read waits
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	_, ended, stop := follow(t, opener(path))
	if _, err := writer.WriteString(record(79)); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := wantEnd(t, ended); err != nil {
		t.Errorf("ended with %v", err)
	}
}

// TestEndIsNoFailure: the read that the end of ctx ends fails, and Run does not.
func TestEndIsNoFailure(t *testing.T) {
	for range 300 {
		reads, writes := io.Pipe()
		xids, ended, stop := follow(t, func() (io.ReadCloser, error) { return reads, nil })
		go func() { _, _ = io.WriteString(writes, record(79)) }()
		want(t, xids, 79)
		stop()
		if err := wantEnd(t, ended); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLogThatCannotBeOpened(t *testing.T) {
	t.Parallel()
	_, ended, _ := follow(t, opener(filepath.Join(t.TempDir(), "kmsg")))
	if err := wantEnd(t, ended); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("ended with %v, want that there is no log", err)
	}
	_, ended, _ = follow(t, func() (io.ReadCloser, error) { return nil, syscall.EPERM })
	if err := wantEnd(t, ended); !errors.Is(err, os.ErrPermission) {
		t.Errorf("ended with %v, want that it is not allowed", err)
	}
	_, ended, _ = follow(t, opener("/proc/sys/vm/compact_memory")) // root may not read it either
	if err := wantEnd(t, ended); !errors.Is(err, os.ErrPermission) ||
		!strings.Contains(err.Error(), "capability SYSLOG") {
		t.Errorf("ended with %v, want that it is not allowed, and what helps", err)
	}
}

// TestKernelsOwnLog waits for a record, without an error, until it is stopped.
func TestKernelsOwnLog(t *testing.T) {
	t.Parallel()
	log, err := kernellog.Open(kernellog.Path)
	if err != nil {
		t.Skip(err)
	}
	opened := make(chan struct{})
	xids, ended, stop := follow(t, func() (io.ReadCloser, error) {
		close(opened)
		return log, nil
	})
	<-opened
	select {
	case xid := <-xids:
		t.Logf("XID %d", xid)
	case err := <-ended:
		t.Errorf("ended with %v", err)
	case <-time.After(50 * time.Millisecond): // that it waits can only be seen by waiting
	}
	stop()
	if err := wantEnd(t, ended); err != nil {
		t.Errorf("ended with %v", err)
	}
}

// A closing log tells when it is closed.
type closing struct {
	io.Reader
	closed chan struct{}
}

func (c closing) Close() error {
	close(c.closed)
	return nil
}

// TestTheLogIsClosed: once, when the reader is stopped and when the log cannot be read any more.
func TestTheLogIsClosed(t *testing.T) {
	t.Parallel()
	for name, log := range map[string]io.Reader{
		"the reader is stopped": strings.NewReader(""),
		"the log has an error":  readerFunc(func([]byte) (int, error) { return 0, syscall.EIO }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			closed := make(chan struct{})
			_, ended, stop := follow(t, func() (io.ReadCloser, error) { return closing{log, closed}, nil })
			if name == "the reader is stopped" {
				stop()
			}
			select {
			case <-closed:
			case <-time.After(soon):
				t.Errorf("not closed within %v", soon)
			}
			_ = wantEnd(t, ended)
		})
	}
}

// TestOverwrittenLinesAreLoggedOnceAMinute: a kernel that writes faster than it is read has this
// reader write little.
func TestOverwrittenLinesAreLoggedOnceAMinute(t *testing.T) {
	t.Parallel()
	var said atomic.Int32
	log := funcr.New(func(_, args string) {
		if strings.Contains(args, "were overwritten") {
			said.Add(1)
		}
	}, funcr.Options{})
	hands := clocktesting.NewFakeClock(time.Now())
	reads := 0
	r := kernellog.Reader{Clock: hands, Open: func() (io.ReadCloser, error) {
		return readerFunc(func([]byte) (int, error) {
			switch reads++; reads {
			case 3, 4:
				hands.Step(45 * time.Second)
			case 6:
				return 0, syscall.EIO
			}
			return 0, syscall.EPIPE
		}), nil
	}}
	if err := r.Run(klog.NewContext(t.Context(), log)); !errors.Is(err, syscall.EIO) {
		t.Errorf("ended with %v", err)
	}
	if said.Load() != 2 {
		t.Errorf("logged %d times in 90 s, want twice", said.Load())
	}
}
