package nodefacts_test

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// changes are files of a made-up node by path: their text, or "-> TARGET" for a symbolic link,
// "char MAJOR:MINOR" for a device node, and gone for a missing file.
type changes map[string]string

const gone = "gone"

const (
	containerd2 = `version = 3
imports = ["conf.d/*.toml"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = true
`
	nvidiaDropIn = `version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "nvidia"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
SystemdCgroup = true
`
	containerd1 = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
enable_cdi = true
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "nvidia"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
`
	crioConf = `[crio.runtime]
default_runtime = "nvidia"
[crio.runtime.runtimes.nvidia]
runtime_path = "/usr/bin/nvidia-container-runtime"
`
	closed = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n" +
		"accept-nvidia-visible-devices-as-volume-mounts = true\n"
	address = "0000:3b:00.0"
	libs    = "usr/lib/x86_64-linux-gnu/"
	ours    = "k8s.device-plugin.nvidia.com"
)

// goodNode has one GPU and no problem.
var goodNode = changes{
	"sys/bus/pci/devices/" + address + "/vendor": "0x10de",
	"sys/bus/pci/devices/" + address + "/class":  "0x030200",
	"sys/bus/pci/devices/" + address + "/driver": "-> ../../drivers/nvidia",
	"sys/bus/pci/drivers/nvidia/bind":            "",
	"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " +
		"580.95.05  Release Build\n",
	"proc/driver/nvidia/gpus/" + address + "/information": "Model: \t NVIDIA H100\nDevice Minor: \t 0\n",
	"proc/devices": "Character devices:\n195 nvidia\n234 nvidia-caps\n510 nvidia-uvm\n" +
		"\nBlock devices:\n8 sd\n",
	"proc/1/comm":                                   "systemd",
	"proc/700/comm":                                 "containerd",
	"proc/700/cmdline":                              "/usr/bin/containerd\x00",
	"proc/701/comm":                                 "nvidia-persiste",
	libs + "libnvidia-ml.so.1":                      "-> libnvidia-ml.so.580.95.05",
	libs + "libnvidia-ml.so.580.95.05":              "\x7fELF",
	"dev/nvidiactl":                                 "char 195:255",
	"dev/nvidia0":                                   "char 195:0",
	"dev/nvidia-uvm":                                "char 510:0",
	"dev/nvidia-caps/nvidia-cap1":                   "char 234:1",
	"dev/char/195:255":                              "-> ../nvidiactl",
	"dev/char/195:0":                                "-> ../nvidia0",
	"dev/char/510:0":                                "-> ../nvidia-uvm",
	"dev/char/234:1":                                "-> ../nvidia-caps/nvidia-cap1",
	"etc/containerd/config.toml":                    containerd2,
	"etc/containerd/conf.d/99-nvidia.toml":          nvidiaDropIn,
	"usr/bin/nvidia-container-runtime":              "",
	"etc/nvidia-container-runtime/config.toml":      closed,
	"var/run":                                       "-> /run",
	"run/cdi/k8s.device-plugin.nvidia.com-gpu.json": `{"kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"GPU-1","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0"}]}}]}`,
}

// newNode returns the file system of the good node with changes.
func newNode(change changes) fstest.MapFS {
	files := maps.Clone(goodNode)
	maps.Copy(files, change)
	node := fstest.MapFS{}
	for name, text := range files {
		kind, rest, _ := strings.Cut(text, " ")
		switch {
		case text == gone:
		case kind == "->":
			node[name] = &fstest.MapFile{Data: []byte(rest), Mode: fs.ModeSymlink | 0o777}
		case kind == "char":
			major, minor := 0, 0
			for i, part := range strings.Split(rest, ":") {
				*[]*int{&major, &minor}[i] = number(part)
			}
			node[name] = &fstest.MapFile{
				Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666,
				Sys:  &syscall.Stat_t{Rdev: unix.Mkdev(uint32(major), uint32(minor))},
			}
		default:
			node[name] = &fstest.MapFile{Data: []byte(text), Mode: 0o644}
		}
	}
	return node
}

func number(text string) int {
	n := 0
	for _, digit := range text {
		n = 10*n + int(digit-'0')
	}
	return n
}

// gathered returns the facts of a node. It runs in a bubble of testing/synctest, so that a slow
// machine does not reach the limit: its clock stands still while something is read.
func gathered(t *testing.T, node fs.FS) (facts doctor.NodeFacts) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { facts = placesOf(node).Gather(t.Context()) })
	return facts
}

