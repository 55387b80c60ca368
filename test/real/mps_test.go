package real_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// versionIn is how a program of NVIDIA's has its version in it.
var versionIn = regexp.MustCompile(`\b\d{3}\.\d{2,3}\.\d{2}\b`)

// controlDaemons returns the control daemon of MPS of each branch of Debian's, by version, and the
// stand-in.
func controlDaemons(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, suite := range []string{"bookworm", "trixie", "experimental"} {
		program := part(t, "mps/"+suite+"/usr/bin/nvidia-cuda-mps-control")
		text, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		all[string(versionIn.Find(text))] = program
	}
	if len(all) != 3 || all[""] != "" {
		t.Fatalf("versions of control daemons: %v", all)
	}
	standIn := filepath.Join(t.TempDir(), "nvidia-cuda-mps-control")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", standIn, "../mps").CombinedOutput(); err != nil {
		t.Fatalf("build the stand-in: %v: %s", err, out)
	}
	all["stand-in"] = standIn
	return all
}

// An mps is a pipe directory and the program of its daemon and commands, which a user gives.
type mps struct {
	program, dir string
	user         uint32
}

// nobody is a user that is not root.
const nobody = 65534

// withPipe returns an mps with a pipe directory of its own. The program is where other users may
// start it.
func withPipe(t *testing.T, program string) mps {
	t.Helper()
	dir := loopback.Folder(t)
	m := mps{program: filepath.Join(dir, "nvidia-cuda-mps-control"), dir: dir}
	text, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	syscall.ForkLock.RLock() // a process that is forked while the program is written has it open, and it cannot be run
	err = os.WriteFile(m.program, text, 0o755)
	syscall.ForkLock.RUnlock()
	for _, err := range []error{
		err, os.Chmod(dir, 0o755), os.Mkdir(filepath.Join(dir, "pipe"), 0o755), os.Mkdir(filepath.Join(dir, "log"), 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func (m mps) command(ctx context.Context, arguments ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, m.program, arguments...)
	c.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(m.dir, "pipe"),
		"CUDA_MPS_LOG_DIRECTORY=" + filepath.Join(m.dir, "log")}
	if m.user != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: m.user, Gid: m.user}}
	}
	return c
}

// ask gives the daemon a command and returns what is printed.
func (m mps) ask(t *testing.T, command string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c := m.command(ctx)
	c.Stdin = strings.NewReader(command + "\n")
	out, err := c.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// answer asks again while the daemon takes no command, which is so for a moment after a client has
// come or gone.
func (m mps) answer(t *testing.T, command string) (out string) {
	t.Helper()
	poll.Until(t, "an answer to "+command, func() bool {
		out, _ = m.ask(t, command) // the words say more than the status
		return out != "" && !strings.HasPrefix(out, "Cannot send command")
	})
	return out
}

// start starts a daemon and waits until it answers.
func (m mps) start(t *testing.T) *exec.Cmd {
	t.Helper()
	c := m.command(context.Background(), "-f")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // nothing where the daemon has ended
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	deadline := time.Now().Add(20 * time.Second)
	for {
		if _, err := m.ask(t, "get_server_list"); err == nil {
			return c
		}
		if time.Now().After(deadline) {
			t.Fatal("the daemon does not answer")
		}
	}
}

// TestControlDaemons holds NVIDIA's control daemons, and the stand-in, to one table: what is set is
// read back so, there is one daemon for a pipe directory, one that was killed leaves nothing that
// keeps the next from starting, and quit ends it.
func TestControlDaemons(t *testing.T) {
	t.Parallel()
	for name, program := range controlDaemons(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := withPipe(t, program)
			if out, err := m.ask(t, "get_server_list"); err == nil ||
				!strings.Contains(out, "Cannot find MPS control daemon process") {
				t.Errorf("without a daemon: %q, %v", out, err)
			}
			first := m.start(t)
			// Of a GPU in units: no limit of its own, which the answer to the second of two commands says by
			// having none.
			if out, err := m.ask(t, "get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0"); err != nil ||
				out != "100.0" {
				t.Errorf("limits of a daemon that was given none: %q, %v", out, err)
			}
			for _, tt := range []struct{ set, get, want string }{
				{"set_default_active_thread_percentage 33", "get_default_active_thread_percentage", "33.0"},
				{"set_default_device_pinned_mem_limit 0 20389M", "get_default_device_pinned_mem_limit 0", "19G"},
			} {
				if out, err := m.ask(t, tt.set); err != nil {
					t.Errorf("%s: %q, %v", tt.set, out, err)
				}
				if out, err := m.ask(t, tt.get); err != nil || out != tt.want {
					t.Errorf("%s: %q, %v; want %q", tt.get, out, err, tt.want)
				}
			}
			if out, err := m.ask(t, "get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0"); err != nil ||
				out != "33.0\n19G" {
				t.Errorf("limits in one answer: %q, %v", out, err)
			}
			answer, _ := m.ask(t, "get_default_device_pinned_mem_limit 0")
			found("MPS", name, "a limit of 20389M is answered with %q", answer)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if out, err := m.command(ctx, "-f").CombinedOutput(); err == nil || ctx.Err() != nil {
				t.Errorf("a second daemon of one pipe directory: %q, %v", out, err)
			}
			if _, err := m.ask(t, "get_server_list"); err != nil {
				t.Errorf("the first daemon, after another was started: %v", err)
			}
			if err := first.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = first.Wait()
			second := m.start(t)
			if out, err := m.ask(t, "get_default_active_thread_percentage"); err != nil || out != "100.0" {
				t.Errorf("limits after a kill: %q, %v", out, err)
			}
			if out, err := m.ask(t, "quit -t 5"); err != nil {
				t.Errorf("quit: %q, %v", out, err)
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = second.Wait()
			}()
			select {
			case <-ended:
			case <-time.After(20 * time.Second):
				t.Error("quit does not end it")
			}
		})
	}
}

