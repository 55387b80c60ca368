package doctor

import (
	"fmt"
	"slices"
	"strings"
)

// A Distribution is the installer of a node's container runtime. The remedies for the runtime's
// configuration depend on the distribution.
type Distribution string

// The distributions with remedies of their own, by the names in their documentation.
const (
	Packages     Distribution = "" // packages of containerd, CRI-O or Docker, with standard remedies
	K3s          Distribution = "K3s"
	RKE2         Distribution = "RKE2"
	K0s          Distribution = "k0s"
	MicroK8s     Distribution = "MicroK8s"
	Talos        Distribution = "Talos"
	Bottlerocket Distribution = "Bottlerocket"
	NixOS        Distribution = "NixOS"
	Flatcar      Distribution = "Flatcar"
	COS          Distribution = "Container-Optimized OS"
)

// The remedies below change a setting or add a file. None overwrites a configuration file:
// distributions regenerate their files at each start, or keep more settings there than doctor
// knows.

// restart is the command after which the runtime has reread its configuration.
func (r Runtime) restart() string {
	switch r.Distribution {
	case MicroK8s:
		return "snap restart microk8s.daemon-containerd"
	case Talos:
		return "talosctl --nodes NODE reboot"
	case Bottlerocket:
		return "apiclient reboot"
	default:
	}
	return "systemctl restart " + r.Service
}

// folder is the folder of the configuration file.
func (r Runtime) folder() string { return r.Config[:strings.LastIndexByte(r.Config, '/')+1] }

// edit returns the commands to change a setting of the configuration.
func (r Runtime) edit(change string) []string {
	var where []string
	switch r.Distribution {
	case K3s, RKE2:
		where = []string{
			"# " + change + ", in the template " + r.folder() +
				"config-v3.toml.tmpl (config.toml.tmpl before containerd 2)",
			`# which begins with {{ template "base" . }}: ` + string(r.Distribution) + " writes " + r.Config +
				" at each start",
		}
	case K0s:
		where = []string{"# " + change + ", in a file of your own in /etc/k0s/containerd.d"}
	case MicroK8s:
		where = []string{"# " + change + ", in /var/snap/microk8s/current/args/containerd-template.toml"}
	case Talos:
		where = []string{
			"# " + change + ", in /etc/cri/conf.d/20-customization.part, which is written by machine.files of the " +
				"machine configuration:",
			"talosctl --nodes NODE edit machineconfig",
		}
	case Bottlerocket:
		return []string{"# the configuration of containerd cannot be changed on Bottlerocket: use a variant with " +
			"-nvidia in its name"}
	case NixOS:
		return []string{"# " + change + ", by virtualisation.containerd.settings in /etc/nixos/configuration.nix",
			"nixos-rebuild switch"}
	case Flatcar, COS:
		where = []string{"# " + change + ". " + r.Config +
			" may be read-only, or be overwritten at each start: see the documentation of " +
			string(r.Distribution) + " for where changes are kept"}
	default:
		where = []string{"# " + change + ", in " + r.Config}
	}
	return append(where, r.restart())
}

// configure is the command of NVIDIA's toolkit that changes the configuration. The command keeps
// other settings in the file.
func (r Runtime) configure(options string) []string {
	name := map[string]string{Containerd: "containerd", CRIO: "crio", Docker: "docker"}[r.Name]
	standard := map[string]string{Containerd: "/etc/containerd/config.toml", CRIO: "/etc/crio/crio.conf",
		Docker: "/etc/docker/daemon.json"}
	if r.Config != standard[r.Name] && r.Name != CRIO {
		options = "--config=" + r.Config + " " + options
	}
	return []string{"nvidia-ctk runtime configure --runtime=" + name + " " + options, r.restart()}
}

// enableCDI returns the commands to switch on CDI.
func (r Runtime) enableCDI() []string {
	if r.Distribution == Packages {
		return r.configure("--cdi.enabled")
	}
	return r.edit("set enable_cdi = true")
}

