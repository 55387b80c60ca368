package nodefacts_test

import (
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const (
	config   = "etc/containerd/config.toml"
	dropIn   = "etc/containerd/conf.d/99-nvidia.toml"
	toolkit  = "etc/nvidia-container-runtime/config.toml"
	runtime2 = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n"
)

// allOfRuntime are the checks that need the container runtime.
var allOfRuntime = []string{"container-runtime", "nvidia-runtime", "visible-devices", "daemon-reload"}

var runtimeRows = []row{
	{name: "containerd 2", check: "container-runtime", severity: diagnosis.OK, says: "containerd is set up",
		shows: "/etc/containerd/config.toml"},
	{
		name: "containerd without a file", facts: func(f *doctor.NodeFacts) { f.Runtime.Value.Files = nil },
		check: "container-runtime", severity: diagnosis.OK, says: "is set up", shows: "containerd has no configuration file",
	},
	{
		name: "containerd 2, CDI off", change: changes{config: containerd2 +
			"[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n"},
		check: "container-runtime", severity: diagnosis.Error, says: "CDI is off in containerd", shows: "enable_cdi = false",
	},
	{
		name: "containerd 2, CDI off by a drop-in", change: changes{"etc/containerd/conf.d/zz.toml": runtime2 +
			"enable_cdi = false"},
		check: "container-runtime", severity: diagnosis.Error, says: "CDI is off in containerd",
	},
	{
		name: "containerd 2, other folders", change: changes{"etc/containerd/conf.d/zz.toml": runtime2 +
			"cdi_spec_dirs = ['/opt/cdi']"},
		check: "container-runtime", severity: diagnosis.Error, says: "does not look for CDI specs in /var/run/cdi",
	},
	{
		name: "containerd 2, the folder by its other name", change: changes{"etc/containerd/conf.d/zz.toml": runtime2 +
			"cdi_spec_dirs = ['/run/cdi']"},
		check: "container-runtime", severity: diagnosis.OK, says: "is set up",
	},
	{
		name: "containerd 1.7", change: changes{config: containerd1, dropIn: gone},
		check: "container-runtime", severity: diagnosis.OK, says: "is set up",
	},
	{
		name: "containerd 1.7, CDI off", change: changes{
			config: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n", dropIn: gone,
		},
		check: "container-runtime", severity: diagnosis.Error, says: "CDI is off in containerd",
	},
	{
		name: "version not known", change: changes{config: "version = 2\n", dropIn: gone},
		check: "container-runtime", severity: diagnosis.NotChecked,
		says: "The version of containerd is unknown, and the result depends on it. 1.7: CDI is off",
	},
	{
		name: "CDI off and not used", change: changes{config: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n" +
			"enable_cdi = false\n" +
			"[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = 'n'\n" +
			"[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.n.options]\n" +
			"BinaryName = '/usr/bin/nvidia-container-runtime'\n"},
		settings: func(s *doctor.Settings) { s.CDI, s.VolumeMounts = false, true },
		check:    "container-runtime", severity: diagnosis.Info, says: "does not use it",
	},
	{
		name: "CRI disabled", change: changes{config: "disabled_plugins = ['io.containerd.grpc.v1.cri']\n" + containerd2},
		check: "container-runtime", severity: diagnosis.Error, says: "CRI plugin of containerd is disabled",
		remedy: "remove cri from disabled_plugins",
	},
	{
		name: "not TOML", change: changes{"etc/containerd/conf.d/zz.toml": "\x00\xff= ["},
		check: "container-runtime", severity: diagnosis.Warning, says: "cannot be read",
	},
	{
		name: "another file", change: changes{
			"proc/700/cmdline": "containerd\x00--config=/opt/c.toml\x00",
			"opt/c.toml":       "imports = ['/etc/containerd/config.toml', 'c.toml']\n" + runtime2 + "enable_cdi = false\n",
		},
		check: "container-runtime", severity: diagnosis.Error, says: "CDI is off",
	},
	{
		name: "Docker's containerd beside it", change: changes{
			"proc/500/comm": "containerd", "proc/500/cmdline": "containerd\x00--config\x00/var/run/docker/containerd/containerd.toml\x00",
		},
		check: "container-runtime", severity: diagnosis.OK, says: "is set up",
	},
	{
		name: "CRI-O, a file that is not TOML", change: changes{"proc/700/comm": "crio", "etc/crio/crio.conf": "=",
			"etc/crio/crio.conf.d/10": crioConf},
		check: "container-runtime", severity: diagnosis.Warning, says: "configuration file of CRI-O cannot be read",
		remedy: "crio config > /dev/null",
	},
	{
		name: "no runtime", change: changes{"proc/700/comm": gone},
		check: "container-runtime", severity: diagnosis.NotChecked, says: "neither containerd, CRI-O nor cri-dockerd is running",
		also: allOfRuntime,
	},
	{
		name: "CRI-O", change: changes{"proc/700/comm": "crio", "etc/crio/crio.conf.d/10-nvidia": crioConf},
		check: "container-runtime", severity: diagnosis.OK, says: "CRI-O is set up",
	},
	{
		name: "CRI-O, other folders", change: changes{
			"proc/700/comm": "crio", "etc/crio/crio.conf": "[crio.runtime]\ncdi_spec_dirs = ['/etc/cdi']\n",
			"etc/crio/crio.conf.d/10-nvidia": crioConf,
		},
		check: "container-runtime", severity: diagnosis.Error, says: "CRI-O does not look for CDI specs in /var/run/cdi",
	},
	{
		name: "two runtimes and no kubelet", change: changes{"proc/702/comm": "crio"},
		check: "container-runtime", severity: diagnosis.NotChecked, says: "no kubelet is visible to show which runtime it uses",
		also: allOfRuntime,
	},
	{name: "default", check: "nvidia-runtime", severity: diagnosis.OK, says: "the default of containerd"},
	{
		name: "not known", facts: func(f *doctor.NodeFacts) { f.Runtime = diagnosis.Fact[doctor.Runtime]{Missing: "/proc cannot be read"} },
		check: "nvidia-runtime", severity: diagnosis.NotChecked, says: "/proc cannot be read",
		also: []string{"container-runtime", "visible-devices", "daemon-reload"},
	},
	{
		name: "class", change: changes{"etc/containerd/conf.d/zz.toml": runtime2 +
			"[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'runc'\n"},
		settings: func(s *doctor.Settings) { s.VolumeMounts = true },
		check:    "nvidia-runtime", severity: diagnosis.Info, says: "pods with GPUs need runtimeClassName",
	},
	{
		name: "not there", change: changes{dropIn: gone}, settings: func(s *doctor.Settings) { s.Envvar = true },
		check: "nvidia-runtime", severity: diagnosis.Error, says: "containerd does not have NVIDIA's runtime",
	},
	{
		name: "not there on CRI-O", change: changes{"proc/700/comm": "crio"},
		settings: func(s *doctor.Settings) { s.Envvar = true },
		check:    "nvidia-runtime", severity: diagnosis.Error, says: "CRI-O does not have NVIDIA's runtime",
	},
	{
		name: "not needed", change: changes{dropIn: gone},
		check: "nvidia-runtime", severity: diagnosis.OK, says: "not needed",
	},
	{
		name: "not there, and not needed by the chart", change: changes{dropIn: gone},
		settings: func(s *doctor.Settings) { s.Envvar = true },
		check:    "nvidia-runtime", severity: diagnosis.Error, says: "containerd does not have NVIDIA's runtime",
		shows:  "runtime: none works",
		remedy: "# or without NVIDIA's runtime: runtime: none in the chart's values",
	},
	{
		name: "both ways", check: "nvidia-runtime", severity: diagnosis.OK, says: "the default of containerd",
		shows: "without NVIDIA's runtime: runtime: none works",
	},
	{
		name: "one way on containerd 1.7", change: changes{config: containerd1, dropIn: gone},
		facts: func(f *doctor.NodeFacts) { f.Runtime.Value.Readings = f.Runtime.Value.Readings[:1] },
		check: "nvidia-runtime", severity: diagnosis.OK, says: "the default of containerd",
		shows: "containerd is older than 2.0",
	},
	{
		name: "one way with CDI off", change: changes{"etc/containerd/conf.d/zz.toml": runtime2 + "enable_cdi = false"},
		check: "nvidia-runtime", severity: diagnosis.OK, says: "the default of containerd", shows: "CDI is off in containerd",
		also: []string{"container-runtime"},
	},
	{
		name: "one way on CRI-O", change: changes{"proc/700/comm": "crio", "etc/crio/crio.conf.d/10-nvidia": crioConf},
		check: "nvidia-runtime", severity: diagnosis.OK, says: "the default of CRI-O",
		shows: "does not know the default handler of CRI-O; hostDev: true",
	},
	{
		name: "no program", change: changes{"usr/bin/nvidia-container-runtime": gone},
		check: "nvidia-runtime", severity: diagnosis.Error, says: "program of the runtime nvidia does not exist",
	},
	{name: "closed", check: "visible-devices", severity: diagnosis.OK, says: "cannot get GPUs by NVIDIA_VISIBLE_DEVICES"},
	{
		name:  "settings of NVIDIA's runtime that cannot be seen",
		facts: func(f *doctor.NodeFacts) { f.Toolkit.Missing = "no such folder" },
		check: "visible-devices", severity: diagnosis.NotChecked, says: "no such folder",
	},
	{
		name: "open by default", change: changes{toolkit: gone},
		check: "visible-devices", severity: diagnosis.Warning, says: "Every pod can get all GPUs",
	},
	{
		name: "open for a class", change: changes{
			toolkit: "", "etc/containerd/conf.d/zz.toml": runtime2 +
				"[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'runc'\n",
		},
		check: "visible-devices", severity: diagnosis.Info, says: "Every pod with the runtime class",
	},
	{
		name: "open for envvar", change: changes{toolkit: "[nvidia-container-runtime]\nmode = 'cdi'\n"}, settings: envvar,
		check: "visible-devices", severity: diagnosis.Warning, says: "the device list strategy envvar requires this",
	},
	{
		name: "closed for envvar", change: changes{toolkit: closed +
			"[nvidia-container-runtime]\nmode = 'cdi'\n"}, settings: envvar,
		check: "visible-devices", severity: diagnosis.Error, says: "ignores NVIDIA_VISIBLE_DEVICES",
	},
	{
		name: "closed beside CDI", change: changes{toolkit: closed + "[nvidia-container-runtime]\nmode = 'cdi'\n"},
		settings: func(s *doctor.Settings) { s.Envvar = true }, check: "visible-devices", severity: diagnosis.OK,
	},
	{
		name: "no volume mounts", change: changes{toolkit: "accept-nvidia-visible-devices-envvar-when-unprivileged = " +
			"false\n"},
		settings: func(s *doctor.Settings) { s.VolumeMounts = true },
		check:    "visible-devices", severity: diagnosis.Error, says: "ignores devices named by mounts",
	},
	{
		name: "not TOML", change: changes{toolkit: "=\x00"},
		check: "visible-devices", severity: diagnosis.NotChecked, says: "cannot be read",
	},
	{
		name: "no NVIDIA runtime", change: changes{dropIn: gone, toolkit: gone},
		check: "visible-devices", severity: diagnosis.OK, says: "containerd does not have NVIDIA's runtime",
	},
	{name: "CDI", check: "daemon-reload", severity: diagnosis.OK, says: "systemd knows their devices"},
	{
		name: "hook", settings: func(s *doctor.Settings) { s.CDI, s.VolumeMounts = false, true },
		check: "daemon-reload", severity: diagnosis.Warning, says: "can lose their GPUs",
	},
	{
		name: "hook on CRI-O", change: changes{"proc/700/comm": "crio", "etc/crio/crio.conf.d/10-nvidia": crioConf},
		settings: func(s *doctor.Settings) { s.CDI, s.VolumeMounts = false, true },
		check:    "daemon-reload", severity: diagnosis.Warning, says: "can lose their GPUs",
	},
	{
		name: "NVIDIA's runtime with CDI", change: changes{toolkit: closed + "[nvidia-container-runtime]\nmode = 'cdi'\n"},
		settings: func(s *doctor.Settings) { s.CDI, s.VolumeMounts = false, true },
		check:    "daemon-reload", severity: diagnosis.OK, says: "systemd knows their devices",
	},
	{
		name: "device nodes", settings: func(s *doctor.Settings) { s.CDI, s.VolumeMounts, s.DeviceNodes = false, true, true },
		check: "daemon-reload", severity: diagnosis.OK, says: "systemd knows their devices",
	},
	{
		name: "runc", change: changes{dropIn: gone},
		check: "daemon-reload", severity: diagnosis.OK, says: "systemd knows their devices",
		shows: "cgroups of runc are made by systemd",
	},
	{
		name: "no links", change: changes{"dev/char/195:0": gone},
		check: "daemon-reload", severity: diagnosis.Info, says: "Links to device nodes are missing",
	},
	{
		name: "device nodes that cannot be seen", facts: func(f *doctor.NodeFacts) { f.Devices.Missing = "no such folder" },
		check: "daemon-reload", severity: diagnosis.NotChecked, says: "no such folder", also: []string{"device-nodes"},
	},
	{
		name: "no systemd", change: changes{config: containerd1, dropIn: gone},
		check: "daemon-reload", severity: diagnosis.OK, says: "makes cgroups without systemd",
	},
}

const (
	otherSpec = "run/cdi/nvidia.yaml"
	specText  = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n  containerEdits:\n    deviceNodes:\n" +
		"    - path: /dev/nvidia0\n" +
		"containerEdits:\n  mounts:\n  - hostPath: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so."
)

var nodeRows = []row{
	{
		name:   "an NVSwitch that failed",
		status: func(s *status.Status) { s.NVSwitches = []string{"NVSwitch 0000:c4:00.0: SXid 20034"} },
		check:  "daemon", severity: diagnosis.Error, says: "SXid 20034, a fatal error", remedy: "systemctl reboot",
	},
	{
		name: "metrics that the driver refuses",
		status: func(s *status.Status) {
			s.MetricsAbsent = []string{"DCGM_FI_PROF_* are absent for GPU 0: no permission"}
		},
		check: "daemon", severity: diagnosis.Info, says: "absent for GPU 0: no permission", remedy: "deployments/host-dev",
	},
	{name: "read", check: "kernel-log", severity: diagnosis.OK, says: "read from the kernel log"},
	{
		name: "not read", facts: func(f *doctor.NodeFacts) { f.Settings.KernelLog = false },
		check: "kernel-log", severity: diagnosis.Info, says: "XIDs 62, 79, 119 and 120", remedy: "--kernel-log",
	},
	{name: "none", check: "companions", severity: diagnosis.OK, says: "are not configured"},
	{
		name: "asked for and there", change: changes{"dev/gdrdrv": "",
			"proc/modules": "nvidia 1 0 - Live 0x0\ngdrdrv 1 0 - Live 0x0\n"},
		settings: func(s *doctor.Settings) { s.Companions = []doctor.CompanionModule{doctor.GDRCopy} },
		check:    "companions", severity: diagnosis.OK, says: "GDRCopy is loaded", shows: "/dev/gdrdrv",
	},
	{
		name: "asked for and not loaded", change: changes{"proc/modules": "nvidia 1 0 - Live 0x0\n"},
		settings: func(s *doctor.Settings) { s.Companions = []doctor.CompanionModule{doctor.GDS} },
		check:    "companions", severity: diagnosis.Warning, says: "GPUDirect Storage is configured, but not loaded",
		remedy: "modprobe nvidia_fs",
	},
	{
		name: "loaded without a device node", change: changes{"proc/modules": "gdrdrv 1 0 - Live 0x0\n"},
		settings: func(s *doctor.Settings) { s.Companions = []doctor.CompanionModule{doctor.GDRCopy} },
		check:    "companions", severity: diagnosis.Warning, says: "has no device node", shows: "/dev/gdrdrv is not there",
	},
	{
		name: "auto, and not loaded", change: changes{"proc/modules": gone},
		settings: func(s *doctor.Settings) {
			auto := doctor.MOFED
			auto.Auto = true
			s.Companions = []doctor.CompanionModule{auto}
		},
		check: "companions", severity: diagnosis.OK, says: "MOFED is not loaded",
	},
	{name: "no driver container", check: "driver-upgrade", severity: diagnosis.OK, says: "not in a driver container"},
	{
		name: "usual names", settings: func(s *doctor.Settings) { s.DriverRoot = "/run/nvidia/driver" },
		check: "driver-upgrade", severity: diagnosis.OK, says: "evicts the pods of all resources",
	},
	{
		name: "renamed, and claims", settings: func(s *doctor.Settings) { s.DriverRoot, s.Claims = "/run/nvidia/driver", true },
		status: func(s *status.Status) {
			s.Resources = []status.Resource{{Name: "nvidia.com/gpu.shared"}, {Name: "nvidia.com/mig-1g.10gb"},
				{Name: "nvidia.com/a100"}}
		},
		check: "driver-upgrade", severity: diagnosis.Info,
		says:   "does not evict pods with nvidia.com/a100, claims (before operator 26.7)",
		remedy: "kubectl drain", also: []string{"dra", "kubelet"},
	},
	{name: "ours", check: "cdi-specs", severity: diagnosis.OK, says: "1 CDI spec "},
	{
		name: "another's", change: changes{otherSpec: specText + "580.95.05\n"},
		check: "cdi-specs", severity: diagnosis.OK, says: "2 CDI specs ",
	},
	{
		name: "another's of an older driver", change: changes{otherSpec: specText + "570.86.15\n"},
		check: "cdi-specs", severity: diagnosis.Warning,
		says:   "nvidia.com/gpu is out of date: of its 2 files, 1 cannot be found",
		remedy: "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml",
	},
	{
		name: "another program's", change: changes{"etc/cdi/x.yaml": strings.ReplaceAll(specText, "nvidia.com/gpu",
			"management.nvidia.com/gpu") + "570.86.15\n"},
		check: "cdi-specs", severity: diagnosis.Warning, says: "management.nvidia.com/gpu is out of date",
		remedy: "its program must write the spec again",
	},
	{
		name: "ours of another GPU", change: changes{
			"run/cdi/k8s.device-plugin.nvidia.com-gpu.json": `{"kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"G","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia7"}]}}]}`,
		},
		check: "cdi-specs", severity: diagnosis.Warning, says: "out of date: of its 1 file, 1 cannot be found",
		remedy: "rollout restart ds/gpu-device-plugin",
	},
	{
		name: "twice", change: changes{otherSpec: specText + "580.95.05\n", "run/cdi/old.yaml": specText + "580.95.05\n"},
		check: "cdi-specs", severity: diagnosis.Error,
		says: "name the same device, so container runtimes ignore both: nvidia.com/gpu=0",
	},
	{
		name: "two devices twice", change: changes{
			otherSpec:          strings.Replace(specText, "devices:\n", "devices:\n- name: all\n", 1) + "580.95.05\n",
			"run/cdi/old.yaml": strings.Replace(specText, "devices:\n", "devices:\n- name: all\n", 1) + "580.95.05\n",
		},
		check: "cdi-specs", severity: diagnosis.Error, says: "so container runtimes ignore both: nvidia.com/gpu=0",
		shows:  "/var/run/cdi/nvidia.yaml and /var/run/cdi/old.yaml",
		remedy: "ls -l /var/run/cdi/nvidia.yaml /var/run/cdi/old.yaml",
	},
	{
		name: "once in each folder", change: changes{otherSpec: specText + "580.95.05\n",
			"etc/cdi/nvidia.yaml": specText + "580.95.05\n"},
		check: "cdi-specs", severity: diagnosis.OK, says: "3 CDI specs ",
	},
	{
		name: "garbage", change: changes{"etc/cdi/x.yaml": "\x00\xff{{"},
		check: "cdi-specs", severity: diagnosis.Warning, says: "cannot be read",
	},
	{
		name: "a folder that is none", change: changes{"etc/cdi": "text"},
		check: "cdi-specs", severity: diagnosis.Warning, says: "cannot be read",
	},
	{
		name: "of somebody else", change: changes{"etc/cdi/x.yaml": "kind: example.com/nic\ndevices:\n- name: a\n",
			"etc/cdi/x.txt": "text"},
		check: "cdi-specs", severity: diagnosis.OK, says: "1 CDI spec ",
	},
	{name: "off", check: "selinux", severity: diagnosis.OK, says: "does not enforce"},
	{
		name: "permissive", change: changes{"sys/fs/selinux/enforce": "0"},
		check: "selinux", severity: diagnosis.OK, says: "does not enforce",
	},
	{
		name: "on the node", change: changes{"sys/fs/selinux/enforce": "1",
			"proc/self/attr/current": "unconfined_u:unconfined_r:unconfined_t:s0\x00"},
		check: "selinux", severity: diagnosis.OK, says: "blocks nothing",
	},
	{
		name: "in a container", change: changes{"sys/fs/selinux/enforce": "1",
			"proc/self/attr/current": "system_u:system_r:container_t:s0:c1,c2\x00"},
		facts: func(f *doctor.NodeFacts) { f.SELinux.Value.Container = true },
		check: "selinux", severity: diagnosis.Error, says: "cannot connect to the kubelet's socket",
	},
	{
		name: "in a container that is not confined", change: changes{"sys/fs/selinux/enforce": "1",
			"proc/self/attr/current": "system_u:system_r:spc_t:s0\x00"},
		facts: func(f *doctor.NodeFacts) { f.SELinux.Value.Container = true },
		check: "selinux", severity: diagnosis.OK, says: "blocks nothing",
	},
	{
		name: "devices", change: changes{"sys/fs/selinux/enforce": "1",
			"sys/fs/selinux/booleans/container_use_devices": "0 0"},
		check: "selinux", severity: diagnosis.Warning, says: "container_use_devices is off",
	},
	{
		name: "devices allowed", change: changes{"sys/fs/selinux/enforce": "1",
			"sys/fs/selinux/booleans/container_use_devices": "1 1"},
		check: "selinux", severity: diagnosis.OK, says: "blocks nothing",
	},
	{name: "there", check: "kubelet", severity: diagnosis.OK, says: "no other device plugin"},
	{
		name: "no folder", facts: func(f *doctor.NodeFacts) { f.Kubelet.Value.Problem = "no such folder" },
		check: "kubelet", severity: diagnosis.Error, says: "no such folder",
	},
	{
		name: "no socket", facts: func(f *doctor.NodeFacts) { f.Kubelet.Value.Refused = "connection refused" },
		check: "kubelet", severity: diagnosis.Error, says: "The kubelet does not answer",
	},
	{
		name: "another plugin",
		facts: func(f *doctor.NodeFacts) {
			f.Kubelet.Value.Listening = []string{"nvidia-gpu.sock", "gpu-device-plugin-gpu-x.sock"}
		},
		check: "kubelet", severity: diagnosis.Warning, says: "Another device plugin",
	},
	{
		name: "a DRA driver",
		facts: func(f *doctor.NodeFacts) {
			f.Kubelet.Value.DRADrivers = []string{"/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock"}
		},
		check: "kubelet", severity: diagnosis.Error, says: "The DRA driver gpu.nvidia.com is also running on this node",
		shows: "/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock", remedy: "kubectl get resourceslices",
	},
	{
		name:  "another process of this program",
		facts: func(f *doctor.NodeFacts) { f.Kubelet.Value.Listening = []string{"gpu-device-plugin-gpu-x.sock"} },
		check: "kubelet", severity: diagnosis.OK, says: "no other device plugin",
	},
	{
		name:  "another resource",
		facts: func(f *doctor.NodeFacts) { f.Kubelet.Value.Registered["nvidia.com/gpu.shared"] = 8 },
		check: "kubelet", severity: diagnosis.Warning, says: "8 healthy devices of nvidia.com/gpu.shared",
	},
	{
		name: "resources that are nobody's, or not NVIDIA's",
		facts: func(f *doctor.NodeFacts) {
			f.Kubelet.Value.Registered["nvidia.com/gpu.shared"], f.Kubelet.Value.Registered["example.com/nic"] = 0, 8
		},
		check: "kubelet", severity: diagnosis.OK, says: "no other device plugin",
	},
	{
		name: "another resource, and no daemon that says what it serves",
		facts: func(f *doctor.NodeFacts) {
			f.Kubelet.Value.Registered["nvidia.com/gpu.shared"], f.Daemon.Missing = 8, "no daemon"
		},
		check: "kubelet", severity: diagnosis.OK, says: "no other device plugin", also: []string{"daemon", "dra", "persistence"},
	},
	{
		name:  "no checkpoint",
		facts: func(f *doctor.NodeFacts) { f.Kubelet.Value.Registered, f.Kubelet.Value.Unread = nil, "no such file" },
		check: "kubelet", severity: diagnosis.NotChecked, says: "checkpoint cannot be read",
	},
	{name: "answers", check: "pod-resources", severity: diagnosis.OK, says: "kubelet counts 1 device"},
	{
		name:  "does not answer",
		facts: func(f *doctor.NodeFacts) { f.PodResources.Value.Problem = "connection refused" },
		check: "pod-resources", severity: diagnosis.Warning, says: "connection refused",
	},
	{
		name: "does not answer, and Neither PodResources nor the kubelet answers",
		facts: func(f *doctor.NodeFacts) {
			f.PodResources.Value.Problem, f.Kubelet.Value.Refused = "connection refused", "connection refused"
		},
		check: "pod-resources", severity: diagnosis.NotChecked,
		says: "Neither PodResources nor the kubelet answers: connection refused", also: []string{"kubelet"},
	},
	{
		name: "no account, and kubelet is not seen",
		facts: func(f *doctor.NodeFacts) {
			f.PodResources.Value.Problem, f.Kubelet.Missing = "connection refused", "not looked for"
		},
		check: "pod-resources", severity: diagnosis.NotChecked, says: "Neither PodResources nor the kubelet answers",
		also: []string{"kubelet"},
	},
}
