package driverfacts_test

import "strings"

// The kernels of the made-up nodes: of this boot, and a newer one.
const (
	k50, k51   = "6.8.0-50-generic", "6.8.0-51-generic"
	deb, deb2  = "6.1.0-28-amd64", "6.1.0-29-amd64"
	el, el2    = "5.14.0-503.11.1.el9_5.x86_64", "5.14.0-503.14.1.el9_5.x86_64"
	cosKernel  = "6.6.56+"
	talos      = "6.12.18-talos"
	rocket     = "6.1.119"
	dgx        = "6.8.0-1018-nvidia"
	dgxARM     = "6.8.0-1018-nvidia-64k"
	rhcos      = "5.14.0-427.40.1.el9_4.x86_64"
	h100, b200 = "0x2330", "0x2901"
	v100, p100 = "0x1db5", "0x15f8"
	gb200      = "0x2941"
	gh200      = "0x2342"
	b300       = "0x3182"
	v580, v570 = "580.95.05", "570.133.20"
	machineID  = "0123456789abcdef0123456789abcdef"
	canonical  = "Canonical Ltd. Kernel Module Signing"
	mok        = "node-1 Secure Boot Module Signature key"
)

func release(id, name string) files {
	return files{"etc/os-release": "ID=" + id + "\nPRETTY_NAME=\"" + name + "\"\n"}
}

// ubuntu runs kernel 50 with driver 580 of DKMS, and starts it again.
var ubuntu = runs(k50, v580, h100, true).with(
	release("ubuntu", "Ubuntu 24.04.1 LTS"), grubMenu("boot/grub", "0", k50), files{"lib": "-> usr/lib"},
	set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50, signer: mok}, ""),
	dpkg("nvidia-dkms-580-open 580.95.05-0ubuntu0.24.04.1", "nvidia-driver-580-open 580.95.05-0ubuntu0.24.04.1"),
	files{"usr/src/nvidia-580.95.05/dkms.conf": "", "usr/lib/modules/" + k50 + "/build/Makefile": ""},
)

var debian = runs(deb, v580, h100, false).with(
	release("debian", "Debian GNU/Linux 12 (bookworm)"), grubMenu("boot/grub", "0", deb), files{"lib": "-> usr/lib"},
	files{
		"usr/lib/modules/" + deb + "/modules.dep": "updates/dkms/nvidia-current.ko:\nupdates/dkms/nvidia-current-uvm.ko: updates/dkms/nvidia-current.ko\n",
		"usr/lib/modules/" + deb + "/updates/dkms/nvidia-current.ko": ko{version: v580, release: deb,
			closed: true}.String(),
		"usr/lib/modules/" + deb + "/updates/dkms/nvidia-current-uvm.ko": ko{version: v580, release: deb,
			closed: true}.String(),
		"usr/lib/modules/" + deb + "/kernel/drivers/video/nvidiafb.ko": "no module of the driver",
	}, dpkg("nvidia-driver 580.95.05-1~deb12u1", "nvidia-kernel-dkms 580.95.05-1~deb12u1"),
)

var rhel = runs(el, v580, h100, true).with(
	release("rhel", "Red Hat Enterprise Linux 9.5 (Plow)"), files{"lib": "-> usr/lib"},
	files{
		"boot/grub2/grub.cfg": "load_env\nif [ \"${next_entry}\" ] ; then\n   set default=\"${next_entry}\"\nelse\n" +
			"   set default=\"${saved_entry}\"\nfi\ninsmod blscfg\nblscfg\n",
		"boot/grub2/grubenv":                       "# GRUB Environment Block\nsaved_entry=" + machineID + "-" + el + "\nkernelopts=root=/dev/sda1\n####",
		"var/lib/rpm/rpmdb.sqlite":                 "",
		"usr/share/licenses/nvidia-driver/LICENSE": "",
	},
	bls("boot/loader/entries", machineID+"-"+el, el), bls("boot/loader/entries", machineID+"-"+el2, el2),
	bls("boot/loader/entries", machineID+"-0-rescue", "0-rescue-"+machineID),
	set("usr/lib/modules/"+el+"/extra", ko{version: v580, release: el, signer: "NVIDIA"}, ""),
)

