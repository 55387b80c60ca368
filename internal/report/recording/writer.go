package recording

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// suffix is how the names of recordings end, between prefix and suffix is when the file began.
const (
	prefix = "recording-"
	suffix = ".jsonl"
	stamp  = "20060102T150405.000000000Z"
)

// retryDisk is how long a disk that failed is left alone.
const retryDisk = 10 * time.Second

// maxLedger is how large the ledger of faults can be.
const maxLedger = 1 << 20

// A writer writes the files of a recording. One goroutine uses it.
type writer struct {
	Options
	header   header
	file     io.WriteCloser // nil while the disk fails
	size     int64          // of file
	pending  []byte         // whole lines that are not written yet
	lines    int            // in pending
	failed   time.Time
	err      error             // of the disk, the last
	last     map[string]string // by key: what the last call returned that is in the file
	replaced map[string]string // UUIDs and PCI addresses
}

// newWriter makes the folder and the first file.
func newWriter(o Options) (*writer, error) {
	if o.Files <= 0 {
		o.Files = 4
	}
	if o.Size <= 0 {
		o.Size = 16 << 20
	}
	if o.Create == nil {
		o.Create = func(name string) (io.WriteCloser, error) {
			return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		}
	}
	w := &writer{Options: o, replaced: map[string]string{}}
	w.header = header{Format: format, Program: o.Program, Life: time.Now().UTC(), BootID: o.BootID, Policy: o.Policy}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if err := w.begin(); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	return w, nil
}

// begin begins another file, and removes those that are too many.
func (w *writer) begin() error {
	if w.file != nil {
		if err := w.file.Close(); err != nil {
			w.err = err
		}
		w.file = nil
	}
	old, err := recordings(w.Dir)
	if err != nil {
		return err
	}
	for _, name := range old[:max(0, len(old)-w.Files+1)] {
		// another daemon may record into the folder
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	w.header.Began, w.header.Faults = time.Now().UTC(), ""
	if w.StateDir != "" {
		if faults, err := statefile.Read(filepath.Join(w.StateDir, ledger.FaultsFile), maxLedger); err == nil {
			w.header.Faults = string(faults)
		}
	}
	text, err := json.Marshal(w.header)
	if err != nil {
		return err
	}
	text = append(w.redact(text), '\n')
	name := filepath.Join(w.Dir, prefix+w.header.Began.Format(stamp)+suffix)
	file, err := w.Create(name)
	if err != nil {
		return err
	}
	if _, err := file.Write(text); err != nil {
		_ = file.Close()
		_ = os.Remove(name)
		return err
	}
	w.file, w.size, w.last = file, int64(len(text)), map[string]string{}
	return nil
}

// recordings returns the files of a folder, the oldest first.
func recordings(dir string) ([]string, error) {
	names, err := filepath.Glob(filepath.Join(dir, prefix+"*"+suffix))
	slices.Sort(names)
	return names, err
}

// write takes a line in.
func (w *writer) write(e pendingLine, dropped *atomic.Int64) {
	l, err := e.encode()
	if e.Call == requestPolicy && err == nil {
		_ = json.Unmarshal(l.Args, &w.header.Policy) // it was encoded just now
	}
	if err == nil && w.file != nil && w.size+int64(len(w.pending)) >= w.Size {
		w.flush(dropped)
		err = w.begin()
	}
	if w.file == nil && err == nil && time.Since(w.failed) >= retryDisk {
		err = w.begin()
	}
	if err != nil {
		w.err, w.failed = err, time.Now()
	}
	if err != nil || w.file == nil {
		dropped.Add(1)
		return
	}
	key, value := l.key(), string(l.Value)
	if l.Same = value != "" && w.last[key] == value; l.Same {
		l.Value = nil
	} else if l.Error == nil {
		w.last[key] = value
	}
	l.Dropped = int(dropped.Swap(0))
	text, err := json.Marshal(l)
	if err != nil { // what is in it has been encoded before
		dropped.Add(1)
		return
	}
	w.pending = append(append(w.pending, w.redact(text)...), '\n')
	w.lines++
	if len(w.pending) >= 64<<10 {
		w.flush(dropped)
	}
}

// flush writes what is pending. A file of which a write fails is closed: a reader leaves out a last
// line that is cut off.
func (w *writer) flush(dropped *atomic.Int64) {
	if len(w.pending) == 0 || w.file == nil {
		return
	}
	if _, err := w.file.Write(w.pending); err != nil {
		_ = w.file.Close()
		w.file, w.err, w.failed = nil, err, time.Now()
		dropped.Add(int64(w.lines))
	}
	w.size += int64(len(w.pending))
	w.pending, w.lines = w.pending[:0], 0
}

func (w *writer) close(dropped *atomic.Int64) error {
	w.flush(dropped)
	if w.file != nil {
		if err := w.file.Close(); err != nil {
			w.err = err
		}
	}
	if n := dropped.Load(); n > 0 && w.err == nil {
		return fmt.Errorf("%d lines are missing at the end: the disk is slow", n)
	}
	return w.err
}

// names finds what names a GPU: UUIDs of GPUs, MIG devices and NVLink fabrics, and PCI addresses.
var names = regexp.MustCompile(`(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b|` +
	`pci[0-9a-f]{4}:[0-9a-f]{2}\b`)

// redact replaces names, each by the same one wherever it is.
func (w *writer) redact(text []byte) []byte {
	if !w.Redact {
		return text
	}
	return names.ReplaceAllFunc(text, func(name []byte) []byte {
		key := string(bytes.ToLower(name))
		if _, known := w.replaced[key]; !known {
			n := len(w.replaced) + 1
			switch {
			case strings.HasPrefix(key, "pci"):
				w.replaced[key] = fmt.Sprintf("pci%04x:00", n)
			case strings.Contains(key, ":"):
				w.replaced[key] = fmt.Sprintf("%04x:00:00.0", n)
			default:
				w.replaced[key] = fmt.Sprintf("00000000-0000-4000-8000-%012x", n)
			}
		}
		return []byte(w.replaced[key])
	})
}
