package drivervm_test

import (
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
)

// A disk is a disk of a guest with a volatile cache: an NBD server for one client after the other.
// A write is certain to be on the disk after a flush. At a power cut, some of the writes since the
// last flush are lost.
type disk struct {
	mu      sync.Mutex
	durable []byte  // what survives a power cut
	cached  []write // since the last flush
	writes  int     // blocks and flushes that the guest has sent since the last boot
	cutAt   int     // the power is cut at this write or flush; 0 for never
	isOff   bool    // the power is off: nothing more is written
	cut     func()  // ends the guest

	clients sync.WaitGroup
}

type write struct {
	at   uint64
	data []byte
}

// block is what a disk writes as a whole, in bytes.
const block = 4096

// boot is called before a guest starts.
func (d *disk) boot(cutAt int, cut func()) {
	d.clients.Wait() // the last guest's requests are done
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes, d.cutAt, d.cut, d.isOff = 0, cutAt, cut, false
}

// arm cuts the power at a later write or flush: the next one is 1.
func (d *disk) arm(later int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cutAt = d.writes + later
}

// written returns how many blocks and flushes the guest has sent since the last boot.
func (d *disk) written() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.writes
}

// powerCut is called after a guest was killed. Each block that was written since the last flush is kept or lost.
func (d *disk) powerCut(random *rand.Rand) {
	d.clients.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.isOff = true
	for _, w := range d.cached {
		if random.IntN(2) == 0 {
			copy(d.durable[w.at:], w.data)
		}
	}
	d.cached = nil
}

// count counts a write or flush, and reports whether the power is on.
func (d *disk) count() bool {
	if d.isOff {
		return false
	}
	if d.writes++; d.writes == d.cutAt {
		d.isOff = true
		d.cut()
		return false
	}
	return true
}

func (d *disk) read(at uint64, data []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	copy(data, d.durable[at:])
	for _, w := range d.cached {
		from, to := max(at, w.at), min(at+uint64(len(data)), w.at+uint64(len(w.data)))
		if from < to {
			copy(data[from-at:to-at], w.data[from-w.at:])
		}
	}
}

func (d *disk) write(at uint64, data []byte, isDurable bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(data) > 0 && d.count() {
		n := min(len(data), block-int(at%block))
		d.cached = append(d.cached, write{at, data[:n]})
		at, data = at+uint64(n), data[n:]
	}
	if isDurable && !d.isOff {
		d.flushLocked()
	}
}

func (d *disk) flush() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.count() {
		d.flushLocked()
	}
}

func (d *disk) hasNoPower() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.isOff
}

func (d *disk) flushLocked() {
	for _, w := range d.cached {
		copy(d.durable[w.at:], w.data)
	}
	d.cached = nil
}

// Numbers of the NBD protocol: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md.
const (
	nbdMagic, nbdOptions = 0x4e42444d41474943, 0x49484156454f5054
	nbdOptionReply       = 0x3e889045565a9
	nbdRequest           = 0x25609513
	nbdReply             = 0x67446698
	nbdExportName        = 1
	nbdGo                = 7
	nbdAck, nbdInfo      = 1, 3
	nbdUnsupported       = 1<<31 + 1
	nbdFlags             = 1 | 1<<2 | 1<<3 // has flags, flush and FUA
)

// listen serves the disk at a socket until the test ends.
func (d *disk) listen(t *testing.T, socket string) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			d.clients.Add(1)
			_ = d.serve(conn) // ends with the guest
			_ = conn.Close()
			d.clients.Done()
		}
	}()
}

func (d *disk) serve(conn net.Conn) error {
	send := func(values ...any) error {
		for _, v := range values {
			if err := binary.Write(conn, binary.BigEndian, v); err != nil {
				return err
			}
		}
		return nil
	}
	size := uint64(len(d.durable))
	if err := send(uint64(nbdMagic), uint64(nbdOptions), uint16(1|2)); err != nil { // fixed newstyle, no zeroes
		return err
	}
	var flags uint32
	if err := binary.Read(conn, binary.BigEndian, &flags); err != nil {
		return err
	}
	for isOpen := false; !isOpen; {
		var option struct {
			Magic        uint64
			Kind, Length uint32
		}
		if err := binary.Read(conn, binary.BigEndian, &option); err != nil {
			return err
		}
		if _, err := io.CopyN(io.Discard, conn, int64(option.Length)); err != nil {
			return err
		}
		reply := func(kind uint32, data ...any) error {
			length := 0
			for _, v := range data {
				length += binary.Size(v)
			}
			return send(append([]any{uint64(nbdOptionReply), option.Kind, kind, uint32(length)}, data...)...)
		}
		var err error
		switch option.Kind {
		case nbdExportName:
			isOpen, err = true, send(size, uint16(nbdFlags))
		case nbdGo:
			isOpen, err = true, errors.Join(reply(nbdInfo, uint16(0), size, uint16(nbdFlags)), reply(nbdAck))
		default:
			err = reply(nbdUnsupported)
		}
		if err != nil {
			return err
		}
	}
	for {
		var r struct {
			Magic       uint32
			Flags, Kind uint16
			Handle, At  uint64
			Length      uint32
		}
		if err := binary.Read(conn, binary.BigEndian, &r); err != nil {
			return err
		}
		var data []byte
		switch r.Kind {
		case 0: // read
			data = make([]byte, r.Length)
			d.read(r.At, data)
		case 1: // write
			content := make([]byte, r.Length)
			if _, err := io.ReadFull(conn, content); err != nil {
				return err
			}
			d.write(r.At, content, r.Flags&1 != 0)
		case 2: // end
			return nil
		case 3:
			d.flush()
		}
		if d.hasNoPower() {
			return errOff // no answer
		}
		if err := send(uint32(nbdReply), uint32(0), r.Handle, data); err != nil {
			return err
		}
	}
}