func placesOf(node fs.FS) nodefacts.Places {
	return nodefacts.Places{
		Kernel: node, Host: node, Driver: node, DriverRoot: "/", Devices: node, DevFolder: "/dev",
	}
}

// goodDaemon is the status of a daemon without problems.
func goodDaemon() status.Status {
	on := true
	return status.Status{
		Readiness: status.Readiness{Ready: true},
		GPUs: []status.Device{{
			Index: "0", UUID: "GPU-1", State: "Healthy", Signals: &status.Signals{PersistenceMode: &on, Fabric: "completed"},
		}},
		Resources: []status.Resource{{Name: "nvidia.com/gpu", Devices: 1, Healthy: 1, Server: "serving"}},
	}
}

var cdi = doctor.Settings{CDI: true, CDIFolder: "/var/run/cdi", CDIVendor: ours, KernelLog: true, DriverRoot: "/"}

// A row is a node that differs from the good node, with the expected finding. Other checks must
// find nothing, except for the checks in also.
type row struct {
	name     string
	change   changes
	settings func(*doctor.Settings)
	status   func(*status.Status)
	facts    func(*doctor.NodeFacts)
	check    string
	severity diagnosis.Severity
	says     string
	remedy   string // part of one of the commands
	shows    string // part of the evidence
	also     []string
}

func (r row) run(t *testing.T) {
	t.Parallel()
	facts := gathered(t, newNode(r.change))
	facts.Settings = cdi
	facts.Kubelet = diagnosis.Fact[doctor.Kubelet]{Value: doctor.Kubelet{
		Socket: "/var/lib/kubelet/device-plugins/kubelet.sock", Registered: map[string]int{"nvidia.com/gpu": 1},
	}}
	facts.PodResources = diagnosis.Fact[doctor.PodResourcesAnswer]{Value: doctor.PodResourcesAnswer{Devices: 1}}
	now := goodDaemon()
	if r.status != nil {
		r.status(&now)
	}
	facts.Daemon = diagnosis.Fact[doctor.Daemon]{Value: doctor.Daemon{Status: now}}
	if r.settings != nil {
		r.settings(&facts.Settings)
	}
	if r.facts != nil {
		r.facts(&facts)
	}
	found := false
	for _, f := range doctor.Examine(facts) {
		switch {
		case f.Check == r.check && f.Severity == r.severity && strings.Contains(f.Message, r.says):
			found = true
			if f.Severity > diagnosis.NotChecked && len(f.Remedy) == 0 ||
				!strings.Contains(strings.Join(f.Remedy, "\n"), r.remedy) {
				t.Errorf("no remedy %s: %+v", r.remedy, f)
			}
			if !strings.Contains(strings.Join(f.Evidence, "\n"), r.shows) {
				t.Errorf("no evidence %s: %+v", r.shows, f)
			}
		case f.Severity > diagnosis.OK && !slices.Contains(r.also, f.Check):
			t.Errorf("also found: %+v", f)
		case f.Check == "":
			t.Errorf("no check: %+v", f)
		}
		if isProblem := f.Severity != diagnosis.OK && f.Severity != diagnosis.NotChecked; isProblem != (f.Code != "") {
			t.Errorf("code %q: %+v", f.Code, f)
		}
	}
	if !found {
		for _, f := range doctor.Examine(facts) {
			t.Logf("found: %+v", f)
		}
		t.Errorf("no finding %s of %s that says %q", r.severity, r.check, r.says)
	}
}

func envvar(s *doctor.Settings) { s.CDI, s.Envvar = false, true }

func noDaemon(f *doctor.NodeFacts) {
	f.Daemon = diagnosis.Fact[doctor.Daemon]{Missing: "No daemon answers"}
}

var justDaemon = []string{"daemon", "dra"}

// TestFindings: each check in both directions. The good node is the other direction for all checks.
func TestFindings(t *testing.T) {
	t.Parallel()
	for _, r := range allRows() {
		t.Run(r.check+" "+r.name, r.run)
	}
}

// TestEveryCheckHasBothDirections: every check has a row without and a row with a problem.
func TestEveryCheckHasBothDirections(t *testing.T) {
	t.Parallel()
	content, not := map[string]bool{}, map[string]bool{}
	for _, r := range allRows() {
		content[r.check] = content[r.check] || r.severity == diagnosis.OK
		not[r.check] = not[r.check] || r.severity > diagnosis.OK
	}
	for _, c := range doctor.Checks {
		if !content[c.Name] || !not[c.Name] {
			t.Errorf("check %s: a row for a good node: %v, for a bad one: %v", c.Name, content[c.Name], not[c.Name])
		}
	}
}

