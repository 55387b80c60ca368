package doctor

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A PCIDevice is a device on the PCI bus.
type PCIDevice struct {
	Address string // such as "0000:3b:00.0"
	Driver  string // kernel module of the device; empty if unbound
	Parent  string // address of a virtual function's GPU; empty for any other device
}

// GivenAway says how the device is assigned to virtual machines, so that no container of this node
// can use it; empty if it is not assigned.
func (d PCIDevice) GivenAway() string {
	switch {
	case d.Parent != "":
		return "it is a virtual function of " + d.Parent
	case strings.Contains(d.Driver, "vfio"), d.Driver == "pci-stub", d.Driver == "pciback", d.Driver == "xen-pciback":
		return "it is bound to " + d.Driver
	}
	return ""
}

// NVMLLibrary is NVML's library.
type NVMLLibrary struct {
	// Path is the library's path below the driver root, without symbolic links; empty if there is
	// no library. Version is the version in the file name.
	Path, Version string
	// Root is the driver root on the node.
	Root string
	// Others are the versions of other libraries in the same folder.
	Others []string
}

// Devices are the NVIDIA device nodes of a folder.
type Devices struct {
	Folder string
	Nodes  []DeviceFile
	// Majors are the major numbers of the kernel's character device drivers, by name.
	Majors map[string]int
	// GPUs are the minor numbers of the driver's GPUs.
	GPUs []int
	// Companions are the existing device nodes of companion modules, relative to the folder.
	Companions []string
}

// A CompanionModule is a kernel module whose device containers can get besides their GPUs.
type CompanionModule struct {
	Name, Option string
	// Module is the kernel module that creates the device node Device below /dev.
	Module, Device string
	// Auto is true if containers get the device only on nodes that have it.
	Auto bool
}

// The known companions.
var (
	GDRCopy = CompanionModule{Name: "GDRCopy", Option: "--gdrcopy-enabled", Module: "gdrdrv", Device: "gdrdrv"}
	GDS     = CompanionModule{Name: "GPUDirect Storage", Option: "--gds-enabled", Module: "nvidia_fs",
		Device: "nvidia-fs0"}
	MOFED = CompanionModule{Name: "MOFED", Option: "--mofed-enabled", Module: "rdma_ucm", Device: "infiniband/rdma_cm"}
)

// A DeviceFile is a file below /dev.
type DeviceFile struct {
	Name         string // relative to the folder, such as "nvidia0" or "nvidia-caps/nvidia-cap1"
	Character    bool   // character device
	Numbered     bool   // the device numbers are known
	Major, Minor int
	Linked       bool // /dev/char/MAJOR:MINOR exists
	Opens        bool // doctor opened the device; tested only for MIG capabilities in doctor's own container
}

// nvidiaMajor is the major number that the kernel reserves for the driver.
const nvidiaMajor = 195

const kernelMessages = "dmesg | grep -iE 'nvidia|NVRM' | tail -20"

// maxAwayShown limits the listed GPUs of virtual machines. A node may have hundreds of virtual
// functions.
const maxAwayShown = 8

