package field_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A tree is the files of a node by path. A text that begins with "-> " is the target of a link, and
// gone is that of no file.
type tree map[string]string

const gone = "gone"

// write puts the files into a folder, which it returns.
func (files tree) write(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		if text == gone {
			continue
		}
		file := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(file), 0o700)
		if target, link := strings.CutPrefix(text, "-> "); err == nil && link {
			err = os.Symlink(target, file)
		} else if err == nil {
			err = os.WriteFile(file, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// with returns the files with those of more trees.
func (files tree) with(more ...tree) tree {
	all := maps.Clone(files)
	for _, one := range more {
		maps.Copy(all, one)
	}
	return all
}

// process is a process of a node, which the kernel knows by the beginning of its name.
func process(pid int, name, command string) tree {
	folder := fmt.Sprintf("proc/%d/", pid)
	return tree{folder + "comm": name[:min(len(name), 15)] + "\n",
		folder + "cmdline": strings.ReplaceAll(command, " ", "\x00") + "\x00"}
}

// gpuNode has one GPU with its driver, and no container runtime.
var gpuNode = tree{
	"proc/1/comm": "systemd\n", "proc/modules": "nvidia 1 0 - Live 0x0\n",
	"proc/devices":               "Character devices:\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n",
	"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
	"proc/driver/nvidia/gpus/0000:10:00.0/information": "Device Minor: \t 0\n",
	"sys/bus/pci/devices/0000:10:00.0/vendor":          "0x10de\n",
	"sys/bus/pci/devices/0000:10:00.0/class":           "0x030200\n",
	"sys/bus/pci/devices/0000:10:00.0/driver":          "-> ../../../../bus/pci/drivers/nvidia",
	"usr/bin/nvidia-container-runtime":                 "",
	library:                                            "",
	"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":       "-> libnvidia-ml.so.580.95.05",
}

const library = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05"

// section is the section of containerd's CRI plugin in version 3 of its configuration, and
// oldSection that in version 2.
const (
	section    = `plugins."io.containerd.cri.v1.runtime"`
	oldSection = `plugins."io.containerd.grpc.v1.cri"`
)

// toml is a configuration of containerd: a version, and in a section the runtimes runc and nvidia.
func toml(version int, section, defaultRuntime string) string {
	return fmt.Sprintf("version = %[1]d\n[%[2]s.containerd]\ndefault_runtime_name = %[3]q\n[%[2]s.containerd.runtimes.runc.options]\n"+
		"SystemdCgroup = true\n[%[2]s.containerd.runtimes.nvidia.options]\nBinaryName = \"/usr/bin/nvidia-container-runtime\"\n"+
		"SystemdCgroup = true\n", version, section, defaultRuntime)
}

// dockers are Docker and its containerd, whose CRI plugin its packages disable.
var dockers = tree{"etc/containerd/config.toml": "disabled_plugins = [\"cri\"]\n"}.with(
	process(1204, "containerd", "/usr/bin/containerd"), process(1310, "dockerd", "/usr/bin/dockerd -H fd://"))

const (
	k3sConfig  = "var/lib/rancher/k3s/agent/etc/containerd/config.toml"
	rke2Config = "var/lib/rancher/rke2/agent/etc/containerd/config.toml"
	noRuntime  = "version = 3\n"
)

// A doctorCase is a node, and one of the findings of doctor on it.
type doctorCase struct {
	report, name    string
	files           tree
	args            []string
	check, severity string
	says, remedy    string // parts of the message, and of the commands
	never           string // is in none of the messages and commands
}

var doctorCases = []doctorCase{
	{
		report: "B5", name: "K3s beside Docker",
		files: dockers.with(process(2201, "k3s-server", "/usr/local/bin/k3s server"),
			tree{k3sConfig: toml(3, section, "runc")},
			process(2290, "containerd", "containerd -c /"+k3sConfig+" -a /run/k3s/containerd/containerd.sock")),
		check: "nvidia-runtime", severity: "info", says: "containerd of K3s and not the default", remedy: "default-runtime: nvidia",
		never: " /etc/containerd/",
	},
	{
		report: "B5", name: "K3s without NVIDIA's toolkit",
		files: dockers.with(process(2201, "k3s-agent", "/usr/local/bin/k3s agent"), tree{k3sConfig: noRuntime},
			process(2290, "containerd", "containerd -c /"+k3sConfig+" -a /run/k3s/containerd/containerd.sock")),
		check: "nvidia-runtime", severity: "error", says: "containerd of K3s does not have NVIDIA's runtime", remedy: "systemctl restart k3s-agent",
		never: "nvidia-ctk runtime configure",
	},
	{
		report: "B5", name: "RKE2 beside a containerd of packages", files: tree{
			rke2Config: toml(2, oldSection, "nvidia"), "etc/containerd/config.toml": noRuntime,
			"etc/systemd/system/rke2-agent.service": "",
		}.with(process(80, "rke2", "/usr/local/bin/rke2 agent"), process(90, "containerd", "/usr/bin/containerd"),
			process(91, "containerd", "containerd -c /"+rke2Config+" -a /run/k3s/containerd/containerd.sock"),
			process(92, "kubelet", "kubelet --container-runtime-endpoint=unix:///run/k3s/containerd/containerd.sock")),
		check: "nvidia-runtime", severity: "ok", says: "NVIDIA's runtime is the default of containerd of RKE2",
	},
	{
		report: "B5", name: "RKE2 with one runtime for systemd", files: tree{
			rke2Config: strings.Replace(toml(3, section, "nvidia"), "runtime\"\nSystemdCgroup = true", "runtime\"", 1),
		}.with(process(80, "rke2", "/usr/local/bin/rke2 server"),
			process(91, "containerd", "containerd -c /"+rke2Config+" -a /run/k3s/containerd/containerd.sock"),
			process(92, "kubelet", "kubelet --container-runtime-endpoint=unix:///run/k3s/containerd/containerd.sock")),
		check: "nvidia-runtime", severity: "error", says: "systemd makes the cgroups of the runtime runc and not those of the runtime nvidia",
		remedy: "config-v3.toml.tmpl", never: " /etc/containerd/",
	},
	{
		report: "B5", name: "the kubelet's file names CRI-O", files: tree{
			"var/lib/kubelet/config.yaml": "containerRuntimeEndpoint: unix:///var/run/crio/crio.sock\n", "etc/containerd/config.toml": noRuntime,
			"etc/crio/crio.conf.d/99-nvidia.conf": "[crio.runtime]\ndefault_runtime = \"nvidia\"\n[crio.runtime.runtimes.nvidia]\n" +
				"runtime_path = \"/usr/bin/nvidia-container-runtime\"\n",
		}.with(process(70, "kubelet", "/usr/bin/kubelet --config=/var/lib/kubelet/config.yaml"), process(71, "crio",
			"/usr/bin/crio"),
			process(72, "containerd", "/usr/bin/containerd")),
		check: "nvidia-runtime", severity: "ok", says: "the default of CRI-O",
	},
	{
		report: "B5", name: "a file of the kubelet's folder names another socket of containerd", files: tree{
			"etc/kubernetes/kubelet/config.json": `{"containerRuntimeEndpoint":"unix:///run/containerd/containerd.sock"}`,
			"etc/kubernetes/kubelet/d/10.conf":   "containerRuntimeEndpoint: unix:///run/other.sock\n", "etc/containerd/config.toml": noRuntime,
			"opt/containerd.toml": toml(2, oldSection, "nvidia") + "[grpc]\naddress = \"/run/other.sock\"\n",
		}.with(process(70, "kubelet", "/usr/bin/kubelet --config /etc/kubernetes/kubelet/config.json --config-dir /etc/kubernetes/kubelet/d"),
			process(71, "containerd", "/usr/bin/containerd"), process(72, "containerd",
				"/usr/bin/containerd --config /opt/containerd.toml")),
		check: "nvidia-runtime", severity: "ok", says: "NVIDIA's runtime is the default of containerd",
	},
	{
		report: "B5", name: "k0s", files: tree{
			"etc/k0s/containerd.toml": "version = 2\nimports = [\"/run/k0s/containerd-cri.toml\"]\n", "run/k0s/containerd-cri.toml": "version = 2\n",
		}.with(dockers, process(60, "k0s", "/usr/local/bin/k0s worker"),
			process(61, "containerd", "/var/lib/k0s/bin/containerd --address=/run/k0s/containerd.sock --config=/etc/k0s/containerd.toml"),
			process(62, "kubelet", "/var/lib/k0s/bin/kubelet --container-runtime-endpoint=unix:///run/k0s/containerd.sock")),
		check: "nvidia-runtime", severity: "error", says: "containerd of k0s does not have NVIDIA's runtime", remedy: "/etc/k0s/containerd.d",
		never: " /etc/containerd/",
	},
	{
		report: "B5", name: "MicroK8s", files: tree{
			"var/snap/microk8s/current/args/kubelet":   "--cluster-domain=cluster.local\n--container-runtime-endpoint=${SNAP_COMMON}/run/containerd.sock\n",
			"var/snap/microk8s/8/args/containerd.toml": "version = 2\n",
		}.with(dockers, process(50, "kubelite", "/snap/microk8s/8/kubelite --kubelet-args-file=/var/snap/microk8s/current/args/kubelet"),
			process(51, "containerd", "/snap/microk8s/8/bin/containerd --config /var/snap/microk8s/8/args/containerd.toml "+
				"--address /var/snap/microk8s/common/run/containerd.sock")),
		check: "nvidia-runtime", severity: "error", says: "containerd of MicroK8s does not have NVIDIA's runtime", remedy: "microk8s enable nvidia",
		never: " /etc/containerd/",
	},
	{
		report: "B5", name: "Talos", files: tree{
			"etc/os-release": "NAME=\"Talos\"\nID=talos\n", "etc/kubernetes/kubelet.yaml": "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n",
			"etc/cri/containerd.toml": "version = 3\nimports = [\"/etc/cri/conf.d/cri.toml\"]\n", "etc/cri/conf.d/cri.toml": noRuntime,
		}.with(process(40, "containerd", "/bin/containerd --address /system/run/containerd/containerd.sock --state /system/run/containerd"),
			process(41, "containerd", "/bin/containerd --address /run/containerd/containerd.sock --config /etc/cri/containerd.toml"),
			process(42, "kubelet", "/usr/local/bin/kubelet --config=/etc/kubernetes/kubelet.yaml")),
		check: "nvidia-runtime", severity: "error", says: "containerd of Talos does not have NVIDIA's runtime", remedy: "talosctl",
		never: "nvidia-ctk runtime",
	},
	{
		report: "B5", name: "Bottlerocket", files: tree{
			"etc/os-release": "ID=bottlerocket\n", "etc/containerd/config.toml": toml(3, section, "nvidia"),
			"etc/nvidia-container-runtime/config.toml": "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n",
		}.with(process(40, "containerd", "/usr/bin/host-containerd --address /run/host-containerd/containerd.sock --config /etc/host-containerd.toml"),
			process(41, "containerd", "/usr/bin/containerd"),
			process(42, "kubelet", "/usr/bin/kubelet --container-runtime-endpoint=unix:///run/containerd/containerd.sock")),
		check: "visible-devices", severity: "warning", says: "NVIDIA_VISIBLE_DEVICES=all", remedy: "apiclient set settings.nvidia-container-runtime.",
		never: "nvidia-ctk config",
	},
	{
		report: "B5", name: "cri-dockerd", files: dockers.with(tree{
			"etc/docker/daemon.json": `{"runtimes":{"nvidia":{"path":"/usr/bin/nvidia-container-runtime"}}}`,
		}, process(30, "cri-dockerd", "/usr/bin/cri-dockerd --container-runtime-endpoint fd://"),
			process(31, "kubelet", "/usr/bin/kubelet --container-runtime-endpoint=unix:///var/run/cri-dockerd.sock")),
		check: "nvidia-runtime", severity: "error", says: "NVIDIA's runtime is not the default of Docker",
		remedy: "nvidia-ctk runtime configure --runtime=docker --set-as-default", never: " /etc/containerd/",
	},
	{
		report: "B5", name: "K3s with Docker by its file", files: dockers.with(tree{
			"etc/rancher/k3s/config.yaml": "docker: true\n", "etc/docker/daemon.json": `{"default-runtime":"nvidia","runtimes":{"nvidia":` +
				`{"path":"/usr/bin/nvidia-container-runtime"}}}`,
		}, process(20, "k3s-server", "/usr/local/bin/k3s server")),
		check: "nvidia-runtime", severity: "ok", says: "NVIDIA's runtime is the default of Docker",
	},
	{
		report: "B5", name: "K3s with Docker by its unit", files: dockers.with(tree{
			"etc/systemd/system/k3s.service": "[Service]\nExecStart=/usr/local/bin/k3s \\\n    server \\\n\t'--docker' \\\n", k3sConfig: noRuntime,
		}, process(20, "k3s-server", "/usr/local/bin/k3s server")),
		check: "nvidia-runtime", severity: "error", says: "Docker does not have NVIDIA's runtime", remedy: "--runtime=docker",
	},
	{
		report: "B5", name: "K3s whose runtime is not seen", files: dockers.with(process(20, "k3s-server",
			"/usr/local/bin/k3s server")),
		check: "container-runtime", severity: "not checked", says: "no container runtime listens there", never: "disabled",
	},
	{
		report: "B5", name: "a kubelet whose file cannot be read, and two runtimes", files: tree{"etc/containerd/config.toml": noRuntime}.with(
			process(70, "kubelet", "/usr/bin/kubelet --config=/gone"), process(71, "containerd", "/usr/bin/containerd"),
			process(72, "crio", "/usr/bin/crio")),
		check: "container-runtime", severity: "not checked", says: "the configuration of the kubelet (process 70) cannot be read",
	},
	{
		report: "B5", name: "Docker's containerd, and no kubelet", files: dockers,
		check: "container-runtime", severity: "not checked", says: "the CRI plugin of containerd", never: "config.toml > ",
	},
	{
		report: "B5", name: "the kubelet's own containerd with the CRI plugin disabled", files: dockers.with(process(70,
			"kubelet", "/usr/bin/kubelet")),
		check: "container-runtime", severity: "error", says: "The CRI plugin of containerd is disabled", remedy: "remove cri from disabled_plugins",
	},
	{
		report: "B6", name: "nvidia under the old name in version 3", files: tree{
			"etc/containerd/config.toml": "version = 3\n[" + section +
				".containerd.runtimes.runc.options]\nSystemdCgroup = true\n" +
				strings.TrimPrefix(toml(2, oldSection, "nvidia"), "version = 2\n"),
		}.with(process(900, "containerd", "/usr/bin/containerd")),
		check: "container-runtime", severity: "warning", says: "ignores runtimes in its configuration", remedy: "move the runtimes",
	},
	{
		report: "B6", name: "nothing but the old name in version 3", files: tree{"etc/containerd/config.toml": toml(3,
			oldSection, "nvidia")}.with(
			process(900, "containerd", "/usr/bin/containerd")),
		check: "container-runtime", severity: "warning", says: "containerd (2.0 to 2.2) ignores runtimes",
	},
	{
		report: "B6", name: "version 2 without a word on CDI", files: tree{"etc/containerd/config.toml": toml(2, oldSection,
			"nvidia")}.with(
			process(900, "containerd", "/usr/bin/containerd")),
		args:  []string{"--device-list-strategy=cdi-cri"},
		check: "container-runtime", severity: "not checked", says: "1.7: CDI is off in containerd",
	},
	{
		report: "B6", name: "SystemdCgroup on runc alone", files: tree{
			"etc/containerd/config.toml": strings.Replace(toml(3, section, "nvidia"), "runtime\"\nSystemdCgroup = true",
				"runtime\"", 1),
		}.with(process(900, "containerd", "/usr/bin/containerd")),
		check: "nvidia-runtime", severity: "error", says: "and not those of the runtime nvidia", remedy: "set SystemdCgroup = true",
	},
	{
		report: "B6", name: "no-cgroups", files: tree{
			"etc/containerd/config.toml": toml(3, section, "nvidia"), "etc/nvidia-container-runtime/config.toml": "[nvidia-container-cli]\n" +
				"no-cgroups = true\n[nvidia-container-runtime]\nmode = \"legacy\"\n",
		}.with(process(900, "containerd", "/usr/bin/containerd")),
		check: "visible-devices", severity: "error", says: "does not let containers open their GPUs: no-cgroups = true",
		remedy: "nvidia-container-cli.no-cgroups=false",
	},
	{
		report: "B6", name: "no-cgroups in the mode auto", files: tree{
			"etc/containerd/config.toml": toml(3, section, "nvidia"), "etc/nvidia-container-runtime/config.toml": "[nvidia-container-cli]\nno-cgroups = true\n",
		}.with(process(900, "containerd", "/usr/bin/containerd")),
		check: "visible-devices", severity: "warning", says: "before version 1.18 of the toolkit",
	},
	elsewhere("NixOS", nil, tree{
		"run/opengl-driver": "-> /nix/store/a-graphics-drivers", "nix/store/a-graphics-drivers/lib/libnvidia-ml.so.1": "-> /nix/store/b/lib/libnvidia-ml.so.1",
		"nix/store/b/lib/libnvidia-ml.so.1": "-> libnvidia-ml.so.580.95.05", "nix/store/b/lib/libnvidia-ml.so.580.95.05": "",
	}),
	elsewhere("Talos with a C library of its own", nil, libraryIn("usr/local/glibc/usr/lib")),
	elsewhere("Talos", nil, libraryIn("usr/local/lib")),
	elsewhere("GKE", nil, libraryIn("home/kubernetes/bin/nvidia/lib64")),
	elsewhere("GKE with the installer's folder as driver root", []string{"--driver-root=/home/kubernetes/bin/nvidia"},
		libraryIn("home/kubernetes/bin/nvidia/lib64")),
	elsewhere("Bottlerocket", nil, libraryIn("usr/lib/nvidia/tesla")),
	elsewhere("Flatcar", nil, libraryIn("opt/nvidia/current/lib64")),
	elsewhere("a folder that is named", []string{"--library-search-path=/srv/driver/lib"}, libraryIn("srv/driver/lib")),
	{
		report: "B7", name: "a folder that nobody knows", files: libraryIn("srv/driver/lib").with(noLibrary),
		check: "driver", severity: "error", says: "is in no library folder", remedy: "--library-search-path",
	},
	{
		report: "B7", name: "WSL", files: tree{
			"dev/dxg": "", "usr/lib/wsl/lib/libnvidia-ml.so.1": "", "sys/bus/pci/devices/0000:10:00.0/vendor": "0x1414\n",
			"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n",
		}.with(noLibrary),
		check: "gpus", severity: "warning", says: "This node is WSL", never: "install the driver",
	},
	{
		report: "B6", name: "a version that no containerd reads", files: tree{"etc/containerd/config.toml": "version = 9\n"}.with(
			process(900, "containerd", "/usr/bin/containerd")),
		check: "container-runtime", severity: "error", says: "does not start with its configuration",
	},
}

// noLibrary takes the driver's library out of its usual folder.
var noLibrary = tree{library: gone, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": gone}

// libraryIn is the driver's library in a folder.
func libraryIn(folder string) tree {
	return tree{
		folder + "/libnvidia-ml.so.1": "-> libnvidia-ml.so.580.95.05", folder + "/libnvidia-ml.so.580.95.05": "",
	}
}

// elsewhere is a case of a node whose driver's library is where files say.
func elsewhere(name string, args []string, files tree) doctorCase {
	return doctorCase{
		report: "B7", name: name, files: files.with(noLibrary), args: args,
		check: "driver", severity: "ok", says: "Kernel module and library have version 580.95.05",
	}
}

// overwrites matches commands that write a file again. Those with the shell's option -C do not write
// over one.
var overwrites = regexp.MustCompile(`(^|[^>])> */(etc|var|usr|run|opt)/`)

// TestDoctor: on each node, doctor has the finding, and no command of any finding writes over a
// file.
func TestDoctor(t *testing.T) {
	t.Parallel()
	for _, tt := range doctorCases {
		t.Run(tt.report+" "+tt.name, func(t *testing.T) {
			t.Parallel()
			root := gpuNode.with(tt.files).write(t)
			text, _ := run(t, append([]string{
				"doctor", "--host-root", root, "-o", "json", "--kubelet-socket=", "--pod-resources-socket=", "--control-socket", root + "/c.sock",
			}, tt.args...)...)
			var answer struct {
				Findings []struct {
					Check, Severity, Message string
					Evidence, Remedy         []string
				}
			}
			if err := json.Unmarshal([]byte(text), &answer); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			found := false
			for _, f := range answer.Findings {
				remedy := strings.Join(f.Remedy, "\n")
				if f.Check == tt.check {
					t.Logf("%s: %s\n%s\n%s", f.Severity, f.Message, strings.Join(f.Evidence, "\n"), remedy)
				}
				found = found || f.Check == tt.check && f.Severity == tt.severity && strings.Contains(f.Message, tt.says) &&
					strings.Contains(remedy, tt.remedy)
				if tt.never != "" && strings.Contains(f.Message+remedy, tt.never) {
					t.Errorf("says %q: %+v", tt.never, f)
				}
				for _, command := range f.Remedy {
					if overwrites.MatchString(command) && !strings.Contains(command, "set -C") {
						t.Errorf("a command writes over a file: %s", command)
					}
				}
			}
			if !found {
				t.Errorf("no finding %s of %s says %q, with the command %q", tt.severity, tt.check, tt.says, tt.remedy)
			}
		})
	}
}
