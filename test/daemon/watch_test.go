package daemon

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	told "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// A watch is a process of status --watch, or of another command that prints as things change.
type watch struct {
	s       *stage
	cmd     *exec.Cmd
	changes chan string // what it prints, while it is read
	printed []string    // what was taken of that
}

// watches starts status --watch, and reads what it prints.
func (s *stage) watches(args ...string) *watch {
	s.t.Helper()
	return s.runs(append([]string{"status", "--watch"}, args...)...)
}

// runs starts a command that asks the daemon, and reads what it prints.
func (s *stage) runs(args ...string) *watch {
	s.t.Helper()
	w := &watch{s: s, changes: make(chan string, 1000)}
	w.cmd = exec.Command(binary, append(args, "--control-socket", s.ControlSocket())...)
	output, err := w.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := w.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = w.cmd.Process.Kill() })
	go func() {
		defer close(w.changes)
		for lines := bufio.NewScanner(output); lines.Scan(); {
			w.changes <- lines.Text()
		}
	}()
	return w
}

// prints waits for a line with a text, and returns it.
func (w *watch) prints(text string) (line string) {
	w.s.t.Helper()
	late := time.After(patience)
	for !strings.Contains(line, text) {
		line = w.next(late, text)
	}
	return line
}

// printsAll waits for lines with texts, in any order: a watch may look when one is true and another
// is not yet.
func (w *watch) printsAll(texts ...string) {
	w.s.t.Helper()
	late := time.After(patience)
	for len(texts) > 0 {
		line := w.next(late, texts...)
		texts = slices.DeleteFunc(texts, func(text string) bool { return strings.Contains(line, text) })
	}
}

// next returns the next line.
func (w *watch) next(late <-chan time.Time, wanted ...string) string {
	w.s.t.Helper()
	select {
	case line, more := <-w.changes:
		if !more {
			w.s.t.Fatalf("the watch ended before it printed %q", wanted)
		}
		w.printed = append(w.printed, line)
		return line
	case <-late:
		w.s.t.Fatalf("the watch does not print %q; it printed\n%s", wanted, strings.Join(w.printed, "\n"))
	}
	return ""
}

// ends sends SIGINT and waits for an exit status of 0.
func (w *watch) ends() {
	w.s.t.Helper()
	if err := w.cmd.Process.Signal(syscall.SIGINT); err != nil {
		w.s.t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { _ = w.cmd.Process.Kill() })
	defer late.Stop()
	for range w.changes {
	}
	if err := w.cmd.Wait(); err != nil {
		w.s.t.Errorf("after SIGINT the watch ends with %v", err)
	}
}

// TestWatch: a watch tells of faults and recoveries, of the daemon's end and of the next daemon,
// for people and for programs.
func TestWatch(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	people, programs := s.watches(), s.watches("-o", "json")
	people.prints("connection: waiting for the daemon: no daemon answers")
	programs.prints(`"kind":"connection"`)
	s.start()
	s.shows(8, 8)
	people.prints("connection: waiting for the daemon → connected")
	people.prints("ready: 8 GPUs Healthy; nvidia.com/gpu: 8 of 8")
	for i := range 8 {
		line := programs.prints(`"kind":"device","name":"` + string(rune('0'+i)))
		var c told.Change
		if err := json.Unmarshal([]byte(line), &c); err != nil || !strings.HasPrefix(c.Device, "GPU-") || c.To != "Healthy" ||
			c.Time.IsZero() {
			t.Errorf("%s is %+v, %v", line, c, err)
		}
	}

	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	people.printsAll("GPU 3: Healthy → Lost (remedy: reboot): XID 79",
		"nvidia.com/gpu: 8 of 8 devices Healthy, serving → 7 of 8 devices Healthy, serving",
		"degraded: GPU 3 Lost; nvidia.com/gpu: 7 of 8")
	programs.prints(`"from":"Healthy","to":"Lost","reason":"XID 79`)
	s.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "2", Call: "DeviceGetHandleByIndex"})
	s.signal(s.Running(), syscall.SIGHUP)
	people.prints("call: nvmlDeviceGetHandleByIndex of GPU 2 does not return")
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	people.prints("GPU 3: Lost → Healthy")
	s.call("quiesce", nil)
	people.prints("→ quiesced: the driver is released since")
	s.call("resume", nil)
	people.prints("→ ready: 8 GPUs Healthy; nvidia.com/gpu: 8 of 8") // some GPUs may be ready before the others

	if err := s.Running().Kill(); err != nil {
		t.Fatal(err)
	}
	people.prints("connection: waiting for the daemon")
	programs.prints(`"to":"waiting for the daemon"`)
	_ = s.StopDaemon() // it was killed
	s.broken(simulator.Fault{Kind: simulator.KindLost, GPU: "5"})
	s.start()
	people.prints("connection: waiting for the daemon → connected")
	programs.prints(`"to":"connected"`)
	people.prints("→ degraded: GPU 5 cannot be read")
	people.ends()
	programs.ends()
}

