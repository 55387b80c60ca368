package lead_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// other is the environment variable with the folder and the name of another process of the test
// program.
const other = "LEAD_TEST_PROCESS"

func TestMain(m *testing.M) {
	if dir, name, is := strings.Cut(os.Getenv(other), ","); is {
		runOther(dir, name)
		return
	}
	os.Exit(m.Run())
}

// runOther is the main function of another process. The process asks for the lead at once, writes
// its name in a file as often as possible while it leads, and prints each change of the lead.
func runOther(dir, name string) {
	l := lead.New(lead.Options{Dir: dir, Name: name, Token: name, Clock: fastClock{}})
	l.Ask()
	ctx, stop := context.WithCancel(context.Background())
	go func() { // the test kills the process, or the process exits
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	var tasks sync.WaitGroup
	tasks.Go(func() {
		_ = l.While(ctx, "task", func(ctx context.Context) error {
			for ctx.Err() == nil {
				if l.Check() == nil {
					write(filepath.Dir(dir), name)
				}
				time.Sleep(time.Millisecond)
			}
			return nil
		})
	})
	tasks.Go(func() {
		for ctx.Err() == nil {
			s, changed := l.Statuses().Latest()
			fmt.Printf("%s leads, %s holds\n", s.Name, s.PreviousLeader) //nolint:forbidigo // output for the test
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	})
	leading, end := context.WithCancel(context.Background())
	go func() { tasks.Wait(); end() }()
	_ = l.Run(leading)
}

func write(dir, name string) {
	f, err := os.OpenFile(filepath.Join(dir, "written"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	_, _ = f.WriteString(name + "\n")
	_ = f.Close()
}

// An another is another process.
type another struct {
	*exec.Cmd
	mu   sync.Mutex
	said string
}

func startOther(t *testing.T, dir, name string) *another {
	t.Helper()
	p := &another{Cmd: exec.CommandContext(t.Context(), os.Args[0])}
	p.Env = append(os.Environ(), other+"="+dir+","+name)
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Stderr = os.Stderr
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.mu.Lock()
			p.said = lines.Text()
			p.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		_ = in.Close()
		_ = p.Wait()
	})
	return p
}

func (p *another) signal(s os.Signal) { _ = p.Process.Signal(s) }

// knows reports whether the process last printed this leader and this holder of the hardware.
func (p *another) knows(leads, previous string) func() bool {
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.said == leads+" leads, "+previous+" holds"
	}
}

// written returns who has written, in order, each once in a row.
func written(t *testing.T, dir string) (names []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "written"))
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.Lines(string(text)) {
		if name = strings.TrimSpace(name); len(names) == 0 || names[len(names)-1] != name {
			names = append(names, name)
		}
	}
	return names
}

// TestKilledProcess: a standby takes the lead.
func TestKilledProcess(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := startOther(t, dir, "a")
	poll.Until(t, "a leads", a.knows("a", ""))
	b := startOther(t, dir, "b")
	poll.Until(t, "b leads", b.knows("b", ""))
	poll.Until(t, "a knows", a.knows("b", ""))
	c := startOther(t, dir, "c")
	poll.Until(t, "c leads", c.knows("c", ""))
	poll.Until(t, "b knows", b.knows("c", ""))
	c.signal(syscall.SIGKILL)
	poll.Until(t, "b leads: it started later", b.knows("b", ""))
	poll.Until(t, "a knows", a.knows("b", ""))
}

// TestStoppedProcess: a stopped process loses the lead after some time. The standby knows the
// process that still holds the hardware. After the stop the process writes nothing more, except a
// write that was already running.
func TestStoppedProcess(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	c := startOther(t, dir, "c")
	poll.Until(t, "c leads", c.knows("c", ""))
	b := startOther(t, dir, "b")
	a := startOther(t, dir, "a")
	poll.Until(t, "a and b know", func() bool { return a.knows("c", "")() && b.knows("c", "")() })
	c.signal(syscall.SIGSTOP)
	poll.Until(t, "b leads and c holds the hardware", b.knows("b", "c")) // also where a has led for a moment
	poll.Until(t, "a knows", a.knows("b", ""))
	before := len(written(t, dir))
	c.signal(syscall.SIGCONT)
	poll.Until(t, "c leads again, as it started last", c.knows("c", ""))
	poll.Until(t, "b knows", b.knows("c", ""))
	names := written(t, dir)
	for i, name := range names[before:] {
		if name == "b" && i > 2 { // b, perhaps a running write of c, b, c
			t.Errorf("written by turns: %q", names)
		}
	}
}

// TestProcessThatNeverExits: a process with a thread in the driver keeps its files open. Each later
// process knows that it holds the hardware.
func TestProcessThatNeverExits(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	a := startOther(t, dir, "a")
	poll.Until(t, "a leads", a.knows("a", ""))
	a.signal(syscall.SIGSTOP)
	b := startOther(t, dir, "b") // b never knew a
	poll.Until(t, "b leads", b.knows("b", "an earlier process"))
	c := startOther(t, dir, "c")
	poll.Until(t, "c leads", c.knows("c", "an earlier process"))
	a.signal(syscall.SIGKILL)
	poll.Until(t, "the hardware is free", c.knows("c", ""))
}
