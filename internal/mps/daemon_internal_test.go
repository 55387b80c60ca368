package mps

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktest "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps/exclusive"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// newScript installs a shell script as the driver's program. The script finds its command in
// $command, "-f" for a daemon, and the returned directory of the daemon in $dir. Each command is
// logged as a line of the file "asked" there.
func newScript(t *testing.T, text string) control {
	t.Helper()
	programs, c := t.TempDir(), control{dir: t.TempDir()}
	text = "#!/bin/sh\nPATH=/usr/bin:/bin\ndir=" + c.dir +
		"\ncommand=$1\n[ -n \"$1\" ] || read command\necho $command >>$dir/asked\n" + text
	if err := os.WriteFile(filepath.Join(programs, controlProgram), []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(c.folder(pipeFolder), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", programs)
	return c
}

// asked returns the commands that the script of a test received.
func asked(t *testing.T, c control) []string {
	t.Helper()
	text, err := os.ReadFile(c.folder("asked"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// serving is the body of a script that is a daemon until the quit command.
const serving = `
case $command in
-f) echo $$ >$dir/pid; exec sleep 1000;;
quit*) kill $(cat $dir/pid);;
*) [ -e $dir/pid ] && echo 100;;
esac
`

// TestFailedStarts: each failure has a reason, reports no readiness, and leaves no daemon.
func TestFailedStarts(t *testing.T) {
	resource := Group{Resource: "nvidia.com/gpu", GPUs: []GPU{{UUID: "GPU-a", MemoryBytes: 80 << 30, Replicas: 2}}}
	for _, tt := range []struct {
		name, script string
		prepare      func(dir string) error
		group        Group
		want         string
		begun        bool // a daemon is started, and ended
	}{
		{"the mark cannot be written", "[ \"$command\" != -f ] || mkdir -p $dir/.started/full\n" + serving, nil,
			Group{Claim: &ClaimDaemon{}},
			"mark the MPS control daemon as started", true},
		{"an earlier reason cannot be removed", "[ \"$command\" != -f ] || mkdir -p $dir/.failed/full\n" + serving, nil,
			Group{Claim: &ClaimDaemon{}}, "remove the reason of an earlier failure", true},
		{"the mark of an earlier one cannot be removed", serving,
			func(dir string) error { return os.MkdirAll(filepath.Join(dir, startedMark, "full"), 0o755) }, resource,
			"remove the mark of an earlier MPS control daemon", false},
		{"one that was left does not quit, and is nowhere seen", "[ \"$command\" = " + probeCommand + " ]", nil,
			resource, "stop its process", false},
		{"the folder of logs is a file", serving,
			func(dir string) error { return os.WriteFile(filepath.Join(dir, logFolder), nil, 0o600) }, resource,
			"create a folder for MPS", false},
		{"it ends without a reason", "[ \"$command\" = -f ]", nil, Group{Claim: &ClaimDaemon{}},
			"ended at once: exit status 0", true},
		{"it cannot be executed", "", func(string) error {
			return os.WriteFile(filepath.Join(os.Getenv("PATH"), controlProgram), []byte("\x7fELF"), 0o755)
		}, Group{Claim: &ClaimDaemon{}}, "start the MPS control daemon: ", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newScript(t, tt.script)
			if tt.prepare != nil {
				if err := tt.prepare(c.dir); err != nil {
					t.Fatal(err)
				}
			}
			modes := modesFunc(func() error { return nil })
			d := &daemon{control: c, group: tt.group, gpus: exclusive.New(modes, filepath.Join(t.TempDir(), exclusiveMark))}
			err := d.run(t.Context(), func(ready bool) { t.Errorf("ready: %v", ready) })
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("run() = %v, want %q", err, tt.want)
			}
			if begun := slices.Contains(asked(t, c), "-f"); begun != tt.begun {
				t.Errorf("a daemon was started: %v, want %v", begun, tt.begun)
			}
		})
	}
}

// TestLimitsAreReadBack: a limit counts if the daemon confirms it, or answers in an unknown format.
func TestLimitsAreReadBack(t *testing.T) {
	for _, tt := range []struct {
		name, set, get string
		want           string // in the error; empty if the limit holds
	}{
		{"it says so", "", "echo 33.0", ""},
		{"it says so, after words", "echo set to 33.0", "echo 33.0", ""},
		{"it says nothing", "", "", ""},
		{"it says what is not understood", "", "echo a third", ""},
		{"it has another one", "", "echo 50.0", `has "50.0"`},
		{"it refuses, and says nothing", "echo no", "", `answers "no"`},
		{"it cannot be told", "exit 1", "echo 33.0", "exit status 1"},
		{"it cannot be asked", "", "exit 1", "exit status 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := &daemon{control: newScript(t, "case $command in\nset*) "+tt.set+"\n;;\nget*) "+tt.get+"\n;;\nesac")}
			err := d.set(t.Context(), "default_active_thread_percentage", "33", percentage)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("set() = %v, want %q", err, tt.want)
			}
		})
	}
}

