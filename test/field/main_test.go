// Package field_test holds what was reported by users of device plugins and what attacks found, one
// file an area. Each case has the number of the report, the input rebuilt in our own words, and
// what is right.
package field_test

import (
	"bytes"
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// asProgram is the environment variable by which a process of this test is gpu-device-plugin.
const asProgram = "GPU_DEVICE_PLUGIN_FIELD_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(cli.DevicePlugin().Main())
	}
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // daemons mostly wait
		panic(err)
	}
	os.Exit(m.Run())
}

// program returns a process of gpu-device-plugin that has not started yet. It ends with the test at
// the latest.
func program(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), poll.Limit)
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1", "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	t.Cleanup(func() {
		if cancel(); cmd.Process != nil {
			_ = cmd.Wait() // a test that looks at its end has waited before
		}
	})
	return cmd
}

// run runs a command of gpu-device-plugin and returns what it prints to both outputs, and its exit
// status.
func run(t testing.TB, args ...string) (text string, status int) {
	t.Helper()
	cmd := program(t, args...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatalf("%v: %v", args, err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// A host is a folder with a daemon on a simulated node, without a kubelet.
type host struct {
	t      testing.TB
	folder string
	socket string // of the daemon's control
	cgroup string // folder of the daemon's; empty for that of the test
	cmd    *exec.Cmd
	log    logText
}

// A logText is what a daemon has logged. Tests read it while the daemon runs.
type logText struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logText) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// newHost starts a daemon, and returns when it answers. It ends with the test.
func newHost(t testing.TB, args ...string) *host {
	t.Helper()
	return newHostIn(t, "", args...)
}

// newHostIn is newHost for a daemon in a cgroup.
func newHostIn(t testing.TB, cgroup string, args ...string) *host {
	t.Helper()
	folder := loopback.Folder(t)
	h := &host{t: t, folder: folder, socket: filepath.Join(folder, "c.sock"), cgroup: cgroup}
	h.start(args...)
	return h
}

// start starts a daemon in the folder, and returns when it answers.
func (h *host) start(args ...string) {
	h.t.Helper()
	h.cmd = program(h.t, append([]string{
		"--simulate=t4", "--kubelet-socket=", "--pod-resources-socket=", "--control-socket", h.socket,
		"--state-dir", filepath.Join(h.folder, "state"), "--cdi-dir", filepath.Join(h.folder, "cdi"),
	}, args...)...)
	if h.cgroup != "" { // the daemon is in it before it begins
		into := []string{"/bin/sh", "-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(h.cgroup, "cgroup.procs")}
		h.cmd.Path, h.cmd.Args = into[0], append(into, h.cmd.Args...)
	}
	h.cmd.Stderr = &h.log
	if err := h.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	poll.Until(h.t, "the daemon answers", func() bool { _, status := h.do("alive"); return status == 0 })
}

// do runs a command that talks to the daemon.
func (h *host) do(args ...string) (text string, status int) {
	h.t.Helper()
	return run(h.t, append(args, "--control-socket", h.socket)...)
}

// stop ends the daemon, and returns its log.
func (h *host) stop() string {
	h.t.Helper()
	if err := h.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- h.cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			h.t.Errorf("the daemon ended with %v: %s", err, h.log.String())
		}
	case <-time.After(poll.Limit):
		h.t.Fatal("the daemon does not end")
	}
	return h.log.String()
}
