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

// The name of a recording is prefix, the start of the file, and suffix.
const (
	prefix = "recording-"
	suffix = ".jsonl"
	stamp  = "20060102T150405.000000000Z"
)

// retryDisk is the pause after a failure of the disk.
const retryDisk = 10 * time.Second

// maxLedger limits the size of the ledger of faults.
const maxLedger = 1 << 20

// A writer writes the files of a recording. It is used by one goroutine.
type writer struct {
	Options
	header       header
	file         io.WriteCloser // nil while the disk fails
	size         int64          // size of file
	pending      []byte         // complete lines that are not written yet
	lines        int            // number of lines in pending
	failed       time.Time
	err          error             // last error of the disk
	last         map[string]string // last value in the file, by key
	replacements map[string]string // replacements of UUIDs and PCI addresses
}

// newWriter creates the folder and the first file.
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
	w := &writer{Options: o, replacements: map[string]string{}}
	w.header = header{Format: format, Program: o.Program, Life: time.Now().UTC(), BootID: o.BootID, Policy: o.Policy}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if err := w.begin(); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	return w, nil
}

// begin begins the next file, and removes the oldest files beyond the limit.
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

// write accepts a line.
func (w *writer) write(e pendingLine, dropped *atomic.Int64) {
	l, err := e.encode()
	if e.Call == requestPolicy && err == nil {
		_ = json.Unmarshal(l.Args, &w.header.Policy) // cannot fail: it was encoded above
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
	if err != nil { // cannot happen: the parts are encoded already
		dropped.Add(1)
		return
	}
	w.pending = append(append(w.pending, w.redact(text)...), '\n')
	w.lines++
	if len(w.pending) >= 64<<10 {
		w.flush(dropped)
	}
}

// flush writes the pending lines. After a failed write the file is closed: a reader drops an
// incomplete last line.
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

// names matches UUIDs of GPUs, MIG devices and NVLink fabrics, and PCI addresses.
var names = regexp.MustCompile(
	`(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b|` +
		`pci[0-9a-f]{4}:[0-9a-f]{2}\b`)

// redact replaces names. The same name always gets the same replacement.
func (w *writer) redact(text []byte) []byte {
	if !w.Redact {
		return text
	}
	return names.ReplaceAllFunc(text, func(name []byte) []byte {
		key := string(bytes.ToLower(name))
		if _, known := w.replacements[key]; !known {
			n := len(w.replacements) + 1
			switch {
			case strings.HasPrefix(key, "pci"):
				w.replacements[key] = fmt.Sprintf("pci%04x:00", n)
			case strings.Contains(key, ":"):
				w.replacements[key] = fmt.Sprintf("%04x:00:00.0", n)
			default:
				w.replacements[key] = fmt.Sprintf("00000000-0000-4000-8000-%012x", n)
			}
		}
		return []byte(w.replacements[key])
	})
}