func gpus(f *NodeFacts, r *findings) {
	if !require(r, f.GPUs) {
		return
	}
	if away := f.GPUsGivenAway.Value; len(away) > 0 {
		var evidence []string
		for _, g := range away[:min(len(away), maxAwayShown)] {
			evidence = append(evidence, "/sys/bus/pci/devices/"+g.Address+": "+g.GivenAway())
		}
		if more := len(away) - maxAwayShown; more > 0 {
			evidence = append(evidence, fmt.Sprintf("and %d more", more))
		}
		r.info("gpus-given-away", fmt.Sprint("GPUs and virtual functions given to virtual machines: ", len(away)),
			evidence)
	}
	if f.WSL && len(f.GPUs.Value) == 0 {
		r.warn("wsl", "This node is WSL, Windows' subsystem for Linux: its GPU belongs to Windows, behind /dev/dxg, "+
			"and this program does not offer it", []string{"/dev/dxg, or WSL in /proc/sys/kernel/osrelease"},
			"# use a node on which Linux has the GPU and NVIDIA's driver; NVIDIA's device plugin offers the GPU of WSL")
		return
	}
	if len(f.GPUs.Value) == 0 && len(f.GPUsGivenAway.Value) > 0 {
		return
	}
	if len(f.GPUs.Value) == 0 {
		r.info("no-gpus",
			"No NVIDIA GPU is on the PCI bus", []string{"/sys/bus/pci/devices: no display device of vendor 0x10de"},
			"lspci -d 10de:")
		return
	}
	for _, g := range f.GPUs.Value {
		evidence := []string{"/sys/bus/pci/devices/" + g.Address + "/driver: " + cmp.Or(g.Driver, "none")}
		switch g.Driver {
		case "nvidia":
		case "nouveau":
			r.fail("gpu-bound-to-nouveau", "GPU "+g.Address+" is bound to nouveau, so NVIDIA's driver cannot use it",
				evidence,
				"printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' >> /etc/modprobe.d/nouveau.conf",
				"update-initramfs -u || dracut --force", "systemctl reboot")
		default:
			bound := "is bound to no driver"
			if g.Driver != "" {
				bound = "is bound to " + g.Driver
			}
			r.warn("gpu-not-bound", "GPU "+g.Address+" "+bound+", not to nvidia", evidence, kernelMessages,
				"echo "+g.Address+" > /sys/bus/pci/drivers/nvidia/bind")
		}
	}
	if !r.hasProblem() {
		r.ok(wording.Count(len(f.GPUs.Value), "GPU") + " on the PCI bus, bound to nvidia")
	}
}

func driver(f *NodeFacts, r *findings) {
	if f.GPUs.Missing == "" && len(f.GPUs.Value) == 0 {
		r.ok("No GPU needs the driver")
		return
	}
	if !require(r, f.Module) {
		return
	}
	module := f.Module.Value
	if module == "" {
		r.fail("module-not-loaded", "The kernel module nvidia is not loaded",
			[]string{"/proc/driver/nvidia/version and /sys/module/nvidia: do not exist"},
			"modprobe nvidia", kernelMessages)
	}
	if !require(r, f.Library) {
		return
	}
	l := f.Library.Value
	switch {
	case l.Path == "":
		r.fail("library-missing",
			"NVML's library libnvidia-ml.so.1 is in no library folder below the driver root "+l.Root,
			[]string{"driver root: " + l.Root}, "find / -xdev -name 'libnvidia-ml.so.1'",
			"gpu-device-plugin doctor --driver-root FOLDER   # the folder below which the driver is installed",
			"gpu-device-plugin doctor --library-search-path FOLDER   # the folder of the library; the daemon needs "+
				"the same")
		return
	case l.Version == "":
		r.skip("The name of the library has no version: " + l.Path)
		return
	case module != "" && module != l.Version:
		r.fail("driver-mismatch", fmt.Sprintf("Driver %s on disk, %s loaded: the driver was upgraded, and "+
			"no new container can use a GPU until the node is restarted",
			l.Version, module), []string{"/proc/driver/nvidia/version: " + module, l.Path}, "systemctl reboot")
		return
	}
	maintained(f, r)
	if len(l.Others) > 0 {
		r.info("other-libraries", "The same folder has libraries of other driver versions",
			[]string{l.Path, "others: " + strings.Join(l.Others, ", ")})
	}
	if !r.hasProblem() {
		r.ok("Kernel module and library have version "+module, "/proc/driver/nvidia/version", l.Path)
	}
}

// nextBoot passes on the findings of preflight. None is an error, because the driver works until the
// next boot; check driver judges the present.
func nextBoot(f *NodeFacts, r *findings) {
	if f.GPUs.Missing == "" && len(f.GPUs.Value) == 0 {
		r.ok("No GPU needs the driver")
		return
	}
	if !require(r, f.NextBoot) {
		return
	}
	for _, one := range f.NextBoot.Value {
		if one.Severity != diagnosis.OK {
			r.add(min(one.Severity, diagnosis.Warning), one.Code, one.Message, one.Evidence, one.Remedy)
		}
	}
	if !r.hasProblem() {
		r.ok("The next boot starts the running kernel, which has the driver's modules")
	}
}