// TestWatchThatIsNotRead: the daemon serves and ends as without it.
func TestWatchThatIsNotRead(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	stopped, other := s.watches(), s.watches()
	stopped.prints("summary")
	if err := stopped.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for range 100 { // each status that is sent has some kilobytes
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 13})
	}
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	s.shows(8, 7)
	other.prints("GPU 3: Healthy → Lost")
	daemon := s.Running()
	s.signal(daemon, syscall.SIGTERM)
	s.ends(daemon)
	other.ends()
}

// firstLine waits until the first line of status is as it should be.
func (s *stage) firstLine(want string) {
	s.t.Helper()
	var line string
	defer func() {
		if s.t.Failed() {
			s.t.Logf("the first line of status is %q", line)
		}
	}()
	s.eventually("status begins with "+want, func() bool {
		output, _ := exec.Command(binary, "status", "-o", "wide", "--control-socket", s.ControlSocket()).Output()
		line, _, _ = strings.Cut(string(output), "\n")
		return strings.HasPrefix(line, want)
	})
}

// TestFirstLineOfStatus: it says how the daemon is.
func TestFirstLineOfStatus(t *testing.T) {
	t.Parallel()
	t.Run("starting", func(t *testing.T) {
		t.Parallel()
		s := open(t, node.Setup{})
		s.broken(simulator.Fault{Kind: simulator.KindHang, Call: "Init"})
		s.start()
		s.firstLine("starting: the first scan of the GPUs has not ended")
	})
	t.Run("without a driver", func(t *testing.T) {
		t.Parallel()
		s := open(t, node.Setup{Args: []string{"--fail-on-init-error=false"}})
		s.broken(simulator.Fault{Kind: simulator.KindDriver, Driver: "no-library"})
		s.start()
		s.firstLine("waiting for driver: ")
	})
	t.Run("quiesced, and ready again", func(t *testing.T) {
		t.Parallel()
		s := serving(t, node.Setup{})
		s.firstLine("ready: 8 GPUs Healthy; nvidia.com/gpu: 8 of 8")
		s.call("quiesce", nil)
		s.firstLine("quiesced: the driver is released since")
		s.call("resume", nil)
		s.firstLine("ready: ")
	})
	t.Run("quiesced while a call hangs", func(t *testing.T) {
		t.Parallel()
		s := serving(t, node.Setup{})
		s.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "2", Call: "DeviceGetHandleByIndex"})
		s.signal(s.Running(), syscall.SIGHUP)
		s.firstLine("degraded: GPU 2 ")
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := control.Call(ctx, s.ControlSocket(), "quiesce", nil, nil); err == nil ||
			!strings.Contains(err.Error(), "does not return") {
			t.Errorf("quiesce: %v, want the call that does not return", err)
		}
		s.firstLine("quiesced: the driver is not released yet: nvmlDeviceGetHandleByIndex of GPU 2 does not return")
		s.inject(simulator.Fault{Kind: simulator.KindRestore})
		s.firstLine("quiesced: the driver is released since")
	})
	t.Run("without a kubelet", func(t *testing.T) {
		t.Parallel()
		s := open(t, node.Setup{})
		s.Stop()
		if err := os.Remove(s.Socket()); err != nil {
			t.Fatal(err)
		}
		s.start()
		s.firstLine("waiting for kubelet: the kubelet is not running; not registered: nvidia.com/gpu")
	})
	t.Run("beside a daemon that started later", func(t *testing.T) {
		t.Parallel()
		s := serving(t, node.Setup{})
		later := s.beside(s.Profile)
		later.start()
		s.firstLine("standing by: another device plugin serves nvidia.com/gpu")
		later.firstLine("ready: ")
		if err := later.StopDaemon(); err != nil {
			t.Error(err)
		}
		s.firstLine("ready: ")
	})
}

// TestWatchOfNoChange: while nothing changes but the time of the last look, nothing is sent.
func TestWatchOfNoChange(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	looked := func() (at time.Time) {
		var now told.Status
		if err := control.Call(t.Context(), s.ControlSocket(), "status", nil, &now); err != nil {
			t.Fatal(err)
		}
		return now.Looked
	}
	looks := func(n int) {
		for range n {
			before := looked()
			s.eventually("there is another look", func() bool { return looked().After(before) })
		}
	}
	looks(2) // what follows the start has come
	ctx, cancel := context.WithCancel(t.Context())
	sent, ended := make(chan told.Status, 100), make(chan error, 1)
	go func() {
		ended <- control.Follow(ctx, s.ControlSocket(), "status.watch", nil, func(now told.Status) error {
			sent <- now
			return nil
		})
	}()
	<-sent
	looks(3)
	for len(sent) > 0 {
		t.Errorf("sent %+v", <-sent)
	}
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	s.eventually("the change is sent", func() bool {
		select {
		case now := <-sent:
			return strings.Contains(now.Summary.Text, "GPU 3 Lost")
		default:
			return false
		}
	})
	cancel()
	if err := <-ended; !errors.Is(err, control.ErrEnded) {
		t.Error(err)
	}
}