var cos = runs(cosKernel, v570, h100, true).with(
	release("cos", "Container-Optimized OS from Google"),
	set("home/kubernetes/bin/nvidia/drivers", ko{version: v570, release: cosKernel, signer: "Google"}, ""),
	files{"usr/lib/modules/" + cosKernel + "/modules.dep": "", "lib": "-> usr/lib"},
)

var talosNode = runs(talos, v570, h100, true).with(
	release("talos", "Talos (v1.9.5)"), efi("integrity", "Sidero Labs, Inc.: Build time throw-away kernel key"),
	set("usr/lib/modules/"+talos+"/kernel/drivers/video", ko{version: v570, release: talos,
		signer: "Sidero Labs, Inc.: Build time throw-away kernel key"}, ""),
)

var bottlerocket = runs(rocket, v570, h100, true).with(
	release("bottlerocket", "Bottlerocket OS 1.32.0 (aws-k8s-1.31-nvidia)"), files{"lib": "-> usr/lib"},
	set("usr/lib/modules/"+rocket+"/kernel/drivers/extra/video/nvidia/tesla", ko{version: v570, release: rocket}, ""),
)

var dgxNode = runs(dgx, v580, h100, true).with(
	release("ubuntu", "Ubuntu 24.04.1 LTS"), files{"etc/dgx-release": "DGX_NAME=\"DGX " +
		"Server\"\nDGX_SWBUILD_VERSION=\"7.1.0\"\n", "lib": "-> usr/lib"},
	grubMenu("boot/grub", "0", dgx), efi("integrity", canonical, mok),
	set("usr/lib/modules/"+dgx+"/kernel/nvidia-580-open", ko{version: v580, release: dgx, signer: canonical}, ""),
	dpkg("linux-modules-nvidia-580-server-open-nvidia 6.8.0-1018.20", "nvidia-driver-580-server-open "+
		"580.95.05-0ubuntu1",
		"nvidia-fabricmanager-580 580.95.05-1"),
	process(900, "nv-fabricmanage", "/system.slice/nvidia-fabricmanager.service", []string{"/dev/nvidiactl",
		"/dev/nvidia-nvswitchctl"}, nil),
	process(901, "nvidia-persiste", "/system.slice/nvidia-persistenced.service", []string{"/dev/nvidiactl",
		"/dev/nvidia0"}, nil),
	process(902, "nv-hostengine", "/system.slice/nvidia-dcgm.service", []string{"/dev/nvidiactl", "/dev/nvidia0"}, nil),
	files{"proc/modules": strings.Replace(runs("", "", "", true)["proc/modules"], "8192 2", "8192 7", 1)},
)

// unloaded is a node whose driver is not loaded.
var unloaded = files{"proc/driver/nvidia/version": gone, "proc/modules": "ext4 4096 1 - Live 0x0\n"}

// A fixture is a node, and --to.
type fixture struct {
	name string
	node files
	to   string
}

// busy are the users of a driver: a pod with another resource, a pod of a DaemonSet, a claim, the
// daemon itself, a bare container, a process of a person, and a module.
func busy() files {
	train, trainLogs := pod("team", "train-0", "main", "a")
	exporter, exporterLogs := pod("monitoring", "dcgm-exporter-x7k2p", "exporter", "b")
	daemon, daemonLogs := pod("kube-system", "gpu-device-plugin-9xqzt", "gpu-device-plugin", "c")
	return files{}.with(trainLogs, exporterLogs, daemonLogs,
		process(4711, "python3", train, []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia0"},
			[]string{"/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"}),
		process(4712, "dcgm-exporter", exporter, []string{"/dev/nvidiactl"}, nil),
		process(4713, "gpu-device-plug", daemon, []string{"/dev/nvidiactl"}, nil),
		process(4714, "jupyter", "/docker/"+strings.Repeat("d", 64), nil, []string{"/usr/lib/libcuda.so.1"}),
		process(4715, "nvtop", "/user.slice/user-1000.slice/session-3.scope", []string{"/dev/nvidia0"}, nil),
		process(4716, "editor", "/user.slice/user-1000.slice/session-3.scope", []string{"/dev/nvidia.txt",
			"/home/x/libcuda.so"}, nil),
		files{"proc/4716/fd/3": "-> /home/dev/notes", "proc/modules": "gdrdrv 1 2 - Live 0x0 (OE)\n" +
			"nvidia_uvm 4096 4 - Live 0x0 (OE)\nnvidia 8192 16 nvidia_uvm,gdrdrv, Live 0x0 (OE)\n"})
}