// required are the device nodes that every computation needs, with their device numbers.
func (d Devices) required() []DeviceFile {
	required := []DeviceFile{{Name: "nvidiactl", Major: nvidiaMajor, Minor: 255}}
	for _, minor := range d.GPUs {
		required = append(required, DeviceFile{Name: fmt.Sprintf("nvidia%d", minor), Major: nvidiaMajor, Minor: minor})
	}
	return append(required, DeviceFile{Name: "nvidia-uvm", Major: d.Majors["nvidia-uvm"], Minor: 0})
}

func deviceNodes(f *NodeFacts, r *findings) {
	if f.GPUs.Missing == "" && len(f.GPUs.Value) == 0 {
		r.ok("No GPU needs device nodes")
		return
	}
	if f.Module.Missing == "" && f.Module.Value == "" {
		r.ok("Without the kernel module there are no device nodes")
		return
	}
	if require(r, f.Devices) {
		judgeNodes(f.Devices.Value, r)
	}
	if !r.hasProblem() {
		r.ok(wording.Count(len(f.Devices.Value.GPUs), "GPU")+" with device nodes below "+f.Devices.Value.Folder,
			"/proc/devices")
	}
	if own := f.Container; own.Missing == "" && !slices.ContainsFunc(own.Value.Nodes, named("nvidiactl")) {
		r.fail("container-without-nodes",
			"This container has no /dev/nvidiactl: NVML cannot be used in it", []string{"/dev of this container"},
			"kubectl get runtimeclass nvidia   # and in the pod: runtimeClassName: nvidia, or privileged: true")
	}
	migCapabilities(f, r)
}

// The driver requires the first MIG capability to change layouts, and the second to see MIG devices
// of other containers.
const (
	migConfig  = "nvidia-caps/nvidia-cap1"
	migMonitor = "nvidia-caps/nvidia-cap2"
)

// migCapabilities judges whether this container can see MIG devices and, if the daemon changes
// layouts, change them.
func migCapabilities(f *NodeFacts, r *findings) {
	changes := f.Daemon.Missing == "" && f.Daemon.Value.Status.MIG != nil
	instances := slices.ContainsFunc(f.Devices.Value.Nodes, func(n DeviceFile) bool {
		return strings.HasPrefix(n.Name, "nvidia-caps/") && n.Name != migConfig && n.Name != migMonitor
	})
	var shut []string
	for name, wanted := range map[string]bool{migConfig: changes, migMonitor: changes || instances} {
		if wanted && !slices.ContainsFunc(f.Container.Value.Nodes,
			func(n DeviceFile) bool { return n.Name == name && n.Opens }) {
			shut = append(shut, "/dev/"+name)
		}
	}
	if len(shut) == 0 || f.Container.Missing != "" {
		return
	}
	slices.Sort(shut)
	r.warn("mig-capabilities", "This container cannot open "+strings.Join(shut, " and ")+
		": MIG devices cannot be seen, or layouts cannot be changed. NVIDIA's container toolkit 1.18.0 to 1.20.0 "+
		"ignores NVIDIA_MIG_MONITOR_DEVICES and NVIDIA_MIG_CONFIG_DEVICES; 1.20.1 does not",
		[]string{"/dev of this container"}, "nvidia-ctk --version   # on the node; install 1.20.1 or newer",
		"or without the toolkit: hostDev: true in the chart's values, or kubectl apply -k deployments/host-dev")
}

func named(name string) func(DeviceFile) bool {
	return func(n DeviceFile) bool { return n.Name == name }
}

