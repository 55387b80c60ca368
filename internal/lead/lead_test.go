package lead_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
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

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/lead"
)

// faster is how much faster than the real clock that of the tests is.
const faster = 10

// A fastClock waits for less time than it is told. Real sockets do not work in the bubbles of testing/synctest.
type fastClock struct{ clock.RealClock }

func (fastClock) After(d time.Duration) <-chan time.Time { return time.After(d / faster) }

func (c fastClock) NewTicker(d time.Duration) clock.Ticker { return c.RealClock.NewTicker(d / faster) }

// patience is how long a test waits for what happens soon. A silent process loses the lead after 12 s of the fast clock.
const patience = 20 * time.Second

// until waits until something is so.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// A process is a Lead in this process.
type process struct {
	*lead.Lead
	stop func()
}

// start runs a Lead until the test ends. Names are tokens, too: they sort as the processes start.
func start(t *testing.T, dir, name string, busy func() bool) process {
	t.Helper()
	l := lead.New(lead.Options{Dir: dir, Name: name, Token: name, Busy: busy, Clock: fastClock{}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return process{l, stop}
}

func (p process) leads() bool { return p.Statuses().Value().Leads }

// short returns a folder whose path is short enough for a socket.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lead")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "node")
}

// TestAlone: without a folder a process leads always, before and after Run.
func TestAlone(t *testing.T) {
	t.Parallel()
	l := lead.New(lead.Options{Name: "a"})
	if s := l.Statuses().Value(); !s.Leads || s.Name != "a" || l.Check() != nil {
		t.Errorf("state %+v, check %v", s, l.Check())
	}
	ran := false
	ctx, cancel := context.WithCancel(t.Context())
	if err := l.While(ctx, func(context.Context) error { ran = true; cancel(); return nil }); err != nil || !ran {
		t.Errorf("ran: %v, error: %v", ran, err)
	}
	if err := l.Run(ctx); err != nil {
		t.Error(err)
	}
}

// TestTheFirstLeads: a process that starts alone leads at once; the next one knows it, hears what it tells, and does not lead.
func TestTheFirstLeads(t *testing.T) {
	t.Parallel()
	dir := short(t)
	a := start(t, dir, "a", nil)
	until(t, "a leads", a.leads)
	a.Tell(json.RawMessage(`{"x":1}`))
	b := start(t, dir, "b", nil)
	until(t, "b knows a", func() bool { return b.Statuses().Value().Name == "a" })
	until(t, "b hears a", func() bool { return string(b.Heard().Value()) == `{"x":1}` })
	a.Tell(json.RawMessage(`[]`))
	until(t, "b hears a again", func() bool { return string(b.Heard().Value()) == `[]` })
	if s := b.Statuses().Value(); s.Leads || s.Since.IsZero() || !errors.Is(b.Check(), lead.ErrNotLead) {
		t.Errorf("state of b %+v, check %v", s, b.Check())
	}
	if s := a.Statuses().Value(); s.Standbys != 1 || a.Check() != nil {
		t.Errorf("state of a %+v, check %v", s, a.Check())
	}
	b.stop()
	until(t, "a has no standby", func() bool { return a.Statuses().Value().Standbys == 0 })
}

// TestHandOver: a process that started later gets the lead when it asks, once the tasks of the term have ended; one that started earlier
// does not, before the other one ends.
func TestHandOver(t *testing.T) {
	t.Parallel()
	dir := short(t)
	a := start(t, dir, "a", nil)
	finish := make(chan struct{})
	terms := make(chan string, 10)
	go func() {
		_ = a.While(t.Context(), func(ctx context.Context) error {
			terms <- "begin"
			<-ctx.Done()
			terms <- "stop"
			<-finish
			terms <- "end"
			return errors.New("what comes after the end does not count")
		})
	}()
	until(t, "a leads", a.leads)
	<-terms
	a.Ask() // nobody is there to be asked
	b := start(t, dir, "b", nil)
	until(t, "b knows a", func() bool { return b.Statuses().Value().Name == "a" })
	b.Ask()
	if got := <-terms; got != "stop" || b.leads() || a.Check() != nil {
		t.Fatalf("task: %s; b leads: %v; check of a: %v", got, b.leads(), a.Check())
	}
	began := time.Now()
	close(finish)
	until(t, "b leads", b.leads)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the hand-over took %v", took)
	}
	if got := <-terms; got != "end" || a.Check() == nil || b.Check() != nil {
		t.Errorf("task: %s; checks: a %v, b %v", got, a.Check(), b.Check())
	}
	until(t, "a waits for b", func() bool { return a.Statuses().Value().Name == "b" && b.Statuses().Value().Standbys == 1 })
	until(t, "b may change hardware", func() bool { return b.Statuses().Value().Former == "" })
	b.stop()
	until(t, "a leads again", a.leads)
	if got := <-terms; got != "begin" {
		t.Errorf("task: %s", got)
	}
}

