package cuda

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
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// Command is the command by which a process of this program proves that CUDA works on a device. Its
// arguments are the driver root and the UUID. The process writes the names of functions and the
// result to descriptor 3.
const Command = "prove-cuda"

const (
	// Limit is how long a proof may take. A GPU in order takes less than two seconds.
	Limit = 10 * time.Second
	// MaxMemory is how many bytes of memory the process may have for itself: pages of files do not
	// count.
	MaxMemory = 300_000_000

	watchPeriod = 50 * time.Millisecond
	// endPatience is how long it is waited for a process that was killed: one that hangs in the driver
	// does not end.
	endPatience = time.Second
	maxSaid     = 300 // bytes of its standard error
	results     = 3   // the descriptor
)

// Prove proves in this process that CUDA works on a device, and writes the result to descriptor 3.
// It is the command's part.
func Prove(driverRoot, uuid string, searchPath ...string) error {
	out := os.NewFile(results, "results")
	if out == nil {
		return errors.New("this command is for the daemon and for validate")
	}
	syscall.CloseOnExec(results) // libcuda may start nvidia-modprobe
	// The kernel ends this process, and not the daemon, where memory is short; and no core of
	// gigabytes is written.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0o600)
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	text, err := json.Marshal(result{prove(driverRoot, searchPath, uuid, out)})
	if err == nil {
		_, err = fmt.Fprintf(out, "%s\n", text)
	}
	return err
}

// A result is the last line of the process.
type result struct {
	Failure *Failure `json:"failure"`
}

// A Proof is the result of a try.
type Proof struct {
	// Failure is why CUDA is not proven to work; nil if it is.
	Failure *Failure `json:"failure,omitempty"`
	// Took is how long it took.
	Took time.Duration `json:"took"`
	// Memory is how many bytes the process was seen to have for itself at most.
	Memory int64 `json:"memory"`
	// Ended is closed when the process has ended; a process that hangs in the driver may outlive Run.
	Ended <-chan struct{} `json:"-"`
}

// Run starts this program anew, and has it prove that CUDA works on the device with a UUID. Nothing
// that happens to that process harms this one. It ends when this one ends. The folders searchPath
// below the driver root are looked through for libraries before others.
func Run(ctx context.Context, driverRoot, uuid string, searchPath ...string) Proof {
	began := time.Now()
	ended := make(chan struct{})
	p := Proof{Ended: ended}
	ctx, cancel := context.WithTimeout(ctx, Limit)
	defer cancel()
	c := &child{began: make(chan error, 1), ended: ended}
	go c.live(append([]string{driverRoot, uuid}, searchPath...))
	if err := <-c.began; err != nil {
		p.Failure = &Failure{Kind: NotStarted, Text: err.Error()}
		return p
	}
	p.Failure, p.Memory = c.watch(ctx)
	p.Took = time.Since(began)
	return p
}

// A child is the process.
type child struct {
	command *exec.Cmd
	began   chan error
	ended   chan struct{}

	// What is known of it after ended.
	said     *statefile.Head // what it prints to standard error
	function string          // that it called last
	answer   *result
	err      error
}

// live starts the process and waits for its end. The kernel ends the process when the thread that
// started it ends, so this thread has to live as long.
func (c *child) live(args []string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(c.ended)
	in, err := c.start(args)
	c.began <- err
	if err != nil {
		return
	}
	c.listen(in)
	c.err = c.command.Wait()
}

// start starts the process. It returns what its results are read from.
func (c *child) start(args []string) (*os.File, error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }() // the process has it
	// Not by its path: where the disk hangs, Go has all of this process wait for the start.
	c.command = exec.Command("/proc/self/exe", append([]string{Command}, args...)...) //nolint:noctx // watch kills it
	// under another name the program is another command
	c.command.Args[0] = "gpu-device-plugin"
	c.command.ExtraFiles = []*os.File{out}
	c.said = statefile.NewHead(maxSaid)
	c.command.Stderr = c.said
	c.command.WaitDelay = endPatience
	c.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "CUDA_") { // what is set for this process is not what a pod has
			c.command.Env = append(c.command.Env, v)
		}
	}
	if err := c.command.Start(); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// listen reads what the process writes until it ends.
func (c *child) listen(in *os.File) {
	defer func() { _ = in.Close() }()
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		if text, isResult := strings.CutPrefix(lines.Text(), "{"); isResult {
			var r result
			if json.Unmarshal([]byte("{"+text), &r) == nil {
				c.answer = &r
			}
			continue
		}
		c.function = lines.Text()
	}
	_, _ = io.Copy(io.Discard, in)
}

// watch waits until the process has ended, and ends it when ctx ends or when it takes too much
// memory. It returns what it answered, and its memory.
func (c *child) watch(ctx context.Context) (*Failure, int64) {
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	var most int64
	for {
		select {
		case <-c.ended:
			return c.outcome(), most
		case <-ctx.Done():
			function := c.end()
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return &Failure{Kind: Hangs, Function: function}, most
			}
			return &Failure{Kind: NotStarted, Text: "it was given up"}, most
		case <-tick.C:
			if most = max(most, ownMemory(c.command.Process.Pid)); most > MaxMemory {
				return &Failure{Kind: TooLarge, Function: c.end()}, most
			}
		}
	}
}

// end kills the process and waits a moment for its end. It returns the function that it called
// last, if it has ended.
func (c *child) end() string {
	_ = c.command.Process.Kill()
	select {
	case <-c.ended:
		return c.function
	case <-time.After(endPatience):
		return ""
	}
}

// outcome returns why CUDA is not proven by a process that has ended; nil if it is.
func (c *child) outcome() *Failure {
	if c.answer != nil {
		return c.answer.Failure
	}
	text := "its process ended without an answer"
	if c.err != nil {
		text = c.err.Error()
	}
	if line, _, _ := strings.Cut(strings.TrimSpace(c.said.String()), "\n"); line != "" {
		text += ": " + line
	}
	return &Failure{Kind: Crashed, Function: c.function, Text: text}
}

// ownMemory returns how many bytes of memory a process has that are not pages of files; 0 if that
// cannot be read.
func ownMemory(pid int) int64 {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0
	}
	var sum int64
	for line := range strings.Lines(string(text)) {
		name, rest, _ := strings.Cut(line, ":")
		if name == "RssAnon" || name == "RssShmem" {
			kilobytes, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			sum += kilobytes << 10
		}
	}
	return sum
}