var driverRows = []row{
	{name: "bound", check: "gpus", severity: diagnosis.OK, says: "1 GPU on the PCI bus"},
	{
		name: "nouveau", change: changes{
			"sys/bus/pci/devices/" + address + "/driver": "-> ../../drivers/nouveau", "sys/bus/pci/drivers/nouveau/bind": "",
		},
		check: "gpus", severity: diagnosis.Error, says: "bound to nouveau",
	},
	{
		name: "unbound", change: changes{"sys/bus/pci/devices/" + address + "/driver": gone},
		check: "gpus", severity: diagnosis.Warning, says: "bound to no driver", shows: "/driver: none",
	},
	{
		name: "bound to another driver", facts: func(f *doctor.NodeFacts) { f.GPUs.Value[0].Driver = "snd" },
		check: "gpus", severity: diagnosis.Warning, says: "is bound to snd, not to nvidia",
		remedy: "echo " + address + " > /sys/bus/pci/drivers/nvidia/bind",
	},
	{
		name: "virtual machine", change: changes{"sys/bus/pci/devices/" + address + "/driver": "-> ../../drivers/vfio-pci"},
		check: "gpus", severity: diagnosis.Info, says: "GPUs and virtual functions given to virtual machines: 1",
		shows: "it is bound to vfio-pci",
	},
	{
		name: "none", change: changes{"sys/bus/pci/devices/" + address + "/vendor": "0x8086"},
		check: "gpus", severity: diagnosis.Info, says: "No NVIDIA GPU",
	},
	{
		name: "no GPU", change: changes{"sys/bus/pci/devices/" + address + "/vendor": "0x8086"},
		check: "driver", severity: diagnosis.OK, says: "No GPU needs the driver", also: []string{"gpus"},
	},
	{
		name: "no GPU", change: changes{"sys/bus/pci/devices/" + address + "/vendor": "0x8086"},
		check: "device-nodes", severity: diagnosis.OK, says: "No GPU needs device nodes", also: []string{"gpus"},
	},
	{
		name: "no GPU", change: changes{"sys/bus/pci/devices/" + address + "/vendor": "0x8086"},
		check: "persistence", severity: diagnosis.OK, says: "No GPU needs persistence mode", also: []string{"gpus"},
	},
	{name: "one version", check: "driver", severity: diagnosis.OK, says: "Kernel module and library have version 580.95.05"},
	{
		name: "upgraded", change: changes{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " +
			"570.86.15  Thu\n"},
		check: "driver", severity: diagnosis.Error, says: "Driver 580.95.05 on disk, 570.86.15 loaded",
	},
	{
		name: "sysfs has the version", change: changes{"proc/driver/nvidia/version": gone,
			"sys/module/nvidia/version": "570.86.15\n"},
		check: "driver", severity: diagnosis.Error, says: "Driver 580.95.05 on disk, 570.86.15 loaded",
	},
	{
		name: "not loaded", change: changes{"proc/driver/nvidia/version": gone},
		check: "driver", severity: diagnosis.Error, says: "is not loaded",
	},
	{
		name: "no library", change: changes{libs + "libnvidia-ml.so.1": gone, libs + "libnvidia-ml.so.580.95.05": gone},
		check: "driver", severity: diagnosis.Error, says: "libnvidia-ml.so.1 is in no library folder",
	},
	{
		name: "library without version", change: changes{libs + "libnvidia-ml.so.1": "",
			libs + "libnvidia-ml.so.580.95.05": gone},
		check: "driver", severity: diagnosis.NotChecked, says: "has no version",
	},
	{
		name: "library not seen", facts: func(f *doctor.NodeFacts) { f.Library.Missing = "the driver root cannot be read" },
		check: "driver", severity: diagnosis.NotChecked, says: "the driver root cannot be read",
	},
	{
		name: "remains", change: changes{libs + "libnvidia-ml.so.535.1.2": ""},
		check: "driver", severity: diagnosis.Info, says: "libraries of other driver versions",
	},
	{
		name: "version that is garbage", change: changes{"proc/driver/nvidia/version": "NVRM version: \x1b[2J\x00\xff"},
		check: "driver", severity: diagnosis.NotChecked, says: "has no version",
	},
	{name: "not loaded", change: changes{"proc/driver/nvidia/version": gone}, check: "device-nodes",
		says: "Without the kernel module", also: []string{"driver"}},
	{name: "there", check: "device-nodes", severity: diagnosis.OK, says: "1 GPU with device nodes below /dev"},
	{name: "no number", change: changes{"proc/devices": "Character devices:\n195 nvidia\n"}, check: "device-nodes",
		says: "1 GPU with device nodes"},
	{
		name: "missing", change: changes{"dev/nvidia0": gone, "dev/nvidia-uvm": gone},
		check: "device-nodes", severity: diagnosis.Error, says: "missing: /dev/nvidia0, /dev/nvidia-uvm",
		also: []string{"cdi-specs"},
	},
	{
		name: "one missing", change: changes{"dev/nvidia-uvm": gone},
		check: "device-nodes", severity: diagnosis.Error, says: "Device nodes are missing: /dev/nvidia-uvm",
	},
	{
		name: "old number", change: changes{"dev/nvidia-uvm": "char 511:0", "dev/char/511:0": "-> ../nvidia-uvm"},
		check: "device-nodes", severity: diagnosis.Error,
		says: "/dev/nvidia-uvm has the device number 511:0, but the driver has 510:0",
	},
	{
		name:   "capabilities that no driver has",
		change: changes{"proc/devices": "Character devices:\n195 nvidia\n510 nvidia-uvm\n"},
		check:  "device-nodes", severity: diagnosis.OK, says: "1 GPU with device nodes",
	},
	{
		name: "capability of another minor", change: changes{"dev/nvidia-caps/nvidia-cap1": "char 234:2",
			"dev/char/234:2": "-> x"},
		check: "device-nodes", severity: diagnosis.Error, says: "the device number 234:2, but the driver has 234:1",
	},
	{
		name: "capability with an old number", change: changes{"dev/nvidia-caps/nvidia-cap1": "char 235:1",
			"dev/char/235:1": "-> x"},
		check: "device-nodes", severity: diagnosis.Error,
		says: "nvidia-cap1 has the device number 235:1, but the driver has 234:1",
	},
	{
		name: "a file", change: changes{"dev/nvidia0": "text"},
		check: "device-nodes", severity: diagnosis.Error, says: "/dev/nvidia0 is not a character device",
	},
	{
		name: "not in this container",
		facts: func(f *doctor.NodeFacts) {
			f.Container = diagnosis.Fact[doctor.Devices]{Value: doctor.Devices{Folder: "/dev"}}
		},
		check: "device-nodes", severity: diagnosis.Error, says: "This container has no /dev/nvidiactl",
	},
	{name: "on", check: "persistence", severity: diagnosis.OK, says: "Persistence mode is on"},
	{
		name: "off", status: func(s *status.Status) { s.GPUs[0].Signals.PersistenceMode = new(bool) },
		check: "persistence", severity: diagnosis.Warning, says: "off on GPU 0",
	},
	{
		name: "off on two of four", status: func(s *status.Status) {
			on := s.GPUs[0].Signals
			off := &status.Signals{PersistenceMode: new(bool), Fabric: on.Fabric}
			for i, signals := range []*status.Signals{nil, {Fabric: on.Fabric}, off, on, off} {
				s.GPUs = append(s.GPUs, status.Device{Index: fmt.Sprint(i + 1), State: "Healthy", Signals: signals})
			}
		},
		check: "persistence", severity: diagnosis.Warning, says: "off on GPUs 3, 5:",
	},
	{name: "nvidia-persistenced", facts: noDaemon, check: "persistence", severity: diagnosis.OK,
		says: "nvidia-persistenced is running", also: justDaemon},
	{
		name: "not seen", change: changes{"proc/701/comm": gone}, facts: noDaemon,
		check: "persistence", severity: diagnosis.NotChecked, says: "Persistence mode is unknown: no daemon answers",
		also: justDaemon,
	},
	{name: "registered", check: "fabric-manager", severity: diagnosis.OK, says: "registered with the NVSwitch fabric"},
	{name: "no switch", facts: noDaemon, check: "fabric-manager", severity: diagnosis.OK, says: "No NVSwitch",
		also: justDaemon},
	{
		name: "does not run", change: changes{
			"sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de", "sys/bus/pci/devices/0000:05:00.0/class": "0x068000",
		},
		facts: noDaemon, check: "fabric-manager", severity: diagnosis.Error, says: "Fabric Manager is not running",
		also:  justDaemon,
		shows: "1 NVSwitch on the PCI bus",
	},
	{
		name: "two switches", facts: func(f *doctor.NodeFacts) {
			noDaemon(f)
			f.NVSwitches.Value = make([]doctor.PCIDevice, 2)
		},
		check: "fabric-manager", severity: diagnosis.Error, says: "Fabric Manager is not running", also: justDaemon,
		shows: "2 NVSwitches on the PCI bus",
	},
	{
		name: "a simulated node", facts: func(f *doctor.NodeFacts) {
			noDaemon(f)
			f.NVSwitches.Value, f.Simulated = make([]doctor.PCIDevice, 1), true
		},
		check: "fabric-manager", severity: diagnosis.NotChecked, says: "the node is simulated", also: justDaemon,
	},
	{
		name: "runs", change: changes{
			"sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de", "sys/bus/pci/devices/0000:05:00.0/class": "0x068000",
			"proc/702/comm": "nv-fabricmanage",
		},
		facts: noDaemon, check: "fabric-manager", severity: diagnosis.OK, says: "Fabric Manager is running", also: justDaemon,
	},
}