// TestOnlyConsecutiveFailedProbesStopADaemon, and each probe has several tries. A daemon that ended is
// not probed.
func TestOnlyConsecutiveFailedProbesStopADaemon(t *testing.T) {
	c := newScript(t, "[ $(wc -l <$dir/asked) = 11 ]") // the first question of the third probe alone
	d := &daemon{control: c}
	ctx, cancel := context.WithTimeout(t.Context(), poll.Limit)
	defer cancel()
	p := &startedDaemon{ended: make(chan struct{}), exitErr: errors.New("exit status 7")}
	err := d.watch(ctx, p, time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "no longer answers") {
		t.Errorf("watch() = %v", err)
	}
	if got, want := len(asked(t, c)), 11+maxUnanswered*maxAttempts; got != want {
		t.Errorf("it was given up after %d questions, want %d", got, want)
	}
	close(p.ended)
	if err := d.watch(ctx, p, time.Hour); !errors.Is(err, p.exitErr) {
		t.Errorf("watch() = %v, want how the daemon ended", err)
	}
}

// TestProcessesOfADaemon: the processes of the directory count, except clients of the daemon.
func TestProcessesOfADaemon(t *testing.T) {
	t.Parallel()
	begin := func(c control, arguments ...string) *exec.Cmd {
		program := exec.CommandContext(t.Context(), controlProgram, arguments...)
		program.Env = c.environment()
		stdin, err := program.StdinPipe()
		if err == nil {
			err = program.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = stdin.Close()
			_ = program.Process.Kill()
			_ = program.Wait() // killed
		})
		return program
	}
	newDaemon := func() (control, *exec.Cmd) {
		dir, err := os.MkdirTemp("", "mps") // a short path, for sockets
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		c := control{dir: dir}
		for _, folder := range []string{pipeFolder, logFolder} {
			if err := makeFolder(c.folder(folder)); err != nil {
				t.Fatal(err)
			}
		}
		if found := c.processes(); len(found) != 0 {
			t.Errorf("before the daemon: %v", found)
		}
		p := begin(c, "-f")
		poll.Until(t, "the daemon answers", func() bool {
			_, err := c.ask(t.Context(), probeCommand, askTimeout)
			return err == nil
		})
		return c, p
	}
	c, d := newDaemon()
	_, _ = newDaemon()
	asking := begin(c)
	poll.Until(t, "the program that asks runs", func() bool {
		name, err := os.Readlink("/proc/" + strconv.Itoa(asking.Process.Pid) + "/exe")
		return err == nil && filepath.Base(name) == controlProgram
	})
	if diff := cmp.Diff([]int{d.Process.Pid}, c.processes()); diff != "" {
		t.Errorf("processes (-want +got):\n%s", diff)
	}
	if err := d.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := awaitEnd(t.Context(), []int{d.Process.Pid}); err != nil { // the parent has not read the exit status
		t.Error(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := awaitEnd(ended, []int{os.Getpid()}); err == nil ||
		!strings.Contains(err.Error(), "do not exit: ["+strconv.Itoa(os.Getpid())+"]") {
		t.Errorf("awaitEnd() of a process that does not end = %v", err)
	}
}

// TestWhatACommandPrints is kept up to the limit, and no further.
func TestWhatACommandPrints(t *testing.T) {
	t.Parallel()
	full := 0
	b := &boundedBuffer{full: func() { full++ }}
	half := []byte(strings.Repeat("x", maxAnswer/2))
	for range 2 {
		if n, err := b.Write(half); n != len(half) || err != nil {
			t.Errorf("Write() = %d, %v within the limit", n, err)
		}
	}
	if text, whole := b.text(); len(text) != maxAnswer || !whole || full != 0 {
		t.Errorf("%d bytes, whole: %v; full was called %d times", len(text), whole, full)
	}
	if n, err := b.Write([]byte("y")); n != 0 || err == nil {
		t.Errorf("Write() = %d, %v beyond the limit", n, err)
	}
	if text, whole := b.text(); len(text) != maxAnswer || whole || full != 1 {
		t.Errorf("%d bytes, whole: %v; full was called %d times", len(text), whole, full)
	}
}

// TestClientLimits: a daemon has one figure for all GPUs, also across groups.
func TestClientLimits(t *testing.T) {
	t.Parallel()
	a, b := GPU{UUID: "GPU-a", Replicas: 1}, GPU{UUID: "GPU-b", Replicas: 4}
	for want, g := range map[int]Group{
		100: {GPUs: []GPU{a}}, 25: {GPUs: []GPU{a, b, a}}, 0: {GPUs: []GPU{b},
			Claim: &ClaimDaemon{}}, 40: {Claim: &ClaimDaemon{Percentage: 40}},
	} {
		if got := g.threads(); got != want {
			t.Errorf("threads() of %v = %d, want %d", g, got, want)
		}
	}
	both := Group{GPUs: []GPU{a, b}}
	if !both.serves(Group{GPUs: []GPU{b}}) || both.serves(Group{GPUs: []GPU{a}}) ||
		(Group{GPUs: []GPU{b}}).serves(both) {
		t.Error("a daemon serves a group with other limits, or with other GPUs, or not one with fewer GPUs")
	}
}

// TestProbesOfProber: each daemon gets one probe at a time, ready daemons get fewer, and only
// answers of followed resources before the end count.
func TestProbesOfProber(t *testing.T) {
	c := newScript(t, "[ ! -e $dir/silent ]")
	clock := clocktest.NewFakeClock(time.Unix(0, 0))
	root, name := filepath.Split(c.dir)
	p := NewProber(root, clock)
	p.Follow([]string{name})
	if names, followed := p.due(); !slices.Equal(names, []string{name}) || !followed {
		t.Errorf("due() = %v, %v of a daemon that was not asked", names, followed)
	}
	if names, followed := p.due(); len(names) != 0 || !followed {
		t.Errorf("due() = %v, %v of a daemon that is being asked", names, followed)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	p.check(over, name)
	if p.HasResult(name) {
		t.Error("a question that was given up counts as answered")
	}
	p.check(t.Context(), "another")
	if _, followed := p.targets["another"]; followed {
		t.Error("a resource is followed because it was asked about")
	}
	p.check(t.Context(), name)
	if reason := p.Unready().Value()[name]; reason != "" || !p.HasResult(name) {
		t.Errorf("a daemon that answers: %q, asked %v", reason, p.HasResult(name))
	}
	for _, file := range []string{startedMark, "silent"} {
		if err := os.WriteFile(c.folder(file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p.check(t.Context(), name)
	if reason := p.Unready().Value()[name]; reason != "" {
		t.Errorf("a daemon that answered and has its mark is asked: %q", reason)
	}
	if names, _ := p.due(); !slices.Equal(names, []string{name}) {
		t.Errorf("due() = %v of a daemon that has its mark", names)
	}
	clock.Step(askRarely)
	p.check(t.Context(), name)
	if reason := p.Unready().Value()[name]; !strings.Contains(reason, "does not answer") {
		t.Errorf("a daemon that does not answer any more: %q", reason)
	}
	if names, _ := p.due(); !slices.Equal(names, []string{name}) {
		t.Errorf("due() = %v of a daemon that does not answer", names)
	}
}

// TestLookInterval: a ready daemon is probed at every tenth look; without resources no timer runs.
func TestLookInterval(t *testing.T) {
	c := newScript(t, "true")
	clock := clocktest.NewFakeClock(time.Unix(0, 0))
	root, name := filepath.Split(c.dir)
	p := NewProber(root, clock)
	run := func() (end func()) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		return func() {
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("Run() = %v", err)
			}
		}
	}
	run()()
	if clock.HasWaiters() {
		t.Error("a look is planned although no resource is followed")
	}
	p.Follow([]string{name})
	if err := os.WriteFile(c.folder(startedMark), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	defer run()()
	poll.Until(t, "the first answer", func() bool { return len(p.Unready().Value()) == 0 })
	looks := 0
	for ; len(asked(t, c)) < 2 && looks < 20; looks++ {
		poll.Until(t, "the end of a look", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return !p.targets[name].isProbing && clock.HasWaiters()
		})
		clock.Step(checkInterval)
	}
	if looks < 9 || looks > 11 { // a look may have been planned before, and another after the probe
		t.Errorf("a daemon that answers was asked again after %d looks", looks)
	}
}

// TestStoppedDaemonLeavesNoReason leaves no reason of a failure: the daemon could be started.
func TestStoppedDaemonLeavesNoReason(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	s := NewSupervisor(root, feed.New[[]Group](nil), nil)
	g := ClaimDaemon{Devices: []ClaimDevice{{UUID: "GPU-a"}}, Exclusive: true}.group("uid-1-0")
	ctx, cancel := context.WithCancel(t.Context())
	modes := modesFunc(func() error {
		cancel()
		return errors.New("the end")
	})
	live := func(ctx context.Context) error {
		return s.runDaemon(ctx, exclusive.New(modes, filepath.Join(root, exclusiveMark)),
			&task{wanted: feed.New(g), current: feed.New(g)})
	}
	failed := filepath.Join(root, ClaimDir("uid-1-0"), failedMark)
	if err := live(ctx); err == nil {
		t.Error("no error of a GPU whose mode cannot be set")
	}
	if _, err := os.Stat(failed); err == nil {
		t.Error("a life that was ended has left a reason of failure")
	}
	if err := live(t.Context()); err == nil {
		t.Error("no error of a GPU whose mode cannot be set")
	}
	if text, err := os.ReadFile(failed); err != nil || string(text) != "the end" {
		t.Errorf("the reason of a failure is %q (%v)", text, err)
	}
}

// A modesFunc says whether a mode can be set.
type modesFunc func() error

func (f modesFunc) SetComputeMode(context.Context, string, inventory.ComputeMode) (inventory.ComputeMode, error) {
	return 0, f()
}
