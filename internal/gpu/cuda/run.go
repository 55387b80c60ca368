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

// Command is the command of the process for a CUDA check of a device. Its arguments are the driver
// root and the UUID. The process writes function names and the result to file descriptor 3.
const Command = "prove-cuda"

const (
	// Limit is the time limit of a check. A good GPU takes less than two seconds.
	Limit = 10 * time.Second
	// MaxMemory limits the memory of the process in bytes, without pages of files.
	MaxMemory = 300_000_000

	watchPeriod = 50 * time.Millisecond
	// endPatience limits the wait for a killed process: a process that hangs in the driver does not
	// end.
	endPatience = time.Second
	maxSaid     = 300 // bytes of the process's standard error
	results     = 3   // file descriptor
)

// Prove checks CUDA on a device in this process, and writes the result to file descriptor 3. The
// command calls it.
func Prove(driverRoot, uuid string, searchPath ...string) error {
	out := os.NewFile(results, "results")
	if out == nil {
		return errors.New("this command is for the daemon and for validate")
	}
	syscall.CloseOnExec(results) // libcuda may start nvidia-modprobe
	// If memory is short, the kernel kills this process instead of the daemon. No core file of
	// gigabytes is written.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0o600)
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	text, err := json.Marshal(result{prove(driverRoot, searchPath, uuid, out)})
	if err == nil {
		_, err = fmt.Fprintf(out, "%s\n", text)
	}
	return err
}

// A result is the last line of output of the process.
type result struct {
	Failure *Failure `json:"failure"`
}

// A Proof is the result of a check.
type Proof struct {
	// Failure says why CUDA is not proven to work; nil on success.
	Failure *Failure `json:"failure,omitempty"`
	// Took is the duration of the check.
	Took time.Duration `json:"took"`
	// Memory is the highest observed memory use of the process, in bytes.
	Memory int64 `json:"memory"`
	// Ended is closed at the end of the process. A process that hangs in the driver may outlive
	// Run.
	Ended <-chan struct{} `json:"-"`
}

// Run starts a new process of this program for a CUDA check of the device with a UUID. A crash or
// hang of the new process does not affect this process. The new process ends together with this
// process. Libraries are searched first in the directories searchPath below the driver root.
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

// A child is the process of a check.
type child struct {
	command *exec.Cmd
	began   chan error
	ended   chan struct{}

	// Valid after ended.
	stderrHead *statefile.Head // the beginning of the process's standard error
	function   string          // the last called function
	answer     *result
	err        error
}

// live starts the process and waits for its end. The kernel kills the process at the end of the
// starting thread. This thread must therefore live as long.
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

// start starts the process and returns the reader of its results.
func (c *child) start(args []string) (*os.File, error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }() // the process has a copy
	// /proc/self/exe instead of the path: on a hanging disk, Go would block this whole process
	// during the start.
	c.command = exec.Command("/proc/self/exe", append([]string{Command}, args...)...) //nolint:noctx // watch kills it
	// The program behaves differently under another name.
	c.command.Args[0] = "gpu-device-plugin"
	c.command.ExtraFiles = []*os.File{out}
	c.stderrHead = statefile.NewHead(maxSaid)
	c.command.Stderr = c.stderrHead
	c.command.WaitDelay = endPatience
	c.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "CUDA_") { // pods do not have the settings of this process
			c.command.Env = append(c.command.Env, v)
		}
	}
	if err := c.command.Start(); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// listen reads the output of the process until its end.
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

// watch waits for the end of the process, and kills the process at the end of ctx or after too much
// memory use. It returns the failure and the memory of the process.
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
			return &Failure{Kind: NotStarted, Text: "the check was cancelled"}, most
		case <-tick.C:
			if most = max(most, ownMemory(c.command.Process.Pid)); most > MaxMemory {
				return &Failure{Kind: TooLarge, Function: c.end()}, most
			}
		}
	}
}

// end kills the process and waits briefly for its end. It returns the last called function if the
// process has ended.
func (c *child) end() string {
	_ = c.command.Process.Kill()
	select {
	case <-c.ended:
		return c.function
	case <-time.After(endPatience):
		return ""
	}
}

// outcome returns why CUDA is not proven after the end of the process; nil on success.
func (c *child) outcome() *Failure {
	if c.answer != nil {
		return c.answer.Failure
	}
	text := "its process ended without an answer"
	if c.err != nil {
		text = c.err.Error()
	}
	if line, _, _ := strings.Cut(strings.TrimSpace(c.stderrHead.String()), "\n"); line != "" {
		text += ": " + line
	}
	return &Failure{Kind: Crashed, Function: c.function, Text: text}
}

// ownMemory returns the memory of a process in bytes, without pages of files; 0 if unreadable.
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
