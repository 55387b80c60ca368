package simulator

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"
)

// maxLog is the number of lines kept by the simulated kernel log.
const maxLog = 4096

// A kernelLog has the log lines not overwritten yet.
type kernelLog struct {
	mu    sync.Mutex
	lines []string // latest last
	total int      // number of all lines
	more  *sync.Cond
}

func newKernelLog() *kernelLog {
	l := &kernelLog{}
	l.more = sync.NewCond(&l.mu)
	return l
}

// write adds the driver's log lines for an XID.
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

// A logReader reads a kernelLog like /dev/kmsg, one line for each Read.
type logReader struct {
	log    *kernelLog
	next   int // number of the next line, counted from the first line ever
	closed bool
}

// KernelLog opens the kernel log at its end.
func (n *Node) KernelLog() io.ReadCloser {
	n.log.mu.Lock()
	defer n.log.mu.Unlock()
	return &logReader{log: n.log, next: n.log.total}
}

// Read waits for the next line. It returns EPIPE once if the line was overwritten.
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

// Close aborts a running Read.
func (r *logReader) Close() error {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	r.closed = true
	r.log.more.Broadcast()
	return nil
}