func judgeNodes(d Devices, r *findings) {
	const modprobe = "nvidia-modprobe -u -c 0"
	var missing []string
	for _, w := range d.required() {
		path := d.Folder + "/" + w.Name
		i := slices.IndexFunc(d.Nodes, named(w.Name))
		if i < 0 {
			missing = append(missing, path)
			continue
		}
		n := d.Nodes[i]
		switch {
		case !n.Character:
			r.fail("node-not-a-device", path+" is not a character device", []string{path}, "rm "+path, modprobe)
		case n.Numbered && w.Major != 0 && (n.Major != w.Major || n.Minor != w.Minor):
			r.fail("node-number-wrong",
				fmt.Sprintf("%s has the device number %d:%d, but the driver has %d:%d", path, n.Major, n.Minor, w.Major,
					w.Minor),
				[]string{fmt.Sprintf("%s: %d:%d", path, n.Major, n.Minor), "/proc/devices"}, "rm "+path, modprobe)
		}
	}
	if len(missing) > 0 {
		r.fail("nodes-missing",
			"Device nodes are missing: "+strings.Join(missing, ", "), []string{"/proc/driver/nvidia/gpus"},
			modprobe, "nvidia-smi -L   # as root; creates the nodes of all GPUs")
	}
	caps := d.Majors["nvidia-caps"]
	for _, n := range d.Nodes {
		var minor int
		if _, err := fmt.Sscanf(n.Name, "nvidia-caps/nvidia-cap%d", &minor); err != nil || caps == 0 || !n.Numbered {
			continue
		}
		if n.Major != caps || n.Minor != minor {
			r.fail("node-number-wrong",
				fmt.Sprintf("%s/%s has the device number %d:%d, but the driver has %d:%d", d.Folder, n.Name, n.Major,
					n.Minor, caps, minor),
				[]string{"/proc/devices: nvidia-caps"}, "rm -r "+d.Folder+"/nvidia-caps",
				"nvidia-smi mig -lgi   # creates them")
		}
	}
}

func kernelLog(f *NodeFacts, r *findings) {
	switch {
	case !require(r, f.GPUs):
	case len(f.GPUs.Value) == 0:
		r.ok("No GPU has XIDs")
	case f.Settings.KernelLog:
		r.ok("XIDs are also read from the kernel log", "health.kernelLog: true")
	default:
		r.info("kernel-log-off",
			"The kernel log is not read: XIDs 62, 79, 119 and 120, which several drivers do not report as "+
				"events, are in no metric, and GPUXidCritical cannot fire for them; the next scan finds most of their "+
				"effects",
			[]string{"health.kernelLog: false"},
			"gpu-device-plugin --kernel-log   # Helm: kernelLog: true")
	}
}

func companions(f *NodeFacts, r *findings) {
	if len(f.Settings.Companions) == 0 {
		r.ok("GPUDirect Storage, GDRCopy and MOFED are not configured")
		return
	}
	if !require(r, f.Modules) || !require(r, f.Devices) {
		return
	}
	for _, c := range f.Settings.Companions {
		node := path.Join(f.Devices.Value.Folder, c.Device)
		loaded := slices.Contains(f.Modules.Value, c.Module)
		switch {
		case slices.Contains(f.Devices.Value.Companions, c.Device):
			r.ok(c.Name+" is loaded", node)
		case loaded:
			r.warn("companion-without-node", c.Name+" is loaded, but has no device node: no container gets it",
				[]string{"/proc/modules: " + c.Module, node + " is not there"},
				"modprobe --remove "+c.Module+" && modprobe "+
					c.Module)
		case c.Auto:
			r.ok(c.Name+" is not loaded, and no container gets it", c.Option+"=auto")
		default:
			r.warn("companion-not-loaded", c.Name+" is configured, but not loaded: no container gets it",
				[]string{c.Option + "=true", "/proc/modules has no " + c.Module},
				"modprobe "+c.Module, "gpu-device-plugin "+c.Option+"=auto   # if only some nodes have it")
		}
	}
}

// evictedPrefixes are the resource names by which the operator's driver manager finds pods with
// GPUs.
var evictedPrefixes = []string{"nvidia.com/gpu", "nvidia.com/mig-"}

