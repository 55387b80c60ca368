package daemon

import (
	"bufio"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

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

	s.kill()
	people.prints("connection: waiting for the daemon")
	programs.prints(`"to":"waiting for the daemon"`)
	s.broken(simulator.Fault{Kind: simulator.KindLost, GPU: "5"})
	s.start()
	people.prints("connection: waiting for the daemon → connected")
	programs.prints(`"to":"connected"`)
	people.prints("→ degraded: GPU 5 cannot be read")
	people.ends()
	programs.ends()
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
