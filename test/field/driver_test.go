package field_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// withKubelet starts a stand-in kubelet, and returns it with the arguments by which a daemon finds
// it.
func withKubelet(t *testing.T) (*standin.Kubelet, []string) {
	t.Helper()
	folder := loopback.Folder(t)
	k, err := standin.Start(standin.Options{Dir: filepath.Join(folder, "d"),
		PodResourcesSocket: filepath.Join(folder, "p.sock")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return k, []string{"--kubelet-socket", k.Socket(), "--pod-resources-socket", filepath.Join(folder, "p.sock")}
}

// has waits until the kubelet counts so many healthy devices of a resource.
func has(t *testing.T, k *standin.Kubelet, resource string, want int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), poll.Limit)
	defer cancel()
	if err := k.WaitFor(ctx, func() bool { return k.Allocatable(resource) == want }); err != nil {
		t.Fatalf("%d of %s are allocatable, want %d", k.Allocatable(resource), resource, want)
	}
}

// put replaces a file at once.
func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// withdrawals are configurations of an HGX H100 by which the daemon would offer nothing, with the
// reason.
var withdrawals = map[string]struct{ text, why string }{
	"16384 replicas": {"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 16384}]}}",
		"131072 devices"},
	"49 clients of MPS": {"flags: {mpsRoot: /mps}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 49}]}}",
		"MPS serves at most 48 clients"},
	"too many by model": {"selectors: [{models: ['*H100*'], rename: nvidia.com/h100, replicas: 30000}]",
		"nvidia.com/h100 is not offered"},
	"every GPU excluded": {"selectors: [{models: ['NVIDIA*'], exclude: true}]", "excluded by selectors[0]"},
}

// TestReloadThatWithdrawsEverything: a configuration that offers nothing where something was
// offered is refused (A11).
func TestReloadThatWithdrawsEverything(t *testing.T) {
	t.Parallel()
	const shared = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	k, args := withKubelet(t)
	file := filepath.Join(t.TempDir(), "config.yaml")
	put(t, file, shared)
	h := newHost(t, append(args, "--simulate=dgx-h100", "--config-file", file)...)
	has(t, k, "nvidia.com/gpu", 32)
	for name, c := range withdrawals {
		put(t, file, "version: v1\n"+c.text+"\n")
		text, status := run(t, "config", "check", file, "--simulate=dgx-h100")
		if status != 1 || !strings.Contains(text, "from 8 to 0: ") || !strings.Contains(text, c.why) {
			t.Errorf("%s: config check ends with %d, want 1 and %q:\n%s", name, status, c.why, text)
		}
		poll.Until(t, name+" is refused", func() bool {
			text, _ := h.do("status")
			text = strings.Join(strings.Fields(text), " ")
			return strings.Contains(text, "configuration file not used: ") && strings.Contains(text, c.why)
		})
		if got := k.Allocatable("nvidia.com/gpu"); got != 32 {
			t.Errorf("%s: %d devices are allocatable, want the 32 of before", name, got)
		}
	}
	put(t, file, strings.Replace(shared, "4", "2", 1))
	has(t, k, "nvidia.com/gpu", 16)
	if log := h.stop(); !strings.Contains(log, "Cannot use the configuration file; the last valid configuration stays in use") {
		t.Errorf("the log does not say that a file was refused:\n%s", log)
	}
}

// TestStartWithNothingToOffer: a daemon that starts with a configuration that cannot be served is
// not ready, so that its roll-out stops (A11).
func TestStartWithNothingToOffer(t *testing.T) {
	t.Parallel()
	_, args := withKubelet(t)
	file := filepath.Join(t.TempDir(), "config.yaml")
	put(t, file, "version: v1\n"+withdrawals["16384 replicas"].text+"\n")
	h := newHost(t, append(args, "--simulate=dgx-h100", "--config-file", file)...)
	poll.Until(t, "the daemon says why it is not ready", func() bool {
		text, status := h.do("ready")
		return status == 1 && strings.Contains(text, "the configuration cannot be served on this node: ") &&
			strings.Contains(text, "131072 devices")
	})
}

// TestACheckOfOneNodeIsNoCheckOfAFleet: what one kind of node cannot offer another one can (A11).
func TestACheckOfOneNodeIsNoCheckOfAFleet(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "config.yaml")
	put(t, file, "version: v1\n"+withdrawals["16384 replicas"].text+"\n")
	for _, args := range [][]string{{}, {"--simulate=t4"}} {
		if text, status := run(t, append([]string{"config", "check", file}, args...)...); status != 0 ||
			!strings.Contains(text, file+" is valid") {
			t.Errorf("config check %v ends with %d, want 0:\n%s", args, status, text)
		}
	}
}