func driverUpgrade(f *NodeFacts, r *findings) {
	if f.Settings.DriverRoot == "/" {
		r.ok("The driver is not in a driver container")
		return
	}
	if !require(r, f.Daemon) {
		return
	}
	var unseen []string
	for _, served := range f.Daemon.Value.Status.Resources {
		if !slices.ContainsFunc(evictedPrefixes,
			func(begins string) bool { return strings.HasPrefix(served.Name, begins) }) {
			unseen = append(unseen, served.Name)
		}
	}
	if f.Settings.Claims {
		unseen = append(unseen, "claims (before operator 26.7)")
	}
	if len(unseen) == 0 {
		r.ok("The GPU operator evicts the pods of all resources before an upgrade of its driver container")
		return
	}
	r.info("upgrade-misses-pods",
		"An upgrade of the operator's driver container does not evict pods with "+strings.Join(unseen, ", ")+
			", and cannot unload the driver while they run: drain the node first", []string{"driver root " +
			f.Settings.DriverRoot},
		"kubectl drain NODE --ignore-daemonsets --delete-emptydir-data")
}

func persistence(f *NodeFacts, r *findings) {
	if f.GPUs.Missing == "" && len(f.GPUs.Value) == 0 {
		r.ok("No GPU needs persistence mode")
		return
	}
	var off []string
	reported := 0
	for _, g := range f.Daemon.Value.Status.GPUs {
		if g.Signals == nil || g.Signals.PersistenceMode == nil {
			continue
		}
		reported++
		if !*g.Signals.PersistenceMode {
			off = append(off, g.Index)
		}
	}
	const service = "systemctl enable --now nvidia-persistenced"
	switch {
	case len(off) > 0:
		r.warn("persistence-off", "Persistence mode is off on "+status.GPUList(off)+
			": the driver loses clocks, power limits and error counts of unused GPUs, and no new NVML "+
			"session is opened to find a returned GPU", []string{"status: persistenceMode: false"},
			service, "nvidia-smi -pm 1")
	case reported > 0:
		r.ok("Persistence mode is on", "status: persistenceMode: true")
	case f.runs("nvidia-persistenced"):
		r.ok("nvidia-persistenced is running", "process nvidia-persistenced")
	default:
		r.skip("Persistence mode is unknown: no daemon answers, and no process nvidia-persistenced was seen",
			"nvidia-smi -q | grep -i persistence")
	}
}

// runs reports whether a process with that name was seen.
func (f *NodeFacts) runs(name string) bool {
	return slices.Contains(f.Processes.Value, name[:min(len(name), 15)])
}

func fabricManager(f *NodeFacts, r *findings) {
	const service, log = "systemctl enable --now nvidia-fabricmanager", "journalctl -u nvidia-fabricmanager -n 50"
	var waiting []string
	registered := 0
	for _, g := range f.Daemon.Value.Status.GPUs {
		switch {
		case g.Remedy == string(inventory.RemedyFabric):
			waiting = append(waiting, g.Index)
		case g.Signals != nil && g.Signals.Fabric == inventory.FabricCompleted.String():
			registered++
		}
	}
	switch {
	case len(waiting) > 0:
		r.fail("fabric-not-ready", "The NVSwitch fabric is not ready for "+status.GPUList(waiting)+
			": Fabric Manager is not running, or has not registered the GPUs",
			[]string{"status: remedy: fabric"}, service, log)
	case registered > 0:
		r.ok("The GPUs are registered with the NVSwitch fabric", "status: fabric: completed")
	case !require(r, f.NVSwitches):
	case len(f.NVSwitches.Value) == 0:
		r.ok("No NVSwitch is on the PCI bus", "/sys/bus/pci/devices")
	case f.Simulated:
		r.skip("The state of the fabric is unknown: the node is simulated, and no daemon answers")
	case !require(r, f.Processes):
	case f.runs("nv-fabricmanager"):
		r.ok("Fabric Manager is running", "process nv-fabricmanager",
			wording.Count(len(f.NVSwitches.Value), "NVSwitch")+" on the PCI bus")
	default:
		r.fail("fabric-manager-off",
			"The node has NVSwitches, but Fabric Manager is not running: CUDA cannot be initialized",
			[]string{wording.Count(len(f.NVSwitches.Value), "NVSwitch") + " on the PCI bus",
				"no process nv-fabricmanager"}, service, log)
	}
}