// TestWhatIsToldIsOfTheTerm: a process that has led does not go by what it heard before, and tells nothing that it told in an earlier term.
func TestWhatIsToldIsOfTheTerm(t *testing.T) {
	t.Parallel()
	dir := short(t)
	a := start(t, dir, "a", nil)
	until(t, "a leads", a.leads)
	a.Tell(json.RawMessage(`"of a"`))
	b := start(t, dir, "b", nil)
	until(t, "b hears a", func() bool { return string(b.Heard().Value()) == `"of a"` })
	b.Ask()
	until(t, "b leads", b.leads)
	c := start(t, dir, "c", nil)
	until(t, "c knows b", func() bool { return c.Statuses().Value().Name == "b" })
	c.Ask()
	until(t, "c leads", c.leads)
	until(t, "a and b wait for c", func() bool { return a.Statuses().Value().Name == "c" && b.Statuses().Value().Name == "c" })
	if heard := b.Heard().Value(); heard != nil {
		t.Errorf("b has led since it heard %s", heard)
	}
	c.stop()
	until(t, "a or b leads", func() bool { return a.leads() || b.leads() })
	b.stop()
	until(t, "a leads again", a.leads)
	d := start(t, dir, "d", nil)
	until(t, "d knows a", func() bool { return d.Statuses().Value().Name == "a" })
	heard, said := d.Heard().Latest()
	if heard == nil {
		select {
		case <-said:
			heard = d.Heard().Value()
		case <-time.After(50 * time.Millisecond):
		}
	}
	if heard != nil {
		t.Errorf("d hears %s, of an earlier term", heard)
	}
}

// TestATaskThatDoesNotEnd delays a hand-over for 45 s at most.
func TestATaskThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	dir := short(t)
	a := start(t, dir, "a", nil)
	stuck := make(chan struct{})
	defer close(stuck)
	go func() { _ = a.While(t.Context(), func(context.Context) error { <-stuck; return nil }) }()
	until(t, "a leads", a.leads)
	b := start(t, dir, "b", nil)
	b.Ask()
	until(t, "b leads", b.leads)
	if former := b.Statuses().Value().Former; former != "a" {
		t.Errorf("former %q", former)
	}
}

// TestHardwareThatIsBeingChanged is held by the former lead until that has ended, also after a hand-over.
func TestHardwareThatIsBeingChanged(t *testing.T) {
	t.Parallel()
	dir := short(t)
	var mu sync.Mutex
	busy := true
	a := start(t, dir, "a", func() bool { mu.Lock(); defer mu.Unlock(); return busy })
	until(t, "a leads", a.leads)
	b := start(t, dir, "b", nil)
	b.Ask()
	until(t, "b leads", b.leads)
	until(t, "a waits for b", func() bool { return a.Statuses().Value().Name == "b" })
	until(t, "b may not change hardware", func() bool { return b.Statuses().Value().Former == "an earlier process" })
	mu.Lock()
	busy = false
	mu.Unlock()
	until(t, "b may change hardware", func() bool { return b.Statuses().Value().Former == "" })
}

// TestATaskThatFails ends While, and nothing else.
func TestATaskThatFails(t *testing.T) {
	t.Parallel()
	a := start(t, short(t), "a", nil)
	failed := errors.New("failed")
	if err := a.While(t.Context(), func(context.Context) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("error %v", err)
	}
	if !a.leads() {
		t.Error("it leads no more")
	}
}

// TestASocketThatIsRemoved: the process notices before it writes, and leads anew if nobody else has taken the lead.
func TestASocketThatIsRemoved(t *testing.T) {
	t.Parallel()
	dir := short(t)
	a := start(t, dir, "a", nil)
	until(t, "a leads", a.leads)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := a.Check(); !errors.Is(err, lead.ErrNotLead) {
		t.Errorf("check: %v", err)
	}
	until(t, "a leads anew", func() bool { return a.leads() && a.Check() == nil })
}