// TestDriverFilesReplacedOnDisk: an unattended upgrade replaces the driver's files, and the kernel
// module stays (kdp#1431, gop#898, A10). A daemon that serves stays, serves, and is not ready.
func TestDriverFilesReplacedOnDisk(t *testing.T) {
	t.Parallel()
	const sentence = "driver 999.95.05 on disk, 580.95.05 loaded: restart the node"
	k, args := withKubelet(t)
	h := newHost(t, append(args, "--simulate=dgx-h100")...)
	has(t, k, "nvidia.com/gpu", 8)
	poll.Until(t, "the daemon is ready", func() bool { _, status := h.do("ready"); return status == 0 })
	h.do("simulate", "driver-files", "--driver", "999.95.05")
	poll.Until(t, "the daemon is not ready", func() bool {
		text, status := h.do("ready")
		return status == 1 && strings.Contains(text, "not ready: "+sentence)
	})
	if text, _ := h.do("status"); !strings.HasPrefix(text, "not ready: "+sentence) {
		t.Errorf("status begins with another sentence:\n%s", text)
	}
	has(t, k, "nvidia.com/gpu", 8)
	if text, status := h.do("alive"); status != 0 {
		t.Errorf("the daemon is not alive: %s", text)
	}
	h.do("simulate", "restore")
	poll.Until(t, "the daemon is ready again", func() bool { _, status := h.do("ready"); return status == 0 })
	if log := h.stop(); strings.Contains(log, "Restarting") {
		t.Errorf("the daemon has started again:\n%s", log)
	}
}

// TestSessionThatClosesAfterTheDriverFilesWereReplaced: where the old library is gone, no other
// session can be opened before the node is restarted (A10). The daemon stays, is not ready, and says
// why and what helps; its GPUs are Unhealthy and not gone.
func TestSessionThatClosesAfterTheDriverFilesWereReplaced(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits for half a minute: make test-all runs it")
	}
	t.Parallel()
	const sentence = "driver 999.95.05 on disk, 580.95.05 loaded: restart the node"
	for name, closes := range map[string][][]string{
		"the driver's events end": {{"simulate", "fail", "--call", "EventSetWait", "--return", "UNKNOWN"}},
		"an operator asks for it": {{"quiesce"}, {"resume"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k, args := withKubelet(t)
			began := time.Now()
			h := newHost(t, append(args, "--simulate=dgx-h100")...)
			has(t, k, "nvidia.com/gpu", 8)
			h.do("simulate", "driver-files", "--driver", "999.95.05")
			h.do("simulate", "fail", "--call", "Init", "--return", "LIB_RM_VERSION_MISMATCH")
			for _, command := range closes {
				h.do(command...) // resume fails: its look does
			}
			poll.Until(t, "the daemon is not ready", func() bool {
				text, status := h.do("ready")
				return status == 1 && strings.Contains(text, "not ready: ") && strings.Contains(text, sentence)
			})
			has(t, k, "nvidia.com/gpu", 0)
			if listed := k.Capacity("nvidia.com/gpu"); listed != 8 {
				t.Errorf("%d GPUs are listed, want 8 that are Unhealthy", listed)
			}
			text, status := h.do("status")
			if !strings.Contains(text, sentence) || status != 0 || strings.Contains(text, "Healthy ") {
				t.Errorf("status ends with %d:\n%s", status, text)
			}
			if text, status := h.do("alive"); status != 0 {
				t.Errorf("the daemon is not alive: %s", text)
			}
			poll.Until(t, "a process that another one could replace would have ended", func() bool {
				return time.Since(began) > 15*time.Second
			})
			h.do("simulate", "restore")
			has(t, k, "nvidia.com/gpu", 8)
			if log := h.stop(); strings.Count(log, `"Starting"`) != 1 {
				t.Errorf("the daemon has started again:\n%s", log)
			}
		})
	}
}

