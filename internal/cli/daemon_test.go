package cli_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A host is a folder with a stand-in kubelet and a daemon that runs in this process.
type host struct {
	*standin.Kubelet
	t      *testing.T
	folder string
	end    func() error
}

const patience = 2 * time.Minute // how long a test waits for what must come

// newHost starts both. The daemon ends with the test.
func newHost(t *testing.T, args ...string) *host {
	t.Helper()
	folder, err := os.MkdirTemp("", "h") // short: paths of sockets must be
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	k, err := standin.Start(standin.Options{Dir: filepath.Join(folder, "d"), PodResourcesSocket: filepath.Join(folder, "p.sock")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	h := &host{Kubelet: k, t: t, folder: folder}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- cli.DevicePlugin().Execute(ctx, "gpu-device-plugin", append([]string{
			"--kubelet-socket", k.Socket(), "--pod-resources-socket", k.PodResourcesSocket(), "--control-socket", h.socket(),
			"--state-dir", filepath.Join(folder, "state"), "--cdi-dir", filepath.Join(folder, "cdi"),
		}, args...), os.Stdout)
	}()
	stopped := false
	h.end = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(patience):
			t.Fatal("the daemon does not end")
			return nil
		}
	}
	t.Cleanup(func() {
		if err := h.end(); err != nil {
			t.Errorf("the daemon ended with %v", err)
		}
	})
	return h
}

func (h *host) socket() string { return filepath.Join(h.folder, "c.sock") }

// ask runs a command that asks the daemon, which has to succeed, and returns what it prints.
func (h *host) ask(args ...string) string {
	h.t.Helper()
	text, err := run(h.t, append(args, "--control-socket", h.socket())...)
	if err != nil {
		h.t.Errorf("%v: %v; it printed %s", args, err, text)
	}
	return text
}

// refused runs a command that asks the daemon, which has to fail with a text.
func (h *host) refused(want string, args ...string) string {
	h.t.Helper()
	text, err := run(h.t, append(args, "--control-socket", h.socket())...)
	if err == nil || !strings.Contains(err.Error(), want) {
		h.t.Errorf("%v: %v, want %q", args, err, want)
	}
	return text
}

// until waits until kubelet is as it should be.
func (h *host) until(what string, is func() bool) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	if err := h.WaitFor(ctx, is); err != nil {
		h.t.Fatalf("%v, want %s", err, what)
	}
}

// says waits until a command that asks the daemon prints a text.
func (h *host) says(want string, args ...string) {
	h.t.Helper()
	for late := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		text, err := run(h.t, append(args, "--control-socket", h.socket())...)
		if err == nil && strings.Contains(text, want) {
			return
		}
		if time.Now().After(late) {
			h.t.Fatalf("%v does not print %q but: %v: %s", args, want, err, text)
		}
	}
}

const gpu = "nvidia.com/gpu"

// TestCommandsOfADaemon runs the commands that ask a daemon, from its start to its end.
func TestCommandsOfADaemon(t *testing.T) {
	h := newHost(t, "--simulate", "dgx-h100", "--mig-strategy=mixed", "--mig-enabled")
	if text := h.ask("ready", "--wait=20s"); text != "ready" {
		t.Errorf("ready printed %q", text)
	}
	h.until("8 GPUs", func() bool { return h.Allocatable(gpu) == 8 })
	if text := h.ask("alive"); text != "alive" {
		t.Errorf("alive printed %q", text)
	}
	var now status.Status
	if err := json.Unmarshal([]byte(h.ask("status", "-o", "json")), &now); err != nil {
		t.Fatal(err)
	}
	if now.DRA != nil || len(now.GPUs) != 8 || now.Driver == "" || len(now.Resources) != 1 {
		t.Errorf("status: %+v", now)
	}

	h.ask("simulate", "xid", "--gpu=3", "--xid=64")
	h.until("7 GPUs", func() bool { return h.Allocatable(gpu) == 7 })
	h.says("degraded: GPU 3 Unhealthy", "status")
	h.refused(`"99"`, "health", "clear", "--gpu=99")
	h.ask("simulate", "restore", "--gpu=3")
	h.ask("health", "clear", "--gpu=3")
	h.until("8 GPUs", func() bool { return h.Allocatable(gpu) == 8 })
	h.ask("quiesce")
	h.says("quiesced: the driver is released since", "status")
	h.until("no GPU", func() bool { return h.Allocatable(gpu) == 0 })
	h.ask("resume")
	h.until("8 GPUs", func() bool { return h.Allocatable(gpu) == 8 })
	h.says("ready: 8 GPUs Healthy", "status")
	h.ask("simulate", "remove", "--gpu=7")
	h.until("7 GPUs", func() bool { return h.Allocatable(gpu) == 7 })
	h.ask("simulate", "add", "--gpu=7")
	h.until("8 GPUs", func() bool { return h.Allocatable(gpu) == 8 })

	if text := h.ask("mig", "status"); !strings.HasPrefix(text, "No layout is named. GPUs stay as they are.\n\nGPU 0  NVIDIA H100") {
		t.Errorf("mig status printed %q", text)
	}
	h.refused("give one of", "mig", "apply", "--layout=all-9g.90gb")
	h.refused("no GPU has the index", "mig", "apply", "--layout=all-balanced", "--gpu=9")
	h.ask("mig", "apply", "--layout=all-balanced", "--gpu=0", "--dry-run")
	if text := h.ask("mig", "apply", "--layout=all-balanced", "--gpu=0"); !strings.Contains(text, "It changes 1 of 1 GPUs") || !strings.Contains(text, "success") {
		t.Errorf("mig apply printed %s", text)
	}
	h.until("a divided GPU", func() bool { return h.Allocatable("nvidia.com/mig-3g.40gb") == 1 && h.Allocatable(gpu) == 7 })
	lines := strings.Split(h.ask("mig", "status"), "\n")
	if !strings.HasPrefix(lines[0], "Layout all-balanced of mig apply") || !slices.Contains(lines, "  done") {
		t.Errorf("mig status printed %q", lines)
	}
	h.ask("mig", "apply", "--forget")
	h.says("No layout is named", "mig", "status")
	if err := h.end(); err != nil {
		t.Errorf("the daemon ended with %v", err)
	}
	h.refused("no daemon answers", "status")
}
