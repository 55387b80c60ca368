package nodefacts_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// runs is a node with a container runtime with these arguments.
func runs(name, arguments string, files changes) changes {
	all := changes{"proc/700/comm": name, "proc/700/cmdline": arguments, config: gone, dropIn: gone}
	for path, text := range files {
		all[path] = text
	}
	return all
}

// TestRuntimeConfigurations: the files that a runtime reads, as its arguments name them. For
// containerd, the table of TestContainerdConfigurations has more.
func TestRuntimeConfigurations(t *testing.T) {
	t.Parallel()
	folders := []string{"/etc/cdi", "/var/run/cdi"}
	runc := doctor.RuntimeHandler{Name: "runc", Implied: true}
	for name, tt := range map[string]struct {
		node changes
		want doctor.Runtime
		last doctor.Reading
	}{
		"containerd without files": {
			runs("containerd", "/usr/bin/containerd\x00", nil),
			doctor.Runtime{Name: doctor.Containerd, Service: "containerd", Config: "/" + config},
			doctor.Reading{
				Versions: "2.0 and newer", CDI: true, CDIExists: true, Default: "runc", CDIFolders: folders,
				Handlers: []doctor.RuntimeHandler{runc},
			},
		},
		"a flag without a value": {
			runs("containerd", "containerd\x00--config\x00", changes{config: "version = 3\n"}),
			doctor.Runtime{Name: doctor.Containerd, Service: "containerd", Config: "/" + config, Files: []string{"/" + config}},
			doctor.Reading{
				Versions: "2.0 and newer", CDI: true, CDIExists: true, Default: "runc", CDIFolders: folders,
				Handlers: []doctor.RuntimeHandler{runc},
			},
		},
		"files that name each other, and one that cannot be read": {
			runs("containerd", "containerd\x00-c\x00/a/b.toml\x00", changes{
				config:          "version = 3\n",
				"a/b.toml":      "version = 2\nimports = ['more/*.toml', '/a/b.toml', '/a/c.toml']\n",
				"a/more/1.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\ncdi_spec_dirs = ['/cdi', 7]\n",
				"a/more/2.txt":  "version = 3\n",
				"a/c.toml":      "]",
			}),
			doctor.Runtime{
				Name: doctor.Containerd, Service: "containerd", Config: "/a/b.toml", Files: []string{"/a/b.toml", "/a/more/1.toml"},
				Problems: []string{"/a/c.toml: "},
			},
			doctor.Reading{
				Versions: "2.0 and newer", CDI: true, CDIExists: true, Default: "runc", CDIFolders: []string{"/cdi"},
				Handlers: []doctor.RuntimeHandler{runc},
			},
		},
		"programs of handlers": {
			runs("containerd", "containerd\x00--config=/a.toml\x00", changes{"a.toml": `version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "there"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.there.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
SystemdCgroup = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.gone.options]
BinaryName = "/usr/bin/gone"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.path.options]
BinaryName = "runc"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.plain]
`}),
			doctor.Runtime{Name: doctor.Containerd, Service: "containerd", Config: "/a.toml", Files: []string{"/a.toml"}},
			doctor.Reading{
				Versions: "2.0 and newer", CDI: true, CDIExists: true, Default: "there", CDIFolders: folders,
				Handlers: []doctor.RuntimeHandler{
					{Name: "gone", Program: "/usr/bin/gone", Absent: true}, {Name: "path", Program: "runc"}, {Name: "plain"}, runc,
					{Name: "there", Program: "/usr/bin/nvidia-container-runtime", Systemd: true},
				},
			},
		},
		"CRI-O without files": {
			runs("crio", "crio\x00", nil),
			doctor.Runtime{Name: doctor.CRIO, Service: "crio", Config: "/etc/crio/crio.conf"},
			doctor.Reading{
				CDI: true, CDIExists: true, Default: "crun", CDIFolders: folders,
				Handlers: []doctor.RuntimeHandler{{Name: "crun", Systemd: true, Implied: true}},
			},
		},
		"CRI-O with files elsewhere": {
			runs("crio", "crio\x00-c\x00/a.conf\x00--config-dir=/b\x00", changes{
				"etc/crio/crio.conf": "]", "a.conf": "[crio.runtime]\ncgroup_manager = 'cgroupfs'\ndefault_runtime = 'x'\n",
				"b/1": "[crio.runtime]\ndefault_runtime = 'one'\n[crio.runtime.runtimes.one]\nruntime_path = '/usr/bin/one'\n",
				"b/2": "]", "b/3": "[crio.runtime]\ncdi_spec_dirs = ['/cdi']\n[crio.runtime.runtimes.two]\nruntime_path = 'two'\n",
			}),
			doctor.Runtime{
				Name: doctor.CRIO, Service: "crio", Config: "/a.conf", Files: []string{"/a.conf", "/b/1",
					"/b/3"}, Problems: []string{"/b/2: "},
			},
			doctor.Reading{
				CDI: true, CDIExists: true, Default: "one", CDIFolders: []string{"/cdi"},
				Handlers: []doctor.RuntimeHandler{{Name: "one", Program: "/usr/bin/one", Absent: true},
					{Name: "two", Program: "two"}},
			},
		},
		"CRI-O with a file that is not there": {
			runs("crio", "crio\x00--config\x00/gone\x00",
				changes{"etc/crio/crio.conf.d/1": "[crio.runtime]\ncgroup_manager = 'systemd'\n"}),
			doctor.Runtime{Name: doctor.CRIO, Service: "crio", Config: "/gone", Files: []string{"/etc/crio/crio.conf.d/1"}},
			doctor.Reading{
				CDI: true, CDIExists: true, Default: "crun", CDIFolders: folders,
				Handlers: []doctor.RuntimeHandler{{Name: "crun", Systemd: true, Implied: true}},
			},
		},
		"CRI-O with a runtime in two files": {
			runs("crio", "crio\x00", changes{
				"etc/crio/crio.conf.d/1": "[crio.runtime.runtimes.nvidia]\nruntime_path = '/usr/bin/nvidia-container-runtime'\n",
				"etc/crio/crio.conf.d/2": "[crio.runtime.runtimes.nvidia]\nmonitor_path = '/usr/bin/conmon'\n",
			}),
			doctor.Runtime{
				Name: doctor.CRIO, Service: "crio", Config: "/etc/crio/crio.conf", Files: []string{"/etc/crio/crio.conf.d/1",
					"/etc/crio/crio.conf.d/2"},
			},
			doctor.Reading{
				CDI: true, CDIExists: true, Default: "crun", CDIFolders: folders, Handlers: []doctor.RuntimeHandler{{Name: "nvidia",
					Systemd: true}},
			},
		},
		"Docker": {
			runs("cri-dockerd", "/usr/bin/cri-dockerd\x00", changes{
				"proc/701/comm": "dockerd", "etc/docker/daemon.json": `{"default-runtime":"nvidia","exec-opts":["native.cgroupdriver=systemd"],` +
					`"cdi-spec-dirs":["/cdi"],"features":{"cdi":false},"runtimes":{"nvidia":{"path":"/usr/bin/nvidia-container-runtime"}}}`,
			}),
			doctor.Runtime{Name: doctor.Docker, Service: "docker", Config: "/etc/docker/daemon.json",
				Files: []string{"/etc/docker/daemon.json"}},
			doctor.Reading{
				Versions: "with a newer cri-dockerd", CDIExists: true, CDISetting: new(bool), Default: "nvidia",
				CDIFolders: []string{"/cdi"},
				Handlers: []doctor.RuntimeHandler{
					{Name: "runc", Systemd: true, Implied: true}, {Name: "nvidia", Program: "/usr/bin/nvidia-container-runtime",
						Systemd: true},
				},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := gathered(t, newNode(tt.node)).Runtime.Value
			for i, problem := range got.Problems { // the rest is from the parser
				got.Problems[i] = problem[:min(len(problem), len(tt.want.Problems[i]))]
			}
			if len(got.Readings) == 0 {
				t.Fatal("no readings")
			}
			last := got.Readings[len(got.Readings)-1]
			got.Readings = nil
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.last, last); diff != "" {
				t.Errorf("the reading of the newest version (-want +got):\n%s", diff)
			}
		})
	}
}

