package simulator

import (
	"cmp"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing/fstest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// root is the node's file system. Every access shows the current state of the node.
type root struct{ node *Node }

// Open opens a file.
func (r root) Open(name string) (fs.File, error) { return r.now().Open(name) }

// ReadLink returns the target of a symbolic link.
func (r root) ReadLink(name string) (string, error) { return r.now().ReadLink(name) }

// Lstat describes a file without following symbolic links.
func (r root) Lstat(name string) (fs.FileInfo, error) { return r.now().Lstat(name) }

// now returns the current files. The map is immutable.
func (r root) now() fstest.MapFS {
	r.node.mu.Lock()
	defer r.node.mu.Unlock()
	if r.node.files == nil {
		r.node.files = r.node.buildFilesLocked()
	}
	return r.node.files
}

// filer builds a file system.
type filer struct{ files fstest.MapFS }

// text adds a text file.
func (b filer) text(name string, lines ...string) {
	b.files[name] = &fstest.MapFile{Data: []byte(strings.Join(lines, "\n") + "\n"), Mode: 0o444}
}

// link adds a symbolic link.
func (b filer) link(name, to string) {
	b.files[name] = &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink | 0o777}
}

// device adds a device node.
func (b filer) device(name string) {
	b.files[name] = &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666}
}

// buildFilesLocked returns the node's files.
func (n *Node) buildFilesLocked() fstest.MapFS {
	b := filer{fstest.MapFS{}}
	b.text("proc/sys/kernel/random/boot_id", deriveUUID(n.profile.Name, "boot", fmt.Sprint(n.reboots)))
	flags := "flags\t\t: fpu vme"
	if n.profile.VirtualMachine {
		flags += " hypervisor"
	}
	b.text("proc/cpuinfo", "processor\t: 0", flags)
	loaded := n.driver.initError != nvml.ERROR_DRIVER_NOT_LOADED
	for _, s := range n.profile.NVSwitches {
		b.text("sys/bus/pci/devices/"+s+"/vendor", "0x10de")
		b.text("sys/bus/pci/devices/"+s+"/class", "0x068000")
	}
	for _, g := range n.gpus {
		if !g.isRemoved {
			b.pci(g)
		}
		if !g.isRemoved && loaded {
			b.gpu(g)
		}
	}
	if loaded {
		b.driver(n)
	}
	return b.files
}

// sysfs returns the directory of a GPU below its PCIe root complex.
func (g *gpu) sysfs() string { return "sys/devices/" + g.spec.root + "/" + g.spec.BDF }

// pci adds the sysfs files of a GPU that do not depend on a driver.
func (b filer) pci(g *gpu) {
	folder := g.sysfs()
	b.link("sys/bus/pci/devices/"+g.spec.BDF, "../../../"+strings.TrimPrefix(folder, "sys/"))
	b.text(folder+"/numa_node", fmt.Sprint(g.spec.numa))
	b.text(folder+"/vendor", fmt.Sprintf("0x%04x", g.spec.model.pciDevice&0xffff))
	b.text(folder+"/device", fmt.Sprintf("0x%04x", g.spec.model.pciDevice>>16))
	b.text(folder+"/class", cmp.Or(g.spec.model.Class, "0x030200"))
	space := make([]byte, 256)
	if v := g.spec.VGPU; v != nil {
		const at, records = 0x40, 5 // offsets of the capability, and of the first record in it
		space[0x06], space[0x34] = 0x10, at
		copy(space[at:], []byte{0x09, 0, records + 24, 'V', 'F', 7, 2, 0, 22})
		copy(space[at+records+4:], v.HostDriver)
		copy(space[at+records+14:], v.HostBranch)
	}
	b.files[folder+"/config"] = &fstest.MapFile{Data: space, Mode: 0o644}
}