var daemonRows = []row{
	{name: "well", check: "daemon", severity: diagnosis.OK, says: "serves 1 resource of 1 GPU"},
	{
		name: "no driver", status: func(s *status.Status) { s.Stale = "no NVIDIA driver" },
		check: "daemon", severity: diagnosis.Error, says: "The last scan of the GPUs failed: no NVIDIA driver",
	},
	{
		name: "file", status: func(s *status.Status) { s.ConfigError = "line 3: unknown key" },
		check: "daemon", severity: diagnosis.Error, says: "line 3: unknown key",
	},
	{
		name: "not ready", status: func(s *status.Status) { s.Readiness = status.Readiness{Reason: "waiting for kubelet"} },
		check: "daemon", severity: diagnosis.Error, says: "not ready: waiting for kubelet",
	},
	{
		name: "ready, with nothing to serve", status: func(s *status.Status) { s.Readiness.Reason = "nothing to serve" },
		check: "daemon", severity: diagnosis.OK, says: "serves 1 resource",
	},
	{
		name: "quiesced", status: func(s *status.Status) {
			s.Quiet, s.Stale = true, "the driver is released for maintenance: run resume first"
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unknown", s.Stale, string(inventory.RemedyHuman)
		},
		check: "daemon", severity: diagnosis.Warning, says: "the driver is released",
	},
	{
		name: "hangs", status: func(s *status.Status) {
			s.Calls = []status.Call{{GPU: new(int), Function: "nvmlDeviceGetUUID", Since: time.Unix(1e9, 0)}}
		},
		check: "daemon", severity: diagnosis.Error, says: "since 2001-09-09T01:46:40Z: nvmlDeviceGetUUID of GPU 0",
	},
	{
		name: "needs a reset", status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "XID 62", string(inventory.RemedyReset)
		},
		check: "daemon", severity: diagnosis.Error, says: "GPU 0 is Unhealthy: XID 62", remedy: "gpu-device-plugin reset --gpu 0   # needs hostDev: true in the chart",
	},
	{
		name: "can be reset while calls about no GPU and another one hang", status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "XID 62", string(inventory.RemedyReset)
			s.Calls = []status.Call{{Function: "nvmlEventSetWait"}, {GPU: new(7), Function: "nvmlDeviceGetUUID"}}
		},
		check: "daemon", severity: diagnosis.Error, says: "XID 62", remedy: "gpu-device-plugin reset --gpu 0   # needs hostDev: true in the chart", also: justDaemon,
	},
	{
		name: "cannot be reset while a call hangs", status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "it hangs", string(inventory.RemedyReset)
			s.Calls = []status.Call{{GPU: new(int), Function: "nvmlDeviceGetUUID"}}
		},
		check: "daemon", severity: diagnosis.Error, says: "it hangs", remedy: "shows whether the call has returned",
		also: justDaemon,
	},
	{
		name: "needs somebody", status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "XID 54", string(inventory.RemedyHuman)
		},
		check: "daemon", severity: diagnosis.Error, says: "XID 54",
	},
	{
		name: "registration", status: func(s *status.Status) { s.Resources[0].Problem = "kubelet refused" },
		check: "daemon", severity: diagnosis.Warning, says: "nvidia.com/gpu: kubelet refused",
	},
	{
		name: "warning", status: func(s *status.Status) { s.Warnings = []string{"a rule matches no device"} },
		check: "daemon", severity: diagnosis.Warning, says: "a rule matches no device",
	},
	{
		name: "MIG layout failed", status: func(s *status.Status) {
			s.MIG = &status.MIGLayout{Layout: "all-balanced", From: "mig apply", State: "failed", Reason: "GPU 3: no"}
			s.Summary = status.Summary{State: status.AllServed}
		},
		check: "daemon", severity: diagnosis.Error, says: "MIG layout all-balanced is failed: GPU 3: no",
		remedy: "gpu-device-plugin mig status",
	},
	{
		name: "MIG layout under way", status: func(s *status.Status) {
			s.MIG = &status.MIGLayout{Layout: "all-balanced", From: "mig apply", State: "pending", Reason: "GPU 3 is in use"}
		},
		check: "daemon", severity: diagnosis.Info, says: "MIG layout all-balanced is pending: GPU 3 is in use",
	},
	{
		name: "a GPU held back", status: func(s *status.Status) {
			s.Holds = []status.Hold{{Device: "GPU-3", Resource: "nvidia.com/gpu", Reason: "its MIG layout is not made"}}
		},
		check: "daemon", severity: diagnosis.Warning,
		says: "Not offered to pods yet: nvidia.com/gpu GPU-3; its MIG layout is not made",
	},
	{
		name: "degraded for another reason", status: func(s *status.Status) {
			s.Summary = status.Summary{State: status.Degraded, Text: "nvidia.com/gpu: 7 of 8"}
		},
		check: "daemon", severity: diagnosis.Warning, says: "The daemon is degraded: nvidia.com/gpu: 7 of 8",
	},
	{
		name: "labels", status: func(s *status.Status) { s.LabelsError = "refused" },
		check: "daemon", severity: diagnosis.Warning, says: "labels of the node are not written: refused",
	},
	{
		name: "peer-to-peer memory is to be released", status: func(s *status.Status) {
			s.GPUs[0].State, s.GPUs[0].Reason, s.GPUs[0].Remedy = "Unhealthy", "recovery action", string(inventory.RemedyDrainP2P)
		},
		check: "daemon", severity: diagnosis.Error, says: "recovery action",
		remedy: "delete the pods that use GPU 0 together with other GPUs; no reset is needed",
	},
	{
		name: "simulated", status: func(s *status.Status) { s.Simulated = "dgx-h100" },
		check: "daemon", severity: diagnosis.Info, says: "GPUs of this node are simulated",
	},
	{
		name: "away", facts: noDaemon, also: justDaemon,
		check: "daemon", severity: diagnosis.NotChecked, says: "No daemon answers",
	},
	{
		name: "fabric", status: func(s *status.Status) {
			s.GPUs[0].Remedy, s.GPUs[0].Signals.Fabric = string(inventory.RemedyFabric), "in-progress"
		},
		check: "fabric-manager", severity: diagnosis.Error, says: "not ready for GPU 0",
	},
	{name: "not used", check: "mps", severity: diagnosis.OK, says: "not shared by MPS"},
	{
		name: "answers", settings: func(s *doctor.Settings) { s.MPS = true },
		check: "mps", severity: diagnosis.OK, says: "answer",
	},
	{
		name: "does not answer", settings: func(s *doctor.Settings) { s.MPS = true },
		status: func(s *status.Status) { s.MPS = []string{"the MPS control daemon of nvidia.com/gpu does not answer"} },
		check:  "mps", severity: diagnosis.Error, says: "does not answer",
	},
	{
		name: "does not run", settings: func(s *doctor.Settings) { s.MPS = true }, facts: noDaemon,
		check: "mps", severity: diagnosis.Error, says: "no MPS control daemon is running", also: justDaemon,
	},
	{
		name: "runs", settings: func(s *doctor.Settings) { s.MPS = true }, facts: noDaemon,
		change: changes{"proc/703/comm": "nvidia-cuda-mps"},
		check:  "mps", severity: diagnosis.OK, says: "An MPS control daemon is running", also: justDaemon,
	},
	{
		name: "runs for others", change: changes{"proc/703/comm": "nvidia-cuda-mps"},
		check: "mps", severity: diagnosis.Info, says: "does not share GPUs by MPS",
	},
	{
		name: "file that is not used", settings: func(s *doctor.Settings) { s.Problem, s.ConfigFile = "cannot be used: line 1", "/c.yaml" },
		check: "configuration", severity: diagnosis.Error, says: "line 1",
	},
}
