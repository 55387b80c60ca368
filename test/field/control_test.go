package field_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// signal sends the daemon a signal.
func (h *host) signal(s syscall.Signal) {
	h.t.Helper()
	if err := h.cmd.Process.Signal(s); err != nil {
		h.t.Fatal(err)
	}
}

// freeze stops the daemon (SIGSTOP), and returns when none of its threads runs.
func (h *host) freeze() {
	h.t.Helper()
	h.signal(syscall.SIGSTOP)
	poll.Until(h.t, "the daemon is stopped", func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", h.cmd.Process.Pid))
		if err != nil || len(threads) == 0 {
			h.t.Fatalf("the daemon's threads: %v", err)
		}
		return !slices.ContainsFunc(threads, func(path string) bool {
			text, err := os.ReadFile(path)
			return err == nil && !strings.Contains(string(text), ") T ")
		})
	})
}

// TestCommandsThatWereGivenUp: what an operator asks of a daemon that is stopped, and gives up, is
// not done when the daemon goes on (E2).
func TestCommandsThatWereGivenUp(t *testing.T) {
	t.Parallel()
	h := newHost(t, "--v=2")
	given := map[string]string{
		"quiesce": `{"allocate": false}`, "resume": "null", "health.clear": `{"gpu": "0"}`, "mig.apply": `{"forget": true}`,
		"record.start": "{}", "record.stop": "null", "simulate.inject": `{"kind": "xid", "gpu": "0", "xid": 79}`,
	}
	h.freeze()
	for call, arguments := range given {
		// One has waited to its deadline. Its client is still there.
		c, err := net.Dial("unix", h.socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		const over = 1 // a nanosecond after the node's start
		if _, err := fmt.Fprintf(c, `{"call": %q, "arguments": %s, "deadline": %d}`, call, arguments, over); err != nil {
			t.Fatal(err)
		}
		// Another one was interrupted.
		interrupted, err := net.Dial("unix", h.socket)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintf(interrupted, `{"call": %q, "arguments": %s}`, call, arguments); err != nil {
			t.Fatal(err)
		}
		_ = interrupted.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := control.Follow(ctx, h.socket, "reset", map[string][]string{"gpus": {"0"}}, func(any) error { return nil })
	if !errors.Is(err, control.ErrSilent) {
		t.Errorf("reset: %v, want that the daemon does not answer", err)
	}
	h.signal(syscall.SIGCONT)
	poll.Until(t, "the daemon answers", func() bool { _, status := h.do("alive"); return status == 0 })
	if text, status := h.do("status"); status != 0 || strings.Contains(text, "quiesced") ||
		strings.Contains(text, "reset") {
		t.Errorf("something was done: %s", text)
	}
	if text, _ := h.do("simulate", "list"); strings.Contains(text, "xid") {
		t.Errorf("a fault was made: %s", text)
	}
	log := h.stop()
	for call := range given {
		for _, why := range []string{"the deadline of the caller has passed", "the caller has gone"} {
			refused := regexp.MustCompile(fmt.Sprintf(`"Control call" call=%q .*%s: nothing was begun`, call, why))
			if n := len(refused.FindAllString(log, -1)); n != 1 {
				t.Errorf("%s is refused %d times because %s, want once", call, n, why)
			}
		}
	}
	if t.Failed() {
		t.Log(log)
	}
}

// TestCommandsAtASilentDaemon: each command says within 30 s that the daemon does not answer (E2).
func TestCommandsAtASilentDaemon(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("each command waits for 30 s: make test-all runs it; TestSilence of internal/base/control has the shorter limits")
	}
	h := newHost(t)
	h.freeze()
	var commands sync.WaitGroup
	for args, changes := range map[string]bool{
		"status": false, "status --holders -o json": false, "alive": false, "ready": false, "ready --wait 5s": false,
		"mig status": false, "simulate list": false, "quiesce": true, "resume": true, "health clear --gpu 0": true,
		"mig apply --layout all-disabled": true, "record start": true, "record stop": true,
		"simulate xid --gpu 0 --xid 31": true, "reset --gpu 0": true,
	} {
		commands.Go(func() {
			began := time.Now()
			out, _ := program(t, append(strings.Fields(args), "--control-socket", h.socket)...).CombinedOutput()
			if took := time.Since(began); !strings.Contains(string(out), "Error: the daemon does not answer at") ||
				took < 30*time.Second {
				t.Errorf("%s, after %v: want after 30 s that the daemon does not answer:\n%s", args, took, out)
			}
			if strings.Contains(string(out), "will not start the requested change later") != changes {
				t.Errorf("%s: want a word about the change: %v\n%s", args, changes, out)
			}
		})
	}
	commands.Wait()
	h.signal(syscall.SIGCONT)
}

// TestIdleControlConnections: connections without a request, of root, keep no command waiting (E4).
func TestIdleControlConnections(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	var idle []net.Conn
	defer func() {
		for _, c := range idle {
			_ = c.Close()
		}
	}()
	for _, most := range []int{200, 1000} {
		for len(idle) < most {
			c, err := net.Dial("unix", h.socket)
			if errors.Is(err, syscall.EAGAIN) {
				continue // the backlog is full
			}
			if err != nil {
				t.Fatal(err)
			}
			idle = append(idle, c)
		}
		for _, command := range []string{"status", "alive", "ready"} {
			began := time.Now()
			text, status := h.do(command)
			if took := time.Since(began); status != 0 && command != "ready" || took > 4*time.Second { // an idle one has 5 s
				t.Errorf("%s beside %d idle connections: exit status %d after %v: %s", command, most, status, took, text)
			}
		}
	}
}
