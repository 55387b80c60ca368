package mps_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const control = "nvidia-cuda-mps-control"

// TestMain puts a stand-in for the driver's program on the PATH, and nothing else.
func TestMain(m *testing.M) {
	programs, err := os.MkdirTemp("", "mps")
	if err == nil {
		var output []byte
		output, err = exec.Command("go", "build", "-o", filepath.Join(programs, control),
			"../../test/mps").CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, output)
		}
	}
	if err == nil {
		err = os.Setenv("PATH", programs)
	}
	if err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(programs)
	os.Exit(code)
}

// A node is a directory of MPS state, and the compute modes of GPUs.
type node struct {
	t      *testing.T
	root   string
	wanted *feed.Feed[[]mps.Group]

	mu    sync.Mutex // guards all following fields
	modes map[string]inventory.ComputeMode
	fail  map[string]error // to set the mode of a GPU, or of any GPU for ""
}

func newNode(t *testing.T) *node {
	t.Helper()
	root, err := os.MkdirTemp("", "mps") // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	return &node{t: t, root: root, wanted: feed.New[[]mps.Group](nil), modes: map[string]inventory.ComputeMode{}}
}

// SetComputeMode makes a node the Modes of a Supervisor.
func (n *node) SetComputeMode(
	ctx context.Context, uuid string, mode inventory.ComputeMode,
) (inventory.ComputeMode, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := errors.Join(n.fail[uuid], n.fail[""], ctx.Err()); err != nil {
		return 0, err
	}
	before := n.modes[uuid]
	n.modes[uuid] = mode
	return before, nil
}

func (n *node) setFail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail = map[string]error{"": err}
}

// checkAccess checks that only the supervisor's user can change the supervisor's folders, and read
// the files.
func (n *node) checkAccess() {
	n.t.Helper()
	err := filepath.WalkDir(n.root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == n.root || strings.HasPrefix(filepath.Base(filepath.Dir(path)), "pipe") ||
			e.Name() == "control.log" {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if want := map[bool]fs.FileMode{true: 0o755, false: 0o600}[e.IsDir()]; info.Mode().Perm() != want {
			n.t.Errorf("%s has the mode %o, want %o", path, info.Mode().Perm(), want)
		}
		return nil
	})
	if err != nil {
		n.t.Error(err)
	}
}

// marked returns the GPUs of the mark.
func (n *node) marked() []string {
	n.t.Helper()
	text, err := os.ReadFile(n.path(".exclusive"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	return strings.Fields(string(text))
}

// checkModes checks the GPUs in another mode than the default.
func (n *node) checkModes(when string, want map[string]inventory.ComputeMode) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	got := map[string]inventory.ComputeMode{}
	for uuid, mode := range n.modes {
		if mode != inventory.ComputeDefault {
			got[uuid] = mode
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("compute modes %s (-want +got):\n%s", when, diff)
	}
}

// supervise runs a Supervisor of some groups, and returns a function that stops it.
func (n *node) supervise(groups ...mps.Group) (end func()) {
	n.t.Helper()
	n.wanted.Publish(append([]mps.Group{}, groups...))
	return n.run()
}

// run is supervise with unknown groups.
func (n *node) run() (end func()) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(n.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- mps.NewSupervisor(n.root, n.wanted, n).Run(ctx) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			n.t.Errorf("Run: %v", err)
		}
	})
	n.t.Cleanup(end)
	return end
}

// until waits for something to become so.
func (n *node) until(what string, so func() bool) {
	n.t.Helper()
	defer func() {
		if n.t.Failed() {
			n.t.Logf("the log: %s", n.log(one))
		}
	}()
	poll.Until(n.t, what, so)
}

func (n *node) path(name string) string { return filepath.Join(n.root, name) }

func (n *node) has(name string) bool {
	_, err := os.Stat(n.path(name))
	return err == nil
}

// untilReady waits until all daemons are ready.
func (n *node) untilReady() {
	n.t.Helper()
	n.until("ready", func() bool { return n.has(".ready") })
}

// log returns the commands that the daemons of a resource received, without probes.
func (n *node) log(resource string) []string {
	n.t.Helper()
	data, err := os.ReadFile(n.path(resource + "/log/control.log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.t.Fatal(err)
	}
	var commands []string
	for line := range strings.Lines(string(data)) {
		_, line, _ = strings.Cut(strings.TrimSpace(line), "] ")
		if strings.HasPrefix(line, "Starting ") || strings.HasPrefix(line, "Cmd:") &&
			!strings.HasPrefix(line, "Cmd:get_") {
			commands = append(commands, line)
		}
	}
	return commands
}

// pid returns the process ID of the daemon of a resource: 0 without a daemon.
func (n *node) pid(resource string) int {
	n.t.Helper()
	text, err := os.ReadFile(n.path(resource + "/pipe/nvidia-cuda-mps-control.pid"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0
	}
	if err != nil {
		n.t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		n.t.Fatal(err)
	}
	return pid
}

// tell gives the daemon of a resource a command.
func (n *node) tell(resource, command string) string {
	n.t.Helper()
	c := exec.CommandContext(n.t.Context(), control)
	c.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+n.path(resource+"/pipe"))
	c.Stdin = strings.NewReader(command + "\n")
	answer, err := c.CombinedOutput()
	if err != nil {
		n.t.Fatalf("%s: %v: %s", command, err, answer)
	}
	return strings.TrimSpace(string(answer))
}

// alive reports whether a process is there, and is no zombie.
func alive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(text), ") Z ")
}