// TestStartWithDriverFilesThatDoNotFit: a daemon that starts before the node is restarted does not
// end, whatever --fail-on-init-error says, because the next one finds the same (kdp#1431, gop#898,
// A10).
func TestStartWithDriverFilesThatDoNotFit(t *testing.T) {
	t.Parallel()
	profile := filepath.Join(t.TempDir(), "upgraded.yaml")
	put(t, profile, "driver: 550.163.01\ncuda: \"12.4\"\nmodel: t4\ngpus: [{bdf: '0000:00:04.0', pcie: 0/0}]\n"+
		"faults: [{kind: driver-files, driver: 580.95.05}]\n")
	for _, fail := range []string{"true", "false"} {
		_, args := withKubelet(t)
		h := newHost(t, append(args, "--simulate", profile, "--fail-on-init-error="+fail)...)
		poll.Until(t, "the daemon is not ready", func() bool {
			text, status := h.do("ready")
			return status == 1 && strings.Contains(text, "driver 580.95.05 on disk, 550.163.01 loaded: restart the node")
		})
		if text, status := h.do("alive"); status != 0 {
			t.Errorf("the daemon is not alive: %s", text)
		}
	}
}

// TestDoctorOnAHostOfVirtualMachines: virtual functions and GPUs of virtual machines need no driver
// of this node (160 functions, A12).
func TestDoctorOnAHostOfVirtualMachines(t *testing.T) {
	t.Parallel()
	host := t.TempDir()
	add := func(address, driver, parent string) {
		folder := filepath.Join(host, "sys/bus/pci/devices", address)
		for _, name := range []string{folder, filepath.Join(host, "sys/bus/pci/drivers", driver)} {
			if err := os.MkdirAll(name, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		put(t, filepath.Join(folder, "vendor"), "0x10de\n")
		put(t, filepath.Join(folder, "class"), "0x030200\n")
		for name, target := range map[string]string{"driver": "../../drivers/" + driver, "physfn": "../" + parent} {
			if filepath.Base(target) != name+"s" && target != "../" {
				if err := os.Symlink(target, filepath.Join(folder, name)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	add("0000:1b:00.0", "vfio-pci", "")
	add("0009:01:00.0", "nvgrace-gpu-vfio-pci", "")
	for i := range 160 {
		add(fmt.Sprintf("0000:40:%02x.%d", i/8, i%8), []string{"nvidia", "vfio-pci"}[i%2], "0000:1b:00.0")
	}
	kernel := os.DirFS(host)
	var said []string
	for _, f := range doctor.Examine(nodefacts.Places{Kernel: kernel, Host: kernel, Devices: kernel,
		Driver: kernel}.Gather(t.Context())) {
		if slices.Contains([]string{"gpus", "driver", "device-nodes"}, f.Check) {
			said = append(said, fmt.Sprint(f.Severity, " ", f.Message, " ", f.Evidence, f.Remedy))
		}
	}
	text := strings.Join(said, "\n")
	if !strings.Contains(text, "GPUs and virtual functions given to virtual machines: 162") ||
		!strings.Contains(text, "and 154 more") {
		t.Errorf("doctor does not count what virtual machines have:\n%s", text)
	}
	if strings.Contains(text, "/bind") || strings.Contains(text, "warning") || strings.Contains(text, "error") {
		t.Errorf("doctor wants the driver for GPUs of virtual machines:\n%s", text)
	}
}

// TestDoctorOnAContainerWithoutDeviceNodes: one cause of all GPUs is one finding, with the remedy
// of the container and not of the GPUs (A7).
func TestDoctorOnAContainerWithoutDeviceNodes(t *testing.T) {
	t.Parallel()
	why := (&cuda.Failure{Kind: cuda.Refused, Function: "cuInit", Code: 100, Name: "CUDA_ERROR_NO_DEVICE"}).Error()
	s := status.Status{Readiness: status.Readiness{Ready: true}}
	for i := range 8 {
		s.GPUs = append(s.GPUs, status.Device{Index: fmt.Sprint(i), UUID: fmt.Sprintf("GPU-%d", i), State: "Unhealthy",
			Reason: why, Remedy: "human"})
	}
	kernel := os.DirFS(t.TempDir())
	facts := nodefacts.Places{Kernel: kernel, Host: kernel, Devices: kernel, Driver: kernel}.Gather(t.Context())
	facts.Daemon = diagnosis.Fact[doctor.Daemon]{Value: doctor.Daemon{Status: s}}
	var said []string
	for _, f := range doctor.Examine(facts) {
		if strings.Contains(f.Message, why) {
			said = append(said, f.Message+strings.Join(f.Remedy, "\n"))
		}
	}
	if len(said) != 1 || !strings.HasPrefix(said[0], "GPUs 0, 1, 2, 3, 4, 5, 6, 7 are Unhealthy: ") ||
		!strings.Contains(said[0], "hostDev=true") ||
		!strings.Contains(said[0], "runtimeclass nvidia") || strings.Contains(said[0], "health clear") {
		t.Errorf("doctor says %q", said)
	}
}
