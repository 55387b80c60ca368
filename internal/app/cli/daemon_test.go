package cli_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const patience = 2 * time.Minute // longest wait for an expected event

// A host is a daemon without a kubelet, and its folder. The daemon is a process of the test's own
// program.
type host struct {
	t      *testing.T
	socket string
	daemon *exec.Cmd
}

// newHost starts a daemon, which ends with the test.
func newHost(t *testing.T, args ...string) *host {
	t.Helper()
	folder := loopback.Folder(t)
	h := &host{t: t, socket: filepath.Join(folder, "c.sock")}
	h.daemon = program(t, append([]string{
		"--kubelet-socket=", "--pod-resources-socket=", "--control-socket", h.socket,
		"--state-dir", filepath.Join(folder, "state"), "--cdi-dir", filepath.Join(folder, "cdi"),
	}, args...)...)
	if err := h.daemon.Start(); err != nil {
		t.Fatal(err)
	}
	return h
}

// ask runs a command that asks the daemon and must succeed, and returns its output.
func (h *host) ask(args ...string) string {
	h.t.Helper()
	text, err := run(h.t, append(args, "--control-socket", h.socket)...)
	if err != nil {
		h.t.Errorf("%v: %v; it printed %s", args, err, text)
	}
	return text
}

// refused runs a command that asks the daemon and must fail with a text.
func (h *host) refused(want string, args ...string) {
	h.t.Helper()
	text, err := run(h.t, append(args, "--control-socket", h.socket)...)
	if err == nil || !strings.Contains(err.Error(), want) {
		h.t.Errorf("%v: %v, want %q; it printed %s", args, err, want, text)
	}
}

// says waits until a command that asks the daemon prints a text.
func (h *host) says(want string, args ...string) {
	h.t.Helper()
	h.until("it prints "+want, func(text string) bool { return strings.Contains(text, want) }, args...)
}

// until waits until the output of a command is as expected.
func (h *host) until(what string, is func(text string) bool, args ...string) {
	h.t.Helper()
	var text string
	defer func() {
		if h.t.Failed() {
			h.t.Logf("%v prints: %s", args, text)
		}
	}()
	poll.Until(h.t, what, func() bool {
		var err error
		text, err = run(h.t, append(args, "--control-socket", h.socket)...)
		return err == nil && is(text)
	})
}

// program starts a command line as a process of the test's own program. A running process is killed
// at the end of the test.
func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "GPU_DEVICE_PLUGIN_TEST_PROGRAM=1", "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	t.Cleanup(func() {
		if cmd.Process != nil {
			_ = cmd.Process.Kill()
		}
	})
	return cmd
}

