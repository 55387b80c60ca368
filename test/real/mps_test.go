package real_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// versionIn is how a program of NVIDIA's has its version in it.
var versionIn = regexp.MustCompile(`\b\d{3}\.\d{2,3}\.\d{2}\b`)

// controlDaemons returns the control daemon of MPS of each branch of Debian's, by version, and the stand-in.
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

// An mps is a pipe directory and the program of its daemon and commands.
type mps struct {
	program, dir string
}

func (m mps) command(ctx context.Context, arguments ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, m.program, arguments...)
	c.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(m.dir, "pipe"), "CUDA_MPS_LOG_DIRECTORY=" + filepath.Join(m.dir, "log")}
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

// TestControlDaemons holds NVIDIA's control daemons, and the stand-in, to one table: what is set is read back so, there is one daemon for a pipe
// directory, one that was killed leaves nothing that keeps the next from starting, and quit ends it.
func TestControlDaemons(t *testing.T) {
	t.Parallel()
	for name, program := range controlDaemons(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "mps") // the path of a socket is short
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			m := mps{program, dir}
			for _, folder := range []string{"pipe", "log"} {
				if err := os.Mkdir(filepath.Join(dir, folder), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if out, err := m.ask(t, "get_server_list"); err == nil || !strings.Contains(out, "Cannot find MPS control daemon process") {
				t.Errorf("without a daemon: %q, %v", out, err)
			}
			first := m.start(t)
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