const (
	one = "nvidia.com/gpu"
	two = "nvidia.com/gpu.shared"
)

func group(resource string, gpus ...mps.GPU) mps.Group {
	return mps.Group{Resource: resource, GPUs: gpus}
}

func gpu(name string, gib uint64, replicas int) mps.GPU {
	return mps.GPU{UUID: "GPU-" + name, MemoryBytes: gib << 30, Replicas: replicas}
}

func TestDaemonsAreStartedLimitedAndEnded(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.modes["GPU-c"] = inventory.ComputeProhibited
	end := n.supervise(group(one, gpu("a", 80, 3), gpu("b", 1, 4)), group(two, gpu("c", 0, 2)))
	n.untilReady()
	if mark, err := os.ReadFile(n.path(".ready")); err != nil || string(mark) != "mps\n" {
		t.Errorf("the mark says %q (%v)", mark, err)
	}
	n.checkAccess()
	if !n.has(one+"/.started") || !n.has(two+"/.started") {
		t.Error("not all daemons are marked as started")
	}
	n.checkModes("while they run", map[string]inventory.ComputeMode{
		"GPU-a": inventory.ComputeExclusiveProcess, "GPU-b": inventory.ComputeExclusiveProcess,
		"GPU-c": inventory.ComputeExclusiveProcess,
	})
	end()
	wantOne := []string{
		"Starting control daemon of GPU-a,GPU-b for several users", "Cmd:set_default_active_thread_percentage 25",
		"Cmd:set_default_device_pinned_mem_limit 0 27306M", "Cmd:set_default_device_pinned_mem_limit 1 256M",
		"Cmd:quit -t 5",
	}
	wantTwo := []string{"Starting control daemon of GPU-c for several users",
		"Cmd:set_default_active_thread_percentage 50", "Cmd:quit -t 5"}
	if diff := cmp.Diff([][]string{wantOne, wantTwo}, [][]string{n.log(one), n.log(two)}); diff != "" {
		t.Errorf("what the daemons were told (-want +got):\n%s", diff)
	}
	n.checkModes("afterwards", map[string]inventory.ComputeMode{"GPU-c": inventory.ComputeProhibited})
	for _, mark := range []string{".ready", ".exclusive", one + "/.started", two + "/.started"} {
		if n.has(mark) {
			t.Errorf("%s is there after the end", mark)
		}
	}
	for _, resource := range []string{one, two} {
		if alive(n.pid(resource)) {
			t.Errorf("the daemon of %s is there after the end", resource)
		}
	}
}

func TestADaemonThatDiesIsStartedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2)), group(two, gpu("b", 80, 2)))
	n.untilReady()
	first, other := n.pid(one), n.pid(two)
	server, err := strconv.Atoi(n.tell(one, "start_server -uid 0"))
	if err != nil {
		t.Fatal(err)
	}
	n.setFail(errors.New("not now")) // otherwise the next daemon may be ready before the test sees a missing mark
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.until("not ready", func() bool { return !n.has(".ready") && !n.has(one+"/.started") })
	n.setFail(nil)
	n.untilReady()
	if now := n.pid(one); now == first || !alive(now) {
		t.Errorf("the daemon is process %d, and was %d", now, first)
	}
	if n.has(one + "/.failed") {
		t.Error("the daemon of a resource has left a reason of failure, which only those of claims do")
	}
	told := n.log(one)
	if diff := cmp.Diff(told[:3], told[len(told)-3:]); diff != "" {
		t.Errorf("what the next daemon was told (-first +next):\n%s", diff)
	}
	n.until("no server outlives its daemon, and keeps the GPU from the next one's",
		func() bool { return !alive(server) })
	if n.pid(two) != other || !n.has(two+"/.started") {
		t.Error("the daemon of the other resource was started again")
	}
	n.checkModes("afterwards", map[string]inventory.ComputeMode{
		"GPU-a": inventory.ComputeExclusiveProcess, "GPU-b": inventory.ComputeExclusiveProcess,
	})
}

