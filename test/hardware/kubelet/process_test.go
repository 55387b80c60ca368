package kubelet_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A process runs beside the test, and ends with it.
type process struct {
	*exec.Cmd
	log   string        // path of what it prints
	ended chan struct{} // closed when it has ended
}

// start starts a program whose output goes to a file named after name. Where the test fails, the
// end of that file is logged.
func start(t *testing.T, name string, environment []string, program string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.CommandContext(context.Background(), program, args...), ended: make(chan struct{})}
	p.log = filepath.Join(t.TempDir(), name+".log")
	out, err := os.Create(p.log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p.Stdout, p.Stderr = out, out
	p.Env = append(os.Environ(), environment...)
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.Start(); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go func() {
		defer close(p.ended)
		_ = p.Wait() // its log says why it ended
	}()
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			t.Logf("the log of %s ends with\n%s", name, tail(p.log))
		}
	})
	return p
}

// stop ends the process, by SIGTERM, and by SIGKILL where that takes more than 15 s.
func (p *process) stop() {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		_ = p.Process.Signal(signal) // an error says that it has ended
		select {
		case <-p.ended:
			return
		case <-time.After(15 * time.Second):
		}
	}
}

// until waits until is returns true. It ends the test when the process ends before.
func (p *process) until(t *testing.T, what string, is func() bool) {
	t.Helper()
	until(t, what, func() bool {
		select {
		case <-p.ended:
			t.Fatalf("%s has ended, before %s:\n%s", filepath.Base(p.Path), what, tail(p.log))
		default:
		}
		return is()
	})
}

// limit is how long the tests wait for something: shorter than elsewhere, as machines with GPUs are
// dear.
const limit = 25 * time.Second

// until waits until is returns true. what says what is waited for.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	poll.Within(t, limit, what, is)
}

// tail returns the last 60 lines of a file.
func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-60):], "\n")
}