// makeDefault returns the commands to make NVIDIA's runtime the default; installed is true if the
// container runtime already has NVIDIA's runtime.
func (r Runtime) makeDefault(installed bool) []string {
	const toolkit = "# install NVIDIA's container toolkit: nvidia-container-runtime has to be in /usr/bin or " +
		"/usr/local/nvidia/toolkit"
	var remedy []string
	switch r.Distribution {
	case K3s, RKE2:
		// K3s and RKE2 search for the toolkit at each start and create runtime classes for it.
		if !installed {
			remedy = append(remedy, toolkit+"; "+string(r.Distribution)+" finds it at its next start")
		}
		folder := "/etc/rancher/" + strings.ToLower(string(r.Distribution)) + "/config.yaml.d"
		return append(remedy, "mkdir -p "+folder,
			"(set -C; echo 'default-runtime: nvidia' > "+folder+"/nvidia-default-runtime.yaml)", r.restart())
	case K0s:
		if !installed {
			remedy = append(remedy, toolkit)
		}
		return append(remedy, r.edit("add the runtime nvidia and default_runtime_name = \"nvidia\"")...)
	case MicroK8s:
		return []string{"microk8s enable nvidia   # microk8s enable gpu before 1.30"}
	case Talos:
		return slices.Concat([]string{"# the extensions nvidia-container-toolkit and " +
			"nvidia-open-gpu-kernel-modules have to be in Talos' image"},
			r.edit("set default_runtime_name = \"nvidia\""))
	case NixOS:
		return append([]string{"# hardware.nvidia-container-toolkit.enable = true; in /etc/nixos/configuration.nix"},
			r.edit("add the runtime nvidia and default_runtime_name = \"nvidia\"")...)
	case Bottlerocket:
		return r.edit("")
	case Flatcar, COS:
		return append([]string{toolkit}, r.edit("add the runtime nvidia and default_runtime_name = \"nvidia\"")...)
	default:
	}
	return r.configure("--set-as-default")
}

// toolkit returns the commands to change a setting of NVIDIA's runtime.
func (r Runtime) toolkit(setting string, value bool) []string {
	if name, has := bottlerocketSettings[setting]; has && r.Distribution == Bottlerocket {
		return []string{fmt.Sprintf("apiclient set settings.nvidia-container-runtime.%s=%v", name, value)}
	}
	return []string{fmt.Sprintf("nvidia-ctk config --in-place --set %s=%v", setting, value)}
}

// bottlerocketSettings maps settings of NVIDIA's runtime to their names in the API of Bottlerocket
// (bottlerocket.dev/en/os, settings.nvidia-container-runtime).
var bottlerocketSettings = map[string]string{
	"accept-nvidia-visible-devices-envvar-when-unprivileged": "visible-devices-envvar-when-unprivileged",
	"accept-nvidia-visible-devices-as-volume-mounts":         "visible-devices-as-volume-mounts",
}

// upgrade returns the remedy for a runtime that is too old.
func (r Runtime) upgrade() string {
	if r.Name == Docker {
		return "# upgrade cri-dockerd, and Docker to 25 or newer"
	}
	return "# upgrade containerd to 1.7 or newer, or use a device list strategy without CDI"
}

// checkCommand is the command that checks the configuration and prints its errors.
func (r Runtime) checkCommand() string {
	switch {
	case r.Name == CRIO:
		return "crio config > /dev/null   # prints the error"
	case r.Name == Docker:
		return "dockerd --validate --config-file " + r.Config
	case r.Distribution == K3s, r.Distribution == RKE2, r.Distribution == K0s, r.Distribution == Talos,
		r.Distribution == MicroK8s:
		return "# read the log of containerd; its configuration is " + r.Config
	}
	return "containerd --config " + r.Config + " config dump > /dev/null   # prints the error"
}

// versionCommand is the command that prints the version of the runtime.
func (r Runtime) versionCommand() string {
	return "kubectl get node NODE -o jsonpath='{.status.nodeInfo.containerRuntimeVersion}'"
}
