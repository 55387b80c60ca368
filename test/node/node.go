// Package node puts the daemon's process and a stand-in kubelet together on one simulated node, for
// the programs below test/ and for tests that need the whole daemon. Only they may import it.
package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/utils/clock"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// Setup is what a node is made of.
type Setup struct {
	Daemon  string // path of the daemon's binary
	Profile string // of the simulated machine; empty for a daemon that Args give a driver
	Version standin.Version
	Clock   clock.PassiveClock // of kubelet's memory of what ended; nil means the real one
	Args    []string           // further arguments of the daemon; a flag that is given twice counts as given last
	Stderr  *os.File           // the daemon's standard error; nil for the file at LogPath

	Credential *syscall.Credential // of the daemon; nil for that of this process
}

// A Node is a folder with a stand-in kubelet and the daemon in it. Everything on it ends with
// Close. Its methods, but for those of the kubelet, are for one goroutine.
type Node struct {
	*standin.Kubelet
	Setup
	folder string
	log    *os.File // the daemon's
	daemon *Daemon  // nil while there is none
	guest  bool     // the kubelet belongs to another Node
}

// A Daemon is a process of the daemon.
type Daemon struct {
	*os.Process
	ended chan struct{}
	err   error // why it ended, once it has
}

// Ended returns a channel that is closed when the process has ended.
func (d *Daemon) Ended() <-chan struct{} { return d.ended }

// Err returns how the process ended, after it has: nil for an exit status of 0.
func (d *Daemon) Err() error { return d.err }

// Open makes a node whose kubelet runs; the daemon does not yet.
func Open(s Setup) (_ *Node, err error) {
	if s.Daemon, err = filepath.Abs(s.Daemon); err != nil {
		return nil, err
	}
	if _, err := os.Stat(s.Daemon); err != nil {
		return nil, fmt.Errorf("find the daemon: %w; build it with make build", err)
	}
	n := &Node{Setup: s}
	if n.folder, err = os.MkdirTemp("", "gpu"); err != nil { // short: paths of sockets must be
		return nil, err
	}
	n.Kubelet, err = standin.Start(standin.Options{
		Dir: n.Path("device-plugins"), PodResourcesSocket: n.Path("pod-resources.sock"), Version: s.Version, Clock: s.Clock,
	})
	if err == nil {
		n.log, err = os.Create(n.Path("daemon.log"))
	}
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// Beside makes room for another daemon beside the one of the node, with the same kubelet and a
// folder of its own. It has to be closed first.
func (n *Node) Beside(s Setup) (*Node, error) {
	s.Daemon = n.Setup.Daemon
	other := &Node{Kubelet: n.Kubelet, Setup: s, guest: true}
	var err error
	if other.folder, err = os.MkdirTemp("", "gpu"); err != nil {
		return nil, err
	}
	if other.log, err = os.Create(other.Path("daemon.log")); err != nil {
		return nil, errors.Join(err, other.Close())
	}
	return other, nil
}

// Path returns the path of a file of the node.
func (n *Node) Path(name string) string { return filepath.Join(n.folder, name) }

// StartDaemon starts the daemon's process.
func (n *Node) StartDaemon() error {
	args := []string{
		"--kubelet-socket", n.Socket(),
		"--pod-resources-socket", n.PodResourcesSocket(),
		"--control-socket", n.ControlSocket(),
		"--state-dir", n.Path("state"),
		"--cdi-dir", n.Path("cdi"),
		"--v", "2", // -v is the version under the names of NVIDIA's programs
	}
	if n.Profile != "" {
		args = append(args, "--simulate", n.Profile)
	}
	args = append(args, n.Args...)
	cmd := exec.Command(n.Setup.Daemon, args...)
	cmd.Stdout, cmd.Stderr = n.log, n.log
	if n.Stderr != nil {
		cmd.Stderr = n.Stderr
	}
	// Ctrl-C in a terminal goes to all processes of its group: the daemon is to end when we say so.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM, Credential: n.Credential}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	daemon := &Daemon{Process: cmd.Process, ended: make(chan struct{})}
	go func() {
		daemon.err = cmd.Wait()
		close(daemon.ended)
	}()
	n.daemon = daemon
	return nil
}

// ControlSocket returns the path of the daemon's control socket.
func (n *Node) ControlSocket() string { return n.Path("control.sock") }

// Running returns the daemon that was started last and not stopped; nil if there is none.
func (n *Node) Running() *Daemon { return n.daemon }

// LogPath returns the path of the daemon's log.
func (n *Node) LogPath() string { return n.log.Name() }

// stopTimeout is how long the daemon may take to end, which it does in two seconds where the
// machine is not busy.
const stopTimeout = 30 * time.Second

// StopDaemon asks the daemon to end and waits until it has, killing it if it takes too long.
func (n *Node) StopDaemon() error {
	daemon := n.daemon
	if daemon == nil {
		return nil
	}
	n.daemon = nil
	if err := daemon.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-daemon.ended:
		return daemon.err
	case <-time.After(stopTimeout):
		err := errors.Join(fmt.Errorf("the daemon did not end within %s of SIGTERM", stopTimeout), daemon.Kill())
		<-daemon.ended
		return err
	}
}

// Do runs a command of the daemon's binary against the running daemon.
func (n *Node) Do(ctx context.Context, args ...string) error {
	var output bytes.Buffer
	cmd := exec.CommandContext(ctx, n.Setup.Daemon, append(args, "--control-socket", n.ControlSocket())...)
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, output.String())
	}
	return nil
}

// Close ends everything and removes the folder.
func (n *Node) Close() error {
	err := n.StopDaemon()
	if n.Kubelet != nil && !n.guest {
		n.Stop()
	}
	if n.log != nil {
		err = errors.Join(err, n.log.Close())
	}
	return errors.Join(err, os.RemoveAll(n.folder))
}

// Logged returns the end of the daemon's log, without the questions for its status.
func (n *Node) Logged() string {
	text, err := os.ReadFile(n.log.Name())
	if err != nil {
		return err.Error()
	}
	lines := slices.DeleteFunc(strings.Split(strings.TrimSpace(string(text)), "\n"), func(line string) bool {
		return strings.Contains(line, `"Control call" call="status"`) || strings.Contains(line, `"Control call" call="ready"`)
	})
	return strings.Join(lines[max(0, len(lines)-120):], "\n")
}