// TestToolkitConfiguration: the file is the node's, or the file of NVIDIA's operator.
func TestToolkitConfiguration(t *testing.T) {
	t.Parallel()
	const operators = "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
	for name, tt := range map[string]struct {
		node changes
		want doctor.Toolkit
	}{
		"no file":   {changes{toolkit: gone}, doctor.Toolkit{EnvvarUnprivileged: true, Mode: "auto"}},
		"an empty":  {changes{toolkit: ""}, doctor.Toolkit{EnvvarUnprivileged: true, Mode: "auto", File: "/" + toolkit}},
		"two files": {changes{operators: "]"}, doctor.Toolkit{VolumeMounts: true, Mode: "auto", File: "/" + toolkit}},
		"operator's": {changes{toolkit: gone, operators: "[nvidia-container-runtime]\nmode = 'cdi'\n"},
			doctor.Toolkit{EnvvarUnprivileged: true, Mode: "cdi", File: "/" + operators}},
	} {
		if diff := cmp.Diff(tt.want, gathered(t, newNode(tt.node)).Toolkit.Value); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestSpecs: specs of NVIDIA's devices, and unreadable specs.
func TestSpecs(t *testing.T) {
	t.Parallel()
	node := newNode(changes{
		"run/cdi/k8s.device-plugin.nvidia.com-gpu.json": gone,
		"etc/cdi/a.yaml": `kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits: {deviceNodes: [{path: /dev/x, hostPath: /dev/nvidia0}, {path: /dev/nvidiactl}]}
- name: "1"
  containerEdits: {deviceNodes: [{path: /dev/nvidiactl}, {path: /dev/nvidia1}]}
containerEdits: {mounts: [{hostPath: /usr/bin/gone, path: /dev/nvidia0}]}
`,
		"etc/cdi/b.txt": "kind: nvidia.com/gpu\n", "etc/cdi/c.json": `{"kind":"example.com/nic"}`,
		"run/cdi/d.json": `{"devices":[]}`, "run/cdi/e.json": "{",
	})
	want := []doctor.Spec{
		{Path: "/etc/cdi/a.yaml", Kind: "nvidia.com/gpu", Devices: []string{"0", "1"}, Named: 4,
			Absent: []string{"/dev/nvidia1", "/usr/bin/gone"}},
		{Path: "/var/run/cdi/d.json", Problem: "has no kind"}, {Path: "/var/run/cdi/e.json"},
	}
	got := gathered(t, node).Specs.Value
	if len(got) == len(want) && got[2].Problem != "" {
		got[2].Problem = "" // from the parser
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestLargestFile: 1 MiB is read; one byte more is not.
func TestLargestFile(t *testing.T) {
	t.Parallel()
	const file = "etc/cdi/large.yaml"
	for size, want := range map[int]doctor.Spec{
		1 << 20:   {Path: "/" + file, Kind: "nvidia.com/gpu"},
		1<<20 + 1: {Path: "/" + file, Problem: "read /" + file + ": is larger than 1048576 bytes"},
	} {
		text := "kind: nvidia.com/gpu\n"
		text += "#" + strings.Repeat("x", size-len(text)-1)
		specs := gathered(t, newNode(changes{file: text})).Specs.Value
		if len(specs) != 2 {
			t.Fatalf("%d bytes: %+v", size, specs)
		}
		if diff := cmp.Diff(want, specs[0]); diff != "" {
			t.Errorf("%d bytes (-want +got):\n%s", size, diff)
		}
	}
}

// TestDriverFacts: the library, the module, and the device nodes with their numbers.
func TestDriverFacts(t *testing.T) {
	t.Parallel()
	const info = "proc/driver/nvidia/gpus/"
	facts := gathered(t, newNode(changes{
		"proc/driver/nvidia/version":      "NVRM version: NVIDIA 580 580.95.a 1234567.123456.12345678901234567 580.95.05\n",
		"proc/devices":                    "Character devices:\n195 nvidia\n\nBlock devices:\n8 sd\n",
		info + "0000:01:00.0/information": "Device Minor: \t 3\n", info + "0000:02:00.0/information": "Device Minor: \t x\n",
		libs + "libnvidia-ml.so.570.1": "", libs + "libnvidia-ml.so.old": "", libs + "libother.so.1.2": "",
		"dev/nvidia-uvm": gone, "dev/nvidia1": "plain", "dev/sda": "char 8:0", "dev/char/195:255": gone,
	}))
	if got := facts.Module.Value; got != "580.95.05" {
		t.Errorf("module %q", got)
	}
	library := doctor.NVMLLibrary{Root: "/", Path: "/" + libs + "libnvidia-ml.so.580.95.05", Version: "580.95.05",
		Others: []string{"570.1"}}
	if diff := cmp.Diff(library, facts.Library.Value); diff != "" {
		t.Errorf("library (-want +got):\n%s", diff)
	}
	devices := doctor.Devices{Folder: "/dev", Majors: map[string]int{"nvidia": 195}, GPUs: []int{0, 3},
		Nodes: []doctor.DeviceFile{
			{Name: "nvidia0", Character: true, Numbered: true, Major: 195, Linked: true}, {Name: "nvidia1"},
			{Name: "nvidiactl", Character: true, Numbered: true, Major: 195, Minor: 255},
			{Name: "nvidia-caps/nvidia-cap1", Character: true, Numbered: true, Major: 234, Minor: 1, Linked: true},
		}}
	if diff := cmp.Diff(devices, facts.Devices.Value); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// TestVersionOfTheModule: the version is from /proc, or else from /sys; without both the module is
// not loaded.
func TestVersionOfTheModule(t *testing.T) {
	t.Parallel()
	const proc, sys = "proc/driver/nvidia/version", "sys/module/nvidia/version"
	for name, tt := range map[string]struct {
		node  changes
		want  string
		fails bool
	}{
		"only in /sys":         {changes{proc: gone, sys: "570.86.15\n"}, "570.86.15", false},
		"not loaded":           {changes{proc: gone}, "", false},
		"a file that says not": {changes{proc: "GCC version: 13.2\n"}, "", true},
	} {
		got := gathered(t, newNode(tt.node)).Module
		if got.Value != tt.want || (got.Missing != "") != tt.fails {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