func TestChangesOfWhatIsShared(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2), gpu("b", 80, 2)), group(two, gpu("c", 80, 2)))
	n.untilReady()
	first, other := n.pid(one), n.pid(two)

	// b is lost, c is shared by more
	n.wanted.Publish([]mps.Group{group(one, gpu("a", 80, 2)), group(two, gpu("c", 80, 4))})
	n.until("another daemon of "+two, func() bool { return n.pid(two) != other && n.has(".ready") })
	if n.pid(one) != first || !alive(first) {
		t.Error("a daemon was ended because one of its GPUs is lost")
	}

	n.wanted.Publish([]mps.Group{group(one, gpu("a", 80, 2), gpu("c", 80, 2))}) // c is shared by one client only
	n.until("another daemon of "+one, func() bool { return n.pid(one) != first && n.has(".ready") })
	n.checkModes("afterwards", map[string]inventory.ComputeMode{
		"GPU-a": inventory.ComputeExclusiveProcess, "GPU-c": inventory.ComputeExclusiveProcess,
	})
	n.wanted.Publish([]mps.Group{}) // no daemon is wanted, so all daemons are ready
	n.until("no daemon", func() bool { return n.has(".ready") && !n.has(one+"/.started") && !n.has(".exclusive") })
	n.checkModes("without sharing", map[string]inventory.ComputeMode{})
}

func TestTwoSupervisorsDoNotWorkInOneRoot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	end := n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	first := n.pid(one)
	n.supervise(group(one, gpu("a", 80, 2)))
	end()
	n.until("the second works", func() bool { return n.pid(one) != first && n.has(".ready") })
	if quits := strings.Count(strings.Join(n.log(one), "\n"), "quit"); quits != 1 {
		t.Errorf("daemons were told to quit %d times, want once", quits)
	}
}

func TestGPUsWithoutComputeModes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setFail(inventory.ErrNotSupported)
	n.supervise(group(one, gpu("a", 80, 2)))
	n.until("folders", func() bool { return n.has(one + "/log") })
	if n.has(".ready") || n.has(one+"/.started") {
		t.Error("ready without exclusive GPUs")
	}
	n.setFail(nil)
	n.untilReady()
}

// notShort skips daemons that are killed only after 10 s, in short mode.
func notShort(t *testing.T, mood string) {
	t.Helper()
	if testing.Short() && (mood == "mute" || mood == "stubborn") {
		t.Skip("a daemon that does not quit is killed after 10 s: make test-all runs it")
	}
}

func TestDaemonsThatMisbehave(t *testing.T) {
	for mood, becomesReady := range map[string]bool{"lax": false, "stubborn": true} {
		t.Run(mood, func(t *testing.T) {
			notShort(t, mood)
			t.Setenv("MPS_STAND_IN", mood)
			n := newNode(t)
			end := n.supervise(group(one, gpu("a", 80, 2)))
			if becomesReady {
				n.untilReady()
			} else {
				n.until("a limit that is refused, and the end",
					func() bool { return slices.Contains(n.log(one), "Cmd:quit -t 5") })
			}
			pid := n.pid(one)
			end()
			if n.has(".ready") || n.has(one+"/.started") || alive(pid) {
				t.Error("the daemon is there after the end, or marked as ready")
			}
			n.checkModes("afterwards", map[string]inventory.ComputeMode{})
		})
	}
}

// TestDaemonOfOldDriver: the daemon does not know the option for several users. The daemons of a
// resource and of the units of a GPU then serve one user at a time.
func TestDaemonOfOldDriver(t *testing.T) {
	t.Setenv("MPS_STAND_IN", "old")
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	if got, want := n.log(one)[0], "Starting control daemon of GPU-a for one user"; got != want {
		t.Errorf("the daemon says %q, want %q", got, want)
	}
	const shares = "gpu.GPU-b"
	wanted := mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: "GPU-b"}}, MultiUser: true, Exclusive: true,
		Shared: true}
	if err := n.start(shares, wanted); err != nil {
		t.Fatal(err)
	}
	if got, want := n.log(mps.ClaimDir(shares)), "Starting control daemon of GPU-b for one user"; len(got) != 1 ||
		got[0] != want {
		t.Errorf("the daemon of shares says %q, want %q", got, want)
	}
	n.end(shares)
}

// TestEndlessAnswers: an endless answer is cut off, and the daemon is not ready.
func TestEndlessAnswers(t *testing.T) {
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	t.Setenv("MPS_STAND_IN", "endless") // for the client of the daemon
	n.untilReason(n.probe(one), one, "the answer has more than 65536 bytes")
	second := newNode(t)
	end := second.supervise(group(one, gpu("a", 80, 2)))
	second.until("a daemon", func() bool { return second.pid(one) != 0 })
	end()
	if second.has(".ready") || second.has(one+"/.started") || alive(second.pid(one)) {
		t.Error("ready although its answers have no end")
	}
}

func TestWithoutTheDriversProgram(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	n := newNode(t)
	end := n.supervise(group(one, gpu("a", 80, 2)))
	n.until("GPUs that are claimed", func() bool { return n.has(".exclusive") })
	end()
	if n.has(".ready") || n.has(one+"/.started") {
		t.Error("ready without the driver's program")
	}
	n.checkModes("afterwards", map[string]inventory.ComputeMode{})
}
