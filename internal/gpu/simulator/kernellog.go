package simulator

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"
)

// maxLog bounds the lines that the simulated kernel's log keeps.
const maxLog = 4096

// A kernelLog is what the kernel logged, as far as it has not been overwritten.
type kernelLog struct {
	mu    sync.Mutex
	lines []string // the latest last
	total int      // how many there were
	more  *sync.Cond
}

func newKernelLog() *kernelLog {
	l := &kernelLog{}
	l.more = sync.NewCond(&l.mu)
	return l
}

// write adds the lines that the driver logs of an XID.
func (l *kernelLog) write(bdf string, f Fault, gi, ci uint32) {
	where := strings.TrimSuffix(bdf, ".0")
	if gi != unattributed {
		where += fmt.Sprintf(" GPU-I:%02d", gi)
	}
	if ci != unattributed {
		where += fmt.Sprintf(" GPU-CI:%02d", ci)
	}
	for range max(f.Count, 1) {
		l.add(fmt.Sprintf("NVRM: Xid (PCI:%s): %d, pid=4242, name=python", where, f.XID))
	}
}

// add adds a line.
func (l *kernelLog) add(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total++
	l.lines = append(l.lines, fmt.Sprintf("4,%d,%d,-;%s\n", l.total, l.total, text))
	l.lines = l.lines[max(0, len(l.lines)-maxLog):]
	l.more.Broadcast()
}

// A logReader reads a kernelLog, one line a Read, as /dev/kmsg is read.
type logReader struct {
	log    *kernelLog
	next   int // the line to read next, counted from the first that there was
	closed bool
}

// KernelLog opens the kernel's log at its end.
func (n *Node) KernelLog() io.ReadCloser {
	n.log.mu.Lock()
	defer n.log.mu.Unlock()
	return &logReader{log: n.log, next: n.log.total}
}

// Read waits for the next line. It answers EPIPE once if that was overwritten.
func (r *logReader) Read(p []byte) (int, error) {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	for r.next == r.log.total && !r.closed {
		r.log.more.Wait()
	}
	oldest := r.log.total - len(r.log.lines)
	switch {
	case r.closed:
		return 0, io.ErrClosedPipe
	case r.next < oldest:
		r.next = oldest
		return 0, syscall.EPIPE
	}
	line := r.log.lines[r.next-oldest]
	if len(p) < len(line) {
		return 0, syscall.EINVAL
	}
	r.next++
	return copy(p, line), nil
}

// Close ends the Read under way.
func (r *logReader) Close() error {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	r.closed = true
	r.log.more.Broadcast()
	return nil
}
