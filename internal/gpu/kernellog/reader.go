// Package kernellog reads the XIDs that the NVIDIA driver writes to the kernel log, in lines such
// as
//
//	NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
//
// Some XIDs are reported nowhere else. Errors of NVSwitches (SXid) are logged, and reported
// separately.
package kernellog

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Path is the kernel log. Each read returns one record.
const Path = "/dev/kmsg"

const (
	maxRecord = 16 << 10    // bytes; the kernel's own limit is 8 KiB
	pause     = time.Second // wait before reading on at an end of input, as in a pipe without a writer
)

// A Reader follows the kernel log.
type Reader struct {
	// Open opens the log at its end.
	Open func() (io.ReadCloser, error)
	// Deliver takes an event. It may block until ctx ends; the kernel buffers the log meanwhile,
	// within limits.
	Deliver func(ctx context.Context, e inventory.Event) error
	// Switch is called for each error of an NVSwitch with its PCI address and SXid. It may be nil.
	Switch func(bdf string, sxid uint64, fatal bool, at time.Time)
	Clock  clock.Clock
}

// Open opens the kernel log at path and skips its content. It does not wait for a writer of a pipe.
func Open(path string) (io.ReadCloser, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("%w: mount it into the container and add the capability SYSLOG; "+
			"some container runtimes also want the container to be privileged", err)
	}
	if err != nil {
		return nil, err
	}
	_, _ = f.Seek(0, io.SeekEnd) // a pipe has nothing to skip
	return f, nil
}

// Run follows the log until ctx ends, and then returns nil, even while a read hangs. The error says
// why the log cannot be read.
func (r *Reader) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	events := make(chan inventory.Event)
	go func() { ended <- r.follow(ctx, events) }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			return failure(ctx, err)
		case e := <-events:
			if err := r.Deliver(ctx, e); err != nil {
				return failure(ctx, err)
			}
		}
	}
}

// failure returns err; nil after the end of ctx, which aborts reads and deliveries.
func failure(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// follow reads the log and sends its XIDs until ctx ends or the log cannot be read.
func (r *Reader) follow(ctx context.Context, events chan<- inventory.Event) error {
	log, err := r.Open()
	if err != nil {
		return fmt.Errorf("read the kernel's log: %w", err)
	}
	closed := context.AfterFunc(ctx, func() { _ = log.Close() }) // aborts a running read
	defer func() {
		if closed() {
			_ = log.Close()
		}
	}()
	in := bufio.NewReaderSize(log, maxRecord)
	var line []byte
	long := false // too long for a line of the driver
	var said time.Time
	var switches switchLog
	for {
		part, err := in.ReadSlice('\n')
		if long = long || len(line)+len(part) > maxRecord; !long {
			line = append(line, part...)
		}
		switch {
		case err == nil:
			if e, ok := parseSwitch(line); ok && !long {
				switches.say(klog.FromContext(ctx), e, r.Clock.Now())
				if r.Switch != nil {
					r.Switch(e.bdf, e.sxid, e.fatal, r.Clock.Now())
				}
			}
			if e, ok := parse(line); ok && !long {
				select {
				case events <- e:
				case <-ctx.Done():
					return nil
				}
			}
			line, long = line[:0], false
		case errors.Is(err, bufio.ErrBufferFull):
		// The kernel overwrote unread lines, and continues with the oldest remaining line.
		case errors.Is(err, syscall.EPIPE):
			if now := r.Clock.Now(); now.Sub(said) >= time.Minute {
				klog.FromContext(ctx).Info("Lines of the kernel's log were overwritten before they were read")
				said = now
			}
			line, long = line[:0], false
		case errors.Is(err, io.EOF):
			select {
			case <-r.Clock.After(pause):
			case <-ctx.Done():
				return nil
			}
		default:
			return fmt.Errorf("read the kernel's log: %w", err)
		}
	}
}

// A switchLog logs errors of NVSwitches: each error at most once a minute, and at most
// maxSwitchErrors a minute. The errors do not affect the health of any GPU.
type switchLog struct {
	since    time.Time
	reported map[switchError]bool
}

const maxSwitchErrors = 100

func (l *switchLog) say(log klog.Logger, e switchError, now time.Time) {
	if l.reported == nil || now.Sub(l.since) >= time.Minute {
		l.since, l.reported = now, map[switchError]bool{}
	}
	if l.reported[e] || len(l.reported) >= maxSwitchErrors {
		return
	}
	l.reported[e] = true
	log.Info("NVSwitch reports an error", "nvswitch", e.bdf, "sxid", e.sxid, "fatal", e.fatal)
}
