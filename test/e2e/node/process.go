package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// stopGrace is how long a process has to end after SIGTERM. The API server waits for open watches,
// so it uses it up.
const stopGrace = 5 * time.Second

// process is one program of the node, from start to end. Its output goes to a log file of its own.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string
	done chan struct{} // closed when the process has ended
	err  error         // how it ended; read after done
}

// startProcess starts the program at path. A log that exists is continued: a restarted kubelet has
// one log.
func startProcess(logs, path string, args ...string) (*process, error) {
	name := filepath.Base(path)
	p := &process{name: name, log: filepath.Join(logs, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open log of %s: %w", name, err)
	}
	defer out.Close()
	p.cmd = exec.Command(path, args...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	// A process group of its own: Ctrl-C in the terminal reaches the test program alone, which then
	// ends the node.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(path)+":"+os.Getenv("PATH"))
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// stop ends the process and returns when it has ended.
func (p *process) stop() {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		_ = p.cmd.Process.Signal(signal) // An error says that the process has ended already.
		select {
		case <-p.done:
			return
		case <-time.After(stopGrace):
		}
	}
	<-p.done
}

// ready asks until ask succeeds, the process ends or ctx does.
func (p *process) ready(ctx context.Context, ask func(context.Context) error) error {
	err := Wait(ctx, 100*time.Millisecond, func(ctx context.Context) error {
		select {
		case <-p.done:
			return stop{fmt.Errorf("%s ended: %w; its log ends with\n%s", p.name, p.err, tail(p.log))}
		default:
			return ask(ctx)
		}
	})
	if err != nil {
		return fmt.Errorf("wait for %s: %w", p.name, err)
	}
	return nil
}

// tail returns the last lines of a log.
func tail(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(content)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// panicked returns what a log says of the program's last panic, and where that was; "" if there was
// none.
func panicked(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	_, after, found := strings.Cut(string(content), "\npanic: ")
	if !found {
		return ""
	}
	lines := strings.SplitN(after, "\n", 12)
	return "; panic: " + strings.Join(lines[:len(lines)-1], "\n")
}