// TestCommandsOfClients holds what a container with the pipe directory may do, with and without
// control_privileged in it: whether a client reaches the daemon and a limit can be set, by root and
// by another user. Only root ends the daemon, and only by control_privileged.
func TestCommandsOfClients(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it needs root, to be another user too")
	}
	t.Parallel()
	client := clientOf(t, part(t, "debian"))
	for name, program := range controlDaemons(t) {
		if name == "stand-in" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := withPipe(t, program)
			daemon := m.start(t)
			hidden, privileged := filepath.Join(m.dir, "hidden"), filepath.Join(m.dir, "pipe", "control_privileged")
			pipe := "CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(m.dir, "pipe")
			limited := func(user uint32, percentage string) bool {
				m := m
				m.user = user
				out := m.answer(t, "set_default_active_thread_percentage "+percentage)
				if out != percentage+".0" && !strings.HasPrefix(out, "Insufficient privileges") {
					t.Errorf("as user %d: %q", user, out)
				}
				return out == percentage+".0"
			}
			says := []string{"root " + yesNo(limited(0, "41")), "another user " + yesNo(limited(nobody, "42"))}
			if code := client(pipe + "-missing"); code != "100" { // CUDA_ERROR_NO_DEVICE
				t.Errorf("cuInit without a daemon: %s", code)
			}
			with := client(pipe)
			if err := os.Rename(privileged, hidden); err != nil {
				t.Fatal(err)
			}
			if without := client(pipe); without != with || with != "805" { // CUDA_ERROR_MPS_CONNECTION_FAILED
				t.Errorf("cuInit of a client: %s, without control_privileged %s, want 805 of both", with, without)
			}
			says = append(says, "root without control_privileged "+yesNo(limited(0, "43")),
				"another user without it "+yesNo(limited(nobody, "44")))
			want := "root yes, another user no, root without control_privileged no, another user without it no"
			if strings.HasPrefix(name, "535.") {
				want = "root yes, another user yes, root without control_privileged yes, another user without it yes"
			}
			if got := strings.Join(says, ", "); got != want {
				t.Errorf("who can set a limit: %s; want %s", got, want)
			}
			if out := m.answer(t, "quit"); !strings.Contains(out, "Not enough privilege") ||
				daemon.Process.Signal(syscall.Signal(0)) != nil {
				t.Errorf("quit without control_privileged: %q", out)
			}
			found("MPS", name, "limits can be set by %s", strings.Join(says, ", "))
		})
	}
}

// clientOf returns a function that has libcuda of a driver root begin with a variable, and returns
// what cuInit says.
func clientOf(t *testing.T, root string) func(variable string) string {
	t.Helper()
	library, program := driverroot.Locate(root, cuda.Library), filepath.Join(t.TempDir(), "client")
	build := exec.CommandContext(t.Context(), "gcc", "-x", "c", "-o", program, "-", "-ldl")
	build.Stdin = strings.NewReader(`#include <dlfcn.h>
#include <stdio.h>
int main(int n, char **v) {
	int (*init)(unsigned) = dlsym(dlopen(v[1], RTLD_NOW), "cuInit");
	printf("%d", init(0));
}`)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the client: %v: %s", err, out)
	}
	return func(variable string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		c := exec.CommandContext(ctx, program, library)
		c.Env = []string{variable, "LD_LIBRARY_PATH=" + filepath.Dir(library) + ":" + filepath.Join(root,
			"usr/lib/x86_64-linux-gnu")}
		out, err := c.Output()
		if err != nil {
			t.Errorf("client with %s: %v", variable, err)
		}
		return string(out)
	}
}

func yesNo(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}