// TestAFolderThatCannotBeWritten: nobody leads, and the state says why; a process that leads goes on while a later one cannot take over.
func TestAFolderThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	dir := short(t)
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file in its place; root may write everywhere
		t.Fatal(err)
	}
	a := start(t, dir, "a", nil)
	until(t, "a says why", func() bool { return a.Statuses().Value().Problem != "" })
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	until(t, "a leads", a.leads)
	terms := make(chan struct{}, 10)
	go func() { _ = a.While(t.Context(), func(context.Context) error { terms <- struct{}{}; return nil }) }()
	<-terms
	if err := os.MkdirAll(filepath.Join(dir, "lead.new", "in the way"), 0o700); err != nil { // no socket can be made
		t.Fatal(err)
	}
	b := start(t, dir, "b", nil)
	b.Ask()
	until(t, "b knows a", func() bool { return b.Statuses().Value().Name == "a" })
	until(t, "b says why it cannot", func() bool { return b.Statuses().Value().Problem != "" })
	if !a.leads() || a.Check() != nil || len(terms) > 0 {
		t.Errorf("a leads: %v; %d new terms", a.leads(), len(terms))
	}
	if err := os.RemoveAll(filepath.Join(dir, "lead.new")); err != nil {
		t.Fatal(err)
	}
	until(t, "b leads", b.leads)
}

// other is the environment variable with the folder and the name of another process of this test program.
const other = "LEAD_TEST_PROCESS"

func TestMain(m *testing.M) {
	if dir, name, is := strings.Cut(os.Getenv(other), ","); is {
		runOther(dir, name)
		return
	}
	os.Exit(m.Run())
}

// runOther is a process that asks for the lead at once, and writes its name in a file as often as it can while it leads. It says when it leads
// and when it does not.
func runOther(dir, name string) {
	l := lead.New(lead.Options{Dir: dir, Name: name, Token: name, Clock: fastClock{}})
	l.Ask()
	ctx, stop := context.WithCancel(context.Background())
	go func() { // the test ends this process, or itself
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	var tasks sync.WaitGroup
	tasks.Go(func() {
		_ = l.While(ctx, func(ctx context.Context) error {
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
			fmt.Printf("%s leads, %s holds\n", s.Name, s.Former) //nolint:forbidigo // what the test reads
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

// knows reports whether the process said last that this one leads, and that this other one holds the hardware.
func (p *another) knows(leads, former string) func() bool {
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.said == leads+" leads, "+former+" holds"
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

// TestAProcessThatIsKilled: a standby takes the lead at once.
func TestAProcessThatIsKilled(t *testing.T) {
	t.Parallel()
	dir := short(t)
	a := startOther(t, dir, "a")
	until(t, "a leads", a.knows("a", ""))
	b := startOther(t, dir, "b")
	until(t, "b leads", b.knows("b", ""))
	until(t, "a knows", a.knows("b", ""))
	c := startOther(t, dir, "c")
	until(t, "c leads", c.knows("c", ""))
	until(t, "b knows", b.knows("c", ""))
	began := time.Now()
	c.signal(syscall.SIGKILL)
	until(t, "a or b leads", func() bool { return a.knows("a", "")() || b.knows("b", "")() })
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	until(t, "b leads: it started later", b.knows("b", ""))
	until(t, "a knows", a.knows("b", ""))
}

// TestAProcessThatIsStopped loses the lead after some time. It is known to be there, which holds the hardware; when it goes on, it
// writes nothing, but what it was about to write when it was stopped.
func TestAProcessThatIsStopped(t *testing.T) {
	t.Parallel()
	dir := short(t)
	c := startOther(t, dir, "c")
	until(t, "c leads", c.knows("c", ""))
	b := startOther(t, dir, "b")
	a := startOther(t, dir, "a")
	until(t, "a and b know", func() bool { return a.knows("c", "")() && b.knows("c", "")() })
	c.signal(syscall.SIGSTOP)
	until(t, "b leads and c holds the hardware", b.knows("b", "c")) // also where a has led for a moment
	until(t, "a knows", a.knows("b", ""))
	before := len(written(t, dir))
	c.signal(syscall.SIGCONT)
	until(t, "c leads again, as it started last", c.knows("c", ""))
	until(t, "b knows", b.knows("c", ""))
	names := written(t, dir)
	for i, name := range names[before:] {
		if name == "b" && i > 2 { // b, perhaps the write of c that was under way, b, c
			t.Errorf("written by turns: %q", names)
		}
	}
}

// TestAProcessThatNeverEnds, as one with a thread in the driver: it keeps its files open. All that comes after it holds the hardware.
func TestAProcessThatNeverEnds(t *testing.T) {
	t.Parallel()
	dir := short(t)
	a := startOther(t, dir, "a")
	until(t, "a leads", a.knows("a", ""))
	a.signal(syscall.SIGSTOP)
	b := startOther(t, dir, "b") // it has never heard of a
	until(t, "b leads", b.knows("b", "an earlier process"))
	c := startOther(t, dir, "c")
	until(t, "c leads", c.knows("c", "an earlier process"))
	a.signal(syscall.SIGKILL)
	until(t, "the hardware is free", c.knows("c", ""))
}
