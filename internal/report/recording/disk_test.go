package recording_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/recording"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// TestDiskThatFails: a vanished folder costs lines, but no verdict.
func TestDiskThatFails(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "gone")
	synctest.Test(t, func(t *testing.T) {
		node := simulated.Node(t, "t4")
		var recorder recording.Recorder
		if err := recorder.Start(recording.Options{Dir: dir, Size: 4 << 10, Policy: health.Default()}); err != nil {
			t.Fatal(err)
		}
		driver := recorder.Driver(simulated.DriverOf(node))
		were := verdicts(t, monitor.Options{Driver: driver, Policy: health.Default()},
			func(context.Context, *monitor.Monitor) {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
				time.Sleep(5 * time.Minute)
				if err := os.MkdirAll(dir, 0o700); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if err := recorder.Stop(); err == nil {
					t.Error("nobody says that lines are missing")
				}
			})
		if len(were) != 2 { // a verdict and a list
			t.Errorf("the verdicts were %q", were)
		}
		if r := load(t, dir); r.Dropped < 50 {
			t.Errorf("%d lines are said to be missing", r.Dropped)
		}
	})
}

// A disk can be made to hang or to be full.
type disk struct {
	hang     chan struct{} // a write waits until it is closed; nil for no wait
	full     atomic.Bool
	noInodes atomic.Bool // there is space, but no file can be created
}

type diskFile struct {
	io.WriteCloser
	*disk
}

func (d *disk) create(path string) (io.WriteCloser, error) {
	if d.noInodes.Load() {
		return nil, &fs.PathError{Op: "open", Path: path, Err: syscall.ENOSPC}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	return diskFile{f, d}, err
}

func (f diskFile) Write(text []byte) (int, error) {
	if f.full.Load() {
		n, _ := f.WriteCloser.Write(text[:len(text)/2]) // like a disk without a free block
		return n, syscall.ENOSPC
	}
	if f.hang != nil && bytes.Contains(text, []byte(`"call"`)) { // not the first line
		<-f.hang
	}
	return f.WriteCloser.Write(text)
}

// TestDiskThatHangs: no call into the driver waits for the disk, and the missing lines are counted.
func TestDiskThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{hang: make(chan struct{})}
		dir := t.TempDir()
		var recorder recording.Recorder
		if err := recorder.Start(recording.Options{Dir: dir, Policy: health.Default(), Create: d.create}); err != nil {
			t.Fatal(err)
		}
		s := open(t, &recorder)
		began := time.Now()
		for range 5000 {
			if _, err := s.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took != 0 { // in a bubble, time passes only while all wait
			t.Errorf("5000 calls waited for %s", took)
		}
		if err := recorder.Stop(); err == nil || !strings.Contains(err.Error(), "the disk does not answer") {
			t.Errorf("Stop: %v", err)
		}
		close(d.hang)
		synctest.Wait()
		if r := load(t, dir); r.Dropped == 0 && r.Length() == 0 {
			t.Error("nothing was recorded")
		}
	})
}

// TestDiskThatIsFull: lines are missing, but the calls have their answers, and the lines on disk
// can be played.
func TestDiskThatIsFull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		dir := t.TempDir()
		var recorder recording.Recorder
		if err := recorder.Start(recording.Options{Dir: dir, Policy: health.Default(), Create: d.create}); err != nil {
			t.Fatal(err)
		}
		s := open(t, &recorder)
		scan := func() {
			if _, err := s.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		scan()
		d.full.Store(true)
		for range 20 {
			scan()
			time.Sleep(4 * time.Second)
		}
		d.full.Store(false)
		time.Sleep(10 * time.Second)
		scan()
		if err := recorder.Stop(); err == nil || !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("Stop: %v", err)
		}
		r := load(t, dir)
		if r.Dropped != 20 || !r.CutOff || r.Length() < 80*time.Second {
			t.Errorf("%d lines are missing of %s, cut off: %v", r.Dropped, r.Length(), r.CutOff)
		}
	})
}

// TestDiskWithoutInodes: if no file can be created although there is space, only the oldest file is
// lost. The calls have their answers, and the missing lines are counted. Recording continues once
// there are inodes. A recording cannot start without inodes.
func TestDiskWithoutInodes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, dir := &disk{}, t.TempDir()
		o := recording.Options{Dir: dir, Files: 4, Size: 8 << 10, Policy: health.Default(), Create: d.create}
		var recorder recording.Recorder
		if err := recorder.Start(o); err != nil {
			t.Fatal(err)
		}
		s := open(t, &recorder)
		scan := func(times int) {
			for range times {
				if _, err := s.Scan(t.Context()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
			}
		}
		files := func() int {
			names, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			return len(names)
		}
		scan(600)
		if n := files(); n != 4 {
			t.Errorf("%d files", n)
		}
		d.noInodes.Store(true)
		scan(300)
		if n := files(); n != 3 { // complete files; the next one has room as soon as an inode is free
			t.Errorf("%d files without inodes", n)
		}
		var another recording.Recorder
		if err := another.Start(o); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("Start: %v", err)
		}
		if n := files(); n != 3 {
			t.Errorf("%d files after another recording did not start", n)
		}
		d.noInodes.Store(false)
		scan(20)
		if err := recorder.Stop(); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("Stop: %v", err)
		}
		if r := load(t, dir); r.Dropped < 100 || r.Dropped > 300 || r.Length() < 10*time.Minute || r.CutOff {
			t.Errorf("%d lines are missing of %s, cut off: %v", r.Dropped, r.Length(), r.CutOff)
		}
	})
}

// TestTwoDaemonsRecordIntoOneFolder: two daemons share the ring of files, as during an upgrade.
// Neither fails, and the later recording is played.
func TestTwoDaemonsRecordIntoOneFolder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		var recorders [2]recording.Recorder
		var sessions [2]monitor.Session
		for i := range recorders {
			o := recording.Options{Dir: dir, Files: 4, Size: 8 << 10, Policy: health.Default(),
				Program: fmt.Sprint("version ", i)}
			if err := recorders[i].Start(o); err != nil {
				t.Fatal(err)
			}
			sessions[i] = open(t, &recorders[i])
			time.Sleep(time.Millisecond)
		}
		for range 400 {
			for _, s := range sessions {
				if _, err := s.Scan(t.Context()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Millisecond)
			}
			synctest.Wait()
		}
		for i := range recorders {
			if err := recorders[i].Stop(); err != nil {
				t.Errorf("daemon %d: %v", i, err)
			}
		}
		if files, err := os.ReadDir(dir); err != nil || len(files) > 4 {
			t.Errorf("%d files, %v", len(files), err)
		}
		if r := load(t, dir); r.Length() == 0 || r.Dropped != 0 {
			t.Errorf("%s of %s, %d lines are missing", r.Length(), r.Program, r.Dropped)
		}
	})
}

// open opens a recorded session with a simulated node, until the test ends.
func open(t *testing.T, r *recording.Recorder) monitor.Session {
	t.Helper()
	p, err := simulator.Load("t4")
	if err != nil {
		t.Fatal(err)
	}
	node := simulator.New(p)
	s, err := r.Driver(simulated.DriverOf(node)).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		node.Close()
	})
	return s
}