var fixtures = []fixture{
	// Ubuntu
	{name: "Ubuntu, the same kernel", node: ubuntu},
	{name: "Ubuntu, a newer kernel with modules", node: ubuntu.with(grubMenu("boot/grub", "0", k51, k50),
		set("usr/lib/modules/"+k51+"/updates/dkms", ko{version: v580, release: k51}, ""))},
	{name: "Ubuntu, a newer kernel without headers", node: ubuntu.with(grubMenu("boot/grub", "0", k51, k50),
		files{"usr/lib/modules/" + k51 + "/modules.dep": ""})},
	{name: "Ubuntu, a newer kernel that DKMS has left out", node: ubuntu.with(grubMenu("boot/grub", "0", k51, k50),
		files{"usr/lib/modules/" + k51 + "/build/Makefile": ""})},
	{name: "Ubuntu, Canonical's modules and secure boot", node: ubuntu.with(efi("integrity", canonical),
		files{"usr/lib/modules/" + k50 + "/updates/dkms/nvidia.ko": gone,
			"usr/lib/modules/" + k50 + "/updates/dkms/nvidia-uvm.ko": gone,
			"usr/lib/modules/" + k50 + "/updates/dkms/nvidia-drm.ko": gone, "usr/lib/modules/" + k50 + "/updates/dkms/nvidia-modeset.ko": gone},
		set("usr/lib/modules/"+k50+"/kernel/nvidia-580-open", ko{version: v580, release: k50, signer: canonical}, ""))},
	{name: "Ubuntu, DKMS with an enrolled key", node: ubuntu.with(efi("integrity", canonical, mok))},
	{name: "Ubuntu, DKMS with an unknown key", node: ubuntu.with(efi("integrity", canonical), unloaded)},
	{name: "Ubuntu, an unknown key of the loaded driver", node: ubuntu.with(efi("integrity", canonical))},
	{name: "Ubuntu, unsigned modules and secure boot", node: ubuntu.with(efi("integrity", canonical),
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50}, ""))},
	{name: "Ubuntu, compressed modules", node: ubuntu.with(
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50}, ".zst"))},
	{name: "Ubuntu, modules compressed by gzip", node: ubuntu.with(
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50}, ".gz"))},
	{name: "Ubuntu, modules compressed by xz", node: ubuntu.with(
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50}, ".xz"))},
	{name: "Ubuntu, compressed modules of DKMS, of another version", node: ubuntu.with(
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50}, ".zst"),
		dkmsBuilt("580.105.08", k50, ".zst"))},
	{name: "Ubuntu, compressed modules of DKMS, as wanted", node: ubuntu.with(
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50}, ".zst"),
		dkmsBuilt(v570, k50, ".zst")), to: "570"},
	{name: "Ubuntu, compressed modules that DKMS has in two versions", node: ubuntu.with(
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: v580, release: k50}, ".zst"),
		dkmsBuilt(v580, k50, ".zst"), dkmsBuilt(v570, k50, ".zst"))},
	{name: "Ubuntu, an older kernel by GRUB_DEFAULT", node: ubuntu.with(grubMenu("boot/grub",
		"gnulinux-advanced-1>gnulinux-"+k50+"-advanced-1", k51, k50))},
	{name: "Ubuntu, the second kernel by its number", node: ubuntu.with(grubMenu("boot/grub", "1>1", k51, k50))},
	{name: "Ubuntu, grub-reboot", node: ubuntu.with(grubMenu("boot/grub", "0", k50, k51),
		files{"boot/grub/grubenv": "# GRUB Environment Block\nnext_entry=1>1\n####"})},
	{name: "Ubuntu, an entry that is gone", node: ubuntu.with(grubMenu("boot/grub", "Windows", k50))},
	{name: "Ubuntu, .run over packages", node: ubuntu.with(files{"usr/bin/nvidia-uninstall": "",
		"var/log/nvidia-installer.log": "Installation of the NVIDIA Accelerated Graphics Driver for Linux-x86_64 (version: 580.95.05) is now complete.\n"})},
	{name: "Ubuntu, .run alone", node: ubuntu.with(dpkg(), files{"usr/bin/nvidia-uninstall": ""})},
	{name: "Ubuntu, upgraded packages before the restart", node: ubuntu.with(
		set("usr/lib/modules/"+k50+"/updates/dkms", ko{version: "580.105.08", release: k50}, ""))},
	{name: "Ubuntu, depmod did not run", node: ubuntu.with(files{"usr/lib/modules/" + k50 + "/modules.dep": ""})},
	{name: "Ubuntu, modules of two versions", node: ubuntu.with(
		files{"usr/lib/modules/" + k50 + "/updates/dkms/nvidia-uvm.ko": ko{version: v570, release: k50}.String()})},
	{name: "Ubuntu, no nvidia-uvm",
		node: ubuntu.with(files{"usr/lib/modules/" + k50 + "/updates/dkms/nvidia-uvm.ko": gone})},
	{name: "Ubuntu, a damaged module",
		node: ubuntu.with(files{"usr/lib/modules/" + k50 + "/updates/dkms/nvidia.ko": "\x7fELF\x02 too short"})},
	{name: "Ubuntu, no GPU", node: ubuntu.with(files{"sys/bus/pci/devices/0000:3b:00.0/vendor": "0x8086"})},
	{name: "Ubuntu, nouveau", node: ubuntu.with(gpu(0x3b, h100, "nouveau"), files{"proc/driver/nvidia/version": gone,
		"proc/modules": "nouveau 1 1 - Live 0x0\n"})},

	// Debian
	{name: "Debian, its names of modules", node: debian},
	{name: "Debian, xz", node: debian.with(files{"usr/lib/modules/" + deb + "/updates/dkms/nvidia-current.ko": gone,
		"usr/lib/modules/" + deb + "/updates/dkms/nvidia-current.ko.xz": "\xfd7zXZ"})},
	{name: "Debian, the link of its packages", node: debian.with(files{"boot/grub/grub.cfg": gone,
		"vmlinuz": "-> boot/vmlinuz-" + deb2})},
	{name: "Debian, systemd-boot", node: debian.with(files{"boot/grub/grub.cfg": gone,
		"boot/efi/loader/loader.conf":                 "timeout 4\ndefault m-6.1*\n",
		"boot/efi/loader/entries/m-" + deb2 + ".conf": "title Debian\nversion " + deb2 + "\nlinux /m/" + deb2 + "/linux\n"})},
	{name: "Debian, systemd-boot and two kernels", node: debian.with(files{"boot/grub/grub.cfg": gone,
		"boot/efi/loader/loader.conf": "#default x\n"},
		bls("boot/efi/loader/entries", "m-"+deb, deb), bls("boot/efi/loader/entries", "m-"+deb2, deb2))},
	{name: "Debian, proprietary modules for Blackwell", node: debian.with(gpu(0x3b, b200, "nvidia"))},
	{name: "Debian, no boot loader is visible", node: debian.with(files{"boot/grub/grub.cfg": gone})},

	// RHEL
	{name: "RHEL, the saved entry", node: rhel},
	{name: "RHEL, the newest kernel by number, without modules",
		node: rhel.with(files{"boot/grub2/grubenv": "saved_entry=0\n"},
			files{"usr/lib/modules/" + el2 + "/modules.dep": ""})},
	{name: "RHEL, weak-updates",
		node: rhel.with(files{"boot/grub2/grubenv": "saved_entry=" + machineID + "-" + el2 + "\n"},
			set("usr/lib/modules/"+el2+"/weak-updates/nvidia", ko{version: v580, release: el2}, ""), files{
				"usr/lib/modules/" + el2 + "/weak-updates/nvidia/nvidia.ko": "-> ../../../" + el + "/extra/nvidia.ko"})},
	{name: "RHEL, modules of another kernel", node: rhel.with(
		files{"usr/lib/modules/" + el + "/extra/nvidia.ko": ko{version: v580, release: el2}.String()},
		files{"usr/lib/modules/" + el + "/extra/nvidia-uvm.ko": ko{version: v580, release: el2,
			plain: true}.String()})},
	{name: "RHEL, sig_enforce and keys that are not visible",
		node: rhel.with(files{"sys/module/module/parameters/sig_enforce": "Y\n"})},
	{name: "RHEL, Fabric Manager of another version", node: rhel.with(
		process(900, "nv-fabricmanage", "/system.slice/nvidia-fabricmanager.service", []string{"/dev/nvidiactl"}, nil),
		files{"var/log/fabricmanager.log": "[INFO] [tid 1] Fabric Manager version is : 575.57.08\n[INFO] [tid 1] " +
			"Fabric Manager version is : 570.133.20\n"})},

	// COS
	{name: "COS, GKE's installer", node: cos},
	{name: "COS, gpu-driver's folder", node: cos.with(removed(cos, "home/"), set(
		"var/lib/gpu-device-plugin/driver/current/lib/modules/"+cosKernel, ko{version: v570, release: cosKernel}, ""))},
	{name: "COS, no driver", node: cos.with(unloaded, removed(cos, "home/"))},
	{name: "COS, another version", node: cos, to: v580},

	// Talos
	{name: "Talos, an extension", node: talosNode},
	{name: "Talos, another version", node: talosNode, to: v580},
	{name: "Talos, an extension of another build", node: talosNode.with(unloaded, efi("integrity",
		"Sidero Labs, Inc.: another key"))},

	// Bottlerocket
	{name: "Bottlerocket", node: bottlerocket},
	{name: "Bottlerocket, unsigned modules under lockdown", node: bottlerocket.with(
		files{"sys/kernel/security/lockdown": "none integrity [confidentiality]\n"})},

	// DGX OS
	{name: "DGX OS, with its services", node: dgxNode},
	{name: "DGX OS, another version", node: dgxNode, to: "590"},
	{name: "DGX OS, GB200 with NUMA memory", node: runs(dgxARM, v580, gb200, true).with(release("ubuntu",
		"Ubuntu 24.04"),
		grubMenu("boot/grub", "0", dgxARM), set("lib/modules/"+dgxARM+"/kernel/nvidia-580-open", ko{version: v580,
			release: dgxARM}, ""),
		files{"etc/dgx-release": "DGX_SWBUILD_VERSION=\"7.1.0\"\n",
			"sys/devices/system/node/node2/meminfo": "Node 2 MemTotal: 190000 kB\n",
			"sys/devices/system/node/node2/cpulist": "\n", "sys/devices/system/node/node3/meminfo": "Node 3 MemTotal: 0 kB\n",
			"sys/devices/system/node/node3/cpulist": "\n", "proc/driver/nvidia/params": "EnableMSI: 1\n"}, dpkg("nvidia-open-580 580.95.05-1"))},
	{name: "DGX OS, GH200 with CDMM and IMEX", node: runs(dgxARM, v580, gh200, true).with(release("ubuntu",
		"Ubuntu 24.04"),
		grubMenu("boot/grub", "0", dgxARM), set("lib/modules/"+dgxARM+"/kernel/nvidia-580-open", ko{version: v580,
			release: dgxARM}, ""),
		files{"proc/driver/nvidia/params": "CoherentGPUMemoryMode: \"driver\"\n", "proc/950/comm": "nvidia-imex\n",
			"var/log/nvidia-imex.log": "[INFO] IMEX version 580.95.05 is running with the following configuration options\n"},
		dpkg("nvidia-open-580 580.95.05-1"))},

	// Driver containers and ostree
	{name: "RHCOS, the operator's driver container", node: runs(rhcos, v580, h100, true).with(release("rhcos",
		"Red Hat Enterprise Linux CoreOS 417"),
		files{"run/ostree-booted": "", "run/nvidia/driver/usr/bin/nvidia-smi": "",
			"boot/grub2/grub.cfg": "set default=\"${saved_entry}\"\nblscfg\n"},
		bls("boot/loader/entries", "ostree-1", rhcos),
		set("run/nvidia/driver/lib/modules/"+rhcos+"/kernel/drivers/video", ko{version: v580, release: rhcos}, ""))},
	{name: "Fedora CoreOS, a staged deployment", node: runs(rhcos, v580, h100, true).with(release("fedora",
		"Fedora CoreOS 41"),
		files{"run/ostree-booted": "", "run/ostree/staged-deployment": "\x01", "lib": "-> usr/lib"},
		set("usr/lib/modules/"+rhcos+"/extra", ko{version: v580, release: rhcos}, ""))},

	// Architectures and targets
	{name: "V100 and a branch that left it", node: ubuntu.with(gpu(0x3b, v100, "nvidia")), to: "590.48.01"},
	{name: "P100 beside B200", node: debian.with(gpu(0x3b, p100, "nvidia"), gpu(0x3c, b200, "nvidia"))},
	{name: "B300 and a branch before it", node: ubuntu.with(gpu(0x3b, b300, "nvidia")), to: v570},
	{name: "a device in no table", node: ubuntu.with(gpu(0x3b, "0xffff", "nvidia"))},
	{name: "a folder with modules", node: ubuntu.with(set("opt/driver/modules", ko{version: v570, release: k50}, "")),
		to: "/opt/driver"},
	{name: "a folder for another kernel", node: ubuntu.with(set("opt/driver/modules", ko{version: v570, release: k51},
		"")), to: "/opt/driver"},
	{name: "a folder with libraries of another version", node: ubuntu.with(set("opt/driver/modules", ko{version: v570,
		release: k50}, ""),
		files{"opt/driver/usr/lib/libcuda.so.580.95.05": ""}), to: "/opt/driver"},
	{name: "a version that DKMS would build", node: ubuntu, to: v570},
	{name: "a version without headers", node: ubuntu.with(files{"usr/lib/modules/" + k50 + "/build/Makefile": gone}),
		to: v570},

	// Holders
	{name: "modules that cannot be read", node: ubuntu.with(files{"proc/modules": gone, "proc/modules/x": ""})},
	{name: "a process without a name", node: ubuntu.with(process(9, "", "/user.slice", []string{"/dev/nvidia0"}, nil))},
	{name: "pods, processes and modules", node: ubuntu.with(busy())},
	{name: "references of nobody", node: ubuntu.with(files{"proc/modules": "nvidia_uvm 4096 1 - Live 0x0\nnvidia " +
		"8192 3 nvidia_uvm, Live 0x0\n"})},
	{name: "a console and a screen", node: ubuntu.with(files{
		"proc/modules":                      "nvidia_drm 1 4 - Live 0x0\nnvidia_modeset 1 2 nvidia_drm, Live 0x0\nnvidia 1 2 nvidia_modeset, Live 0x0\n",
		"sys/class/drm/card1/device/driver": "-> ../../../../bus/pci/drivers/nvidia", "sys/bus/pci/drivers/nvidia/bind": "",
		"sys/class/drm/card1-DP-1/enabled": "enabled\n", "sys/class/drm/card1-DP-2/enabled": "disabled\n",
		"sys/class/drm/card0/device/vendor": "0x1a03\n", "sys/class/drm/card0-VGA-1/enabled": "enabled\n",
		"sys/class/graphics/fb0/name": "nvidia-drmdrmfb\n", "sys/class/vtconsole/vtcon0/name": "(S) dummy device\n",
		"sys/class/vtconsole/vtcon1/name": "(M) frame buffer device\n", "sys/class/vtconsole/vtcon1/bind": "1\n"})},
}

// dkmsBuilt is what DKMS keeps of the modules that it built.
func dkmsBuilt(version, release, suffix string) files {
	all := files{}
	for _, name := range []string{"nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm"} {
		all["var/lib/dkms/nvidia/"+version+"/"+release+"/x86_64/module/"+name+".ko"+suffix] = ""
	}
	return all
}

// removed removes the files of a node below a folder.
func removed(f files, folder string) files {
	all := files{}
	for name := range f {
		if strings.HasPrefix(name, folder) {
			all[name] = gone
		}
	}
	return all
}