// gpu adds the driver's files of a GPU. A GPU that fell off the bus still has its device node.
func (b filer) gpu(g *gpu) {
	b.text("proc/driver/nvidia/gpus/"+g.spec.BDF+"/information",
		"Model: \t\t "+g.spec.model.Name,
		"GPU UUID: \t "+g.spec.UUID,
		"Bus Type: \t PCIe",
		"Bus Location: \t "+g.spec.BDF,
		fmt.Sprintf("Device Minor: \t %d", g.spec.minor))
	bound := "sys/bus/pci/drivers/nvidia/" + g.spec.BDF
	b.link(bound, "../../devices/"+g.spec.BDF)
	b.files[bound].Sys = &syscall.Stat_t{Ino: g.binding}
	b.link(g.sysfs()+"/driver", "../../../bus/pci/drivers/nvidia")
	b.device(fmt.Sprintf("dev/nvidia%d", g.spec.minor))
	for i, pod := range g.clients {
		b.client(fmt.Sprintf("proc/%d", 300_000+100*g.slot+i), g.spec.minor, pod)
	}
	for _, gi := range g.layout.instances {
		b.capability(fmt.Sprintf("gpu%d/mig/gi%d/access", g.spec.minor, gi.id), giMinor(g.spec.minor, gi.id))
		for _, c := range gi.computes {
			name := fmt.Sprintf("gpu%d/mig/gi%d/ci%d/access", g.spec.minor, gi.id, c.id)
			b.capability(name, ciMinor(g.spec.minor, gi.id, c.id))
		}
	}
}

// client adds the /proc files of a process with an open GPU, as seen from a container with a
// separate control group namespace.
func (b filer) client(folder string, minor int, pod string) {
	b.text(folder+"/comm", "nv-hostengine")
	b.link(folder+"/fd/0", "/dev/null")
	b.link(folder+"/fd/7", "/dev/nvidiactl")
	b.link(folder+"/fd/8", fmt.Sprintf("/dev/nvidia%d", minor))
	group := "0::/../../../../system.slice/nvidia-persistenced.service"
	if pod != "host" {
		group = "0::/../../../kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(pod, "-", "_") +
			".slice/cri-containerd-4d5e.scope"
	}
	b.text(folder+"/cgroup", group)
}

// capability adds the file of a capability and its device node.
func (b filer) capability(name string, minor int) {
	b.text("proc/driver/nvidia/capabilities/"+name,
		fmt.Sprintf("DeviceFileMinor: %d", minor), "DeviceFileMode: 292", "DeviceFileModify: 1")
	b.device(fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", minor))
}

// driver adds the driver's own files.
func (b filer) driver(n *Node) {
	b.text("proc/driver/nvidia/version",
		fmt.Sprintf("NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  Mon Jan  1 00:00:00 UTC 2024",
			n.driver.version),
		"GCC version:  gcc version 13.2.0 (GCC)")
	b.text("sys/module/nvidia/version", n.driver.version)
	b.text("sys/module/nvidia/initstate", "live")
	b.text("proc/devices",
		"Character devices:", "  1 mem", "195 nvidia-frontend", fmt.Sprintf("%d nvidia-caps", 234-n.loads%64),
		"235 nvidia-nvswitch", fmt.Sprintf("%d nvidia-uvm", 510-n.loads%64), "", "Block devices:", "259 blkext")
	for _, name := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"} {
		b.device("dev/" + name)
	}
	if len(n.profile.NVSwitches) > 0 {
		b.device("dev/nvidia-nvswitchctl")
	}
	for i := range n.profile.NVSwitches {
		b.device(fmt.Sprintf("dev/nvidia-nvswitch%d", i))
	}
	b.minors(n)
}

// The number of GPU instances of a GPU, and of compute instances in each, with minors reserved by
// the driver.
const (
	minorGIs = 15
	minorCIs = 8
)

// giMinor returns the minor of the capability of a GPU instance.
func giMinor(gpu, gi int) int { return 3 + (gpu*minorGIs+gi)*(minorCIs+1) }

// ciMinor returns the minor of the capability of a compute instance.
func ciMinor(gpu, gi, ci int) int { return giMinor(gpu, gi) + 1 + ci }

// minors adds the table of minors of MIG capabilities, and the two capabilities without an
// instance.
func (b filer) minors(n *Node) {
	b.capability("mig/config", 1)
	b.capability("mig/monitor", 2)
	if n.minors == nil { // independent of the state
		n.minors = n.minorLines()
	}
	b.text("proc/driver/nvidia-caps/mig-minors", n.minors...)
}

// minorLines returns the table's lines.
func (n *Node) minorLines() []string {
	lines := []string{"config 1", "monitor 2"}
	for _, g := range n.gpus {
		if len(g.spec.model.MIG) == 0 {
			continue
		}
		for gi := range minorGIs {
			lines = append(lines, fmt.Sprintf("gpu%d/gi%d/access %d", g.spec.minor, gi, giMinor(g.spec.minor, gi)))
			for ci := range minorCIs {
				minor := ciMinor(g.spec.minor, gi, ci)
				lines = append(lines, fmt.Sprintf("gpu%d/gi%d/ci%d/access %d", g.spec.minor, gi, ci, minor))
			}
		}
	}
	return lines
}