// TestErrorsArePrintedOnce: an error is one line, without the usage of the program.
func TestErrorsArePrintedOnce(t *testing.T) {
	out, err := program(t, "--mig-strategy=some").CombinedOutput()
	if err == nil || strings.Count(string(out), "Error: ") != 1 || strings.Contains(string(out), "Usage:") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestControlDaemonsOfMPS: control daemons start for the configured sharing, and end with the
// command.
func TestControlDaemonsOfMPS(t *testing.T) {
	folder := t.TempDir()
	file, started := filepath.Join(folder, "config.yaml"), filepath.Join(folder, "started")
	script := "#!/bin/sh\n" + // the process has the name of the file, and ends on request
		"[ \"$1\" = -f ] || { case \"$(cat)\" in *quit*) kill $(cat " + started + ");; esac; exit 0; }\n" +
		"echo $$ >" + started + "\nexec sleep 60\n"
	if err := errors.Join(
		os.WriteFile(file, []byte("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n"), 0o600),
		os.WriteFile(filepath.Join(folder, "nvidia-cuda-mps-control"), []byte(script), 0o700),
	); err != nil {
		t.Fatal(err)
	}
	cmd := program(t, "mps-control-daemon", "--simulate=t4", "--config-file="+file, "--mps-root-ctr-path="+folder,
		"--control-socket=")
	cmd.Env = append(cmd.Env, "PATH="+folder+":"+os.Getenv("PATH"))
	var log strings.Builder
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for late := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if text, err := os.ReadFile(started); err == nil && len(text) > 0 {
			break
		}
		if time.Now().After(late) {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			t.Fatalf("no control daemon is started: %s", log.String())
		}
	}
	if err := errors.Join(cmd.Process.Signal(syscall.SIGHUP), cmd.Process.Signal(syscall.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ended with %v: %s", err, log.String())
	}
}

// TestExitStatusOfDoctor: the status is that of the worst finding, without a message, and 1 if
// doctor cannot run.
func TestExitStatusOfDoctor(t *testing.T) {
	for _, test := range []struct {
		arguments string
		status    int
		says      string
	}{{"--config-file=/no/such.yaml", 3, ""}, {"--mig-strategy=some --config-file=/no/such.yaml", 1, "Error: configuration is not valid: --mig-strategy: "}} {
		cmd := program(t, append(strings.Fields("doctor --simulate=t4 --kubelet-socket= --pod-resources-socket= "+
			"--control-socket="), strings.Fields(test.arguments)...)...)
		var complaints strings.Builder
		cmd.Stderr = &complaints
		err := cmd.Run()
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != test.status ||
			!strings.HasPrefix(complaints.String(), test.says) ||
			(complaints.Len() == 0) != (test.says == "") {
			t.Errorf("%s: %v: %s", test.arguments, err, complaints.String())
		}
	}
}

// TestErrorsInJSON: in a JSON log, the last line is the reason of the exit.
func TestErrorsInJSON(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("flags: {loggingFormat: json}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for format, problem := range map[string]string{"--logging-format=json": "dgx-9", "--config-file=" + file: "dgx-9",
		"--logging-format=json --mig-strategy=some": "--mig-strategy"} {
		out, err := program(t, append(strings.Fields(format), "--simulate=dgx-9")...).CombinedOutput()
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		var last struct{ Msg, Err string }
		if json.Unmarshal([]byte(lines[len(lines)-1]), &last) != nil || err == nil || last.Msg != "Failed" ||
			!strings.Contains(last.Err, problem) {
			t.Errorf("%s: %v: %s", format, err, out)
		}
	}
}

// TestNames: the version, and the simulated machines.
func TestNames(t *testing.T) {
	if text, err := run(t, "version"); err != nil || text != version.String() {
		t.Errorf("version printed %q, %v", text, err)
	}
	names := slices.Sorted(slices.Values(simulator.Names()))
	if text, err := run(t, "simulate", "profiles"); err != nil || text != strings.Join(names, "\n") {
		t.Errorf("simulate profiles printed %q, %v", text, err)
	}
}

// healthy waits until the daemon has the given number of Healthy GPUs.
func (h *host) healthy(want int) {
	h.t.Helper()
	h.until(fmt.Sprint(want, " GPUs are Healthy"), func(text string) bool {
		var now status.Status
		if err := json.Unmarshal([]byte(text), &now); err != nil {
			return false
		}
		sick := func(d status.Device) bool { return d.State != "Healthy" }
		return len(slices.DeleteFunc(now.GPUs, sick)) == want
	}, "status", "-o", "json")
}

const nvidiaCheckpoint = `{"v2":{"preparedClaims":{"uid":{"checkpointState":"PrepareCompleted","namespace":"ns","name":"c","status":{"allocation":{"devices":
{"results":[{"driver":"gpu.nvidia.com","request":"gpu","pool":"node","device":"gpu-0"}]}}},"preparedDevices":[{"devices":[{"gpu":{"info":{"uuid":"GPU-0"},
"device":{"DeviceName":"gpu-0"}}}]}]}}}}`

// TestCommandsOfADaemon runs the commands that ask a daemon, from its start to its end.
func TestCommandsOfADaemon(t *testing.T) {
	profile, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	profile.Faults = []simulator.Fault{{Kind: simulator.KindPersistence, GPU: "3", State: "off"}} // doctor warns about it
	text, err := yaml.Marshal(profile)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "machine.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	// including a claim of NVIDIA's driver, which does not concern a daemon without Dynamic
	// Resource Allocation
	root := t.TempDir()
	checkpoint := filepath.Join(root, "plugins", "gpu.nvidia.com", "checkpoint.json")
	if err := errors.Join(os.MkdirAll(filepath.Dir(checkpoint), 0o700),
		os.WriteFile(checkpoint, []byte(nvidiaCheckpoint), 0o600)); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, "--simulate", path, "--mig-strategy=mixed", "--mig-enabled", "--kubelet-root", root)
	h.says("ready", "ready", "--wait=20s")
	if text := h.ask("alive"); text != "alive" {
		t.Errorf("alive printed %q", text)
	}
	var now status.Status
	if err := json.Unmarshal([]byte(h.ask("status", "-o", "json")), &now); err != nil {
		t.Fatal(err)
	}
	if now.DRA != nil || len(now.GPUs) != 8 || now.Driver == "" || now.MIG == nil {
		t.Errorf("status: %+v", now)
	}
	h.healthy(8)

	examine := func(arguments ...string) (int, string) {
		t.Helper()
		text, err := run(t, append([]string{"doctor", "--host-root", t.TempDir(), "--control-socket", h.socket,
			"--kubelet-socket=",
			"--pod-resources-socket=", "--cdi-dir", t.TempDir()}, arguments...)...)
		var exit cli.ExitStatus
		if err != nil && !errors.As(err, &exit) {
			t.Errorf("doctor: %v", err)
		}
		return int(exit), text
	}
	if exit, text := examine(); exit != 2 || !strings.Contains(text, "Persistence mode is off on GPU 3") {
		t.Errorf("doctor ended with %d: %s", exit, text)
	}
	if exit, text := examine("--config-file=/no/such.yaml", "-o", "json"); exit != 3 ||
		!strings.Contains(text, `"worst": "error"`) {
		t.Errorf("doctor ended with %d: %s", exit, text)
	}

	watch := program(t, "status", "--watch", "--control-socket", h.socket)
	changes, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(changes)
	prints := func(want string) {
		t.Helper()
		late := time.AfterFunc(patience, func() { _ = watch.Process.Kill() })
		defer late.Stop()
		for lines.Scan() {
			if strings.Contains(lines.Text(), want) {
				return
			}
		}
		t.Fatalf("status --watch does not print %q", want)
	}
	prints("summary: ")

	h.ask("simulate", "nvlink", "--gpu=2", "--link=0")
	if text := h.ask("simulate", "list"); !strings.Contains(text, "   1 NVLinks are cut") {
		t.Errorf("simulate list printed %s", text)
	}
	h.ask("simulate", "restore")
	h.refused("xid is missing", "simulate", "xid", "--gpu=3")
	h.ask("simulate", "xid", "--gpu=3", "--xid=64")
	prints("GPU 3: Healthy → Unhealthy")
	h.healthy(7)
	h.refused(`"99"`, "health", "clear", "--gpu=99")
	h.ask("simulate", "restore", "--gpu=3")
	h.ask("health", "clear", "--gpu=3")
	h.healthy(8)
	h.ask("quiesce")
	h.says("the driver is released since", "status")
	h.ask("resume")
	h.healthy(8)
	signal := func(sig syscall.Signal) {
		t.Helper()
		if err := h.daemon.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	signal(syscall.SIGUSR1)
	h.says("the driver is released since", "status")
	signal(syscall.SIGUSR2)
	h.healthy(8)
	h.ask("simulate", "remove", "--gpu=7")
	h.healthy(7)
	h.ask("simulate", "add", "--gpu=7")
	h.healthy(8)

	if text := h.ask("mig", "status"); !strings.HasPrefix(text,
		"No layout is selected. GPUs stay unchanged.\n\nGPU 0  NVIDIA H100") {
		t.Errorf("mig status printed %q", text)
	}
	h.refused("give one of", "mig", "apply", "--layout=all-9g.90gb")
	h.refused("no GPU has the index", "mig", "apply", "--layout=all-balanced", "--gpu=9")
	if text := h.ask("mig", "apply", "--layout=all-balanced", "--gpu=0", "--dry-run"); !strings.Contains(text,
		"It changes 1 of 1 GPUs") {
		t.Errorf("mig apply printed %s", text)
	}
	h.says("No layout is selected", "mig", "status")
	h.ask("mig", "apply", "--layout=all-balanced", "--gpu=0", "--wait=0")
	h.until("the other GPUs stay", func(text string) bool { return strings.Count(text, "\n  kept") == 7 }, "mig", "status")
	h.says("Layout all-balanced of mig apply", "mig", "status")
	h.says("MIG layout: all-balanced of mig apply", "status")
	h.ask("mig", "apply", "--forget")
	h.says("No layout is selected", "mig", "status")

	signal(syscall.SIGTERM)
	if err := h.daemon.Wait(); err != nil {
		t.Errorf("the daemon ended with %v", err)
	}
	h.refused("no daemon answers", "status")
	prints("connection: waiting for the daemon")
	if err := watch.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := watch.Wait(); err != nil {
		t.Errorf("status --watch ended with %v", err)
	}
}
