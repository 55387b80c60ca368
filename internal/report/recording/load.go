package recording

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

const (
	// maxLine limits the length of a line: a Scan of the largest node has less than 1 MiB.
	maxLine = 4 << 20
	// maxFile limits the size of a file to play: the whole file is read into memory.
	maxFile = 256 << 20
)

// A Recording is ready to play: one file, or the files of one recording.
type Recording struct {
	// Policy is the health policy that was in force, and BootID the node's boot ID.
	Policy health.Policy
	BootID string
	// Program is the version of the recording program.
	Program string
	// Faults is the ledger of faults at the start; empty without one.
	Faults string
	// Dropped counts the missing lines. CutOff is true if the last line of a file was incomplete.
	Dropped int
	CutOff  bool

	began time.Time
	lines []line
}

// Length is the playing time.
func (r *Recording) Length() time.Duration {
	if len(r.lines) == 0 {
		return 0
	}
	return r.lines[len(r.lines)-1].end().Sub(r.began)
}

// Load reads a file, or the latest recording in a folder. The error explains why it cannot be
// played.
func Load(path string) (*Recording, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read the recording: %w", err)
	}
	paths := []string{path}
	if info.IsDir() {
		if paths, err = recordings(path); err != nil || len(paths) == 0 {
			return nil, errors.Join(
				fmt.Errorf("%s has no recording: a recording is named %sTIME%s", path, prefix, suffix), err)
		}
	}
	r := &Recording{}
	var life time.Time
	for _, path := range slices.Backward(paths) {
		h, lines, cut, err := load(path)
		if err != nil {
			return nil, fmt.Errorf("read the recording %s: %w", path, err)
		}
		if !life.IsZero() && !h.Life.Equal(life) {
			continue // part of another recording, perhaps a simultaneous one
		}
		life, r.CutOff = h.Life, r.CutOff || cut
		r.Policy, r.BootID, r.Program, r.Faults, r.began = h.Policy, h.BootID, h.Program, h.Faults, h.Began
		r.lines = append(lines, r.lines...)
	}
	if len(r.lines) == 0 {
		return nil, fmt.Errorf("read the recording %s: it has no driver calls", path)
	}
	for _, l := range r.lines {
		r.Dropped += l.Dropped
	}
	order.Sort(r.lines, func(a, b line) int { return a.end().Compare(b.end()) })
	return r, nil
}

// load reads one file. It drops an incomplete last line.
func load(path string) (h header, lines []line, cut bool, err error) {
	file, err := statefile.Open(path)
	if err != nil {
		return h, nil, false, err
	}
	defer func() { _ = file.Close() }() // opened for reading only
	if info, err := file.Stat(); err == nil && info.Size() > maxFile {
		return h, nil, false, fmt.Errorf("the file has %d MiB, and a playable recording has at most %d",
			info.Size()>>20, maxFile>>20)
	}
	reader := bufio.NewReaderSize(file, 64<<10)
	text, _, err := readLine(reader)
	if err != nil || json.Unmarshal(text, &h) != nil || h.Format == 0 {
		return h, nil, false, errors.Join(errors.New("not a recording of this program: the first line is not a header"),
			unlessEOF(err))
	}
	if h.Format != format {
		return h, nil, false, fmt.Errorf("the file has format %d, written by version %s, and this version reads "+
			"format %d", h.Format, h.Program, format)
	}
	last := map[string]json.RawMessage{}
	for number := 2; ; number++ {
		text, whole, err := readLine(reader)
		if errors.Is(err, io.EOF) {
			return h, lines, false, nil
		}
		var l line
		switch {
		case err != nil:
			return h, nil, false, fmt.Errorf("line %d: %w", number, err)
		case !whole:
			return h, lines, true, nil
		}
		if err := json.Unmarshal(text, &l); err != nil {
			return h, nil, false, fmt.Errorf("line %d: %w", number, err)
		}
		if l.Same {
			l.Value = last[l.key()]
		} else if l.Value != nil {
			last[l.key()] = l.Value
		}
		lines = append(lines, l)
	}
}

// readLine returns the next line, and whether the line is complete.
func readLine(r *bufio.Reader) (text []byte, whole bool, err error) {
	for {
		part, err := r.ReadSlice('\n')
		text = append(text, part...)
		switch {
		case len(text) > maxLine:
			return nil, false, fmt.Errorf("longer than %d MiB", maxLine>>20)
		case err == nil:
			return text, true, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(text) > 0:
			return text, false, nil
		default:
			return nil, false, err
		}
	}
}

func unlessEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// Prepare writes the ledger of faults into the state directory of the playing Monitor.
func (r *Recording) Prepare(stateDir string) error {
	if r.Faults == "" {
		return nil
	}
	return statefile.Replace(filepath.Join(stateDir, ledger.FaultsFile), []byte(r.Faults), 0o600)
}
