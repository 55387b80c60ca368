package nodefacts

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

const (
	pciFolder    = "sys/bus/pci/devices"
	nvidiaVendor = "0x10de"
	gpuClass     = "0x03" // display devices
)

// pciDevices returns NVIDIA's devices of a class on the PCI bus.
func pciDevices(r root, class string) ([]doctor.PCIDevice, error) {
	addresses, err := r.List(pciFolder)
	if errors.Is(err, fs.ErrNotExist) && r.Exists("sys") {
		return nil, nil
	}
	var found []doctor.PCIDevice
	for _, address := range addresses {
		device := path.Join(pciFolder, address)
		if r.Line(device+"/vendor") != nvidiaVendor || !strings.HasPrefix(r.Line(device+"/class"), class) {
			continue
		}
		d := doctor.PCIDevice{Address: address}
		if resolved, _, err := r.Resolve(device + "/driver"); err == nil {
			d.Driver = path.Base(resolved)
		} else if target, err := fs.ReadLink(r.FS, path.Join(device, "driver")); err == nil {
			d.Driver = path.Base(target)
		}
		if parent, err := r.Link(device + "/physfn"); err == nil {
			d.Parent = path.Base(parent)
		}
		found = append(found, d)
	}
	return found, err
}

// pciGPUs returns the GPUs on the PCI bus for containers of the node, or the GPUs assigned to
// virtual machines.
func pciGPUs(r root, away bool) ([]doctor.PCIDevice, error) {
	found, err := pciDevices(r, gpuClass)
	return slices.DeleteFunc(found, func(d doctor.PCIDevice) bool { return (d.GivenAway() != "") != away }), err
}

// PCIGPUs counts the NVIDIA GPUs on the PCI bus of a node with this root folder, and separately the
// GPUs and virtual functions assigned to virtual machines; 0 if unreadable.
func PCIGPUs(node fs.FS) (own, away int) {
	found, _ := pciDevices(root{FS: node}, gpuClass)
	for _, d := range found {
		if d.GivenAway() != "" {
			away++
		} else {
			own++
		}
	}
	return own, away
}

// moduleVersion returns the version of the kernel module; empty if it is not loaded.
func moduleVersion(r root) (string, error) {
	text, err := r.Read("proc/driver/nvidia/version")
	if err == nil {
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(line, "NVRM version:") {
				continue
			}
			for _, word := range strings.Fields(line) {
				if isVersion(word) {
					return word, nil
				}
			}
		}
	}
	if version := r.Line("sys/module/nvidia/version"); isVersion(version) {
		return version, nil
	}
	switch {
	case err == nil:
		return "", errors.New("/proc/driver/nvidia/version has no version")
	case errors.Is(err, fs.ErrNotExist) && (r.Exists("proc") || r.Exists("sys")):
		return "", nil
	}
	return "", err
}

// modules returns the names of the loaded kernel modules.
func modules(r root) ([]string, error) {
	text, err := r.Read("proc/modules")
	if errors.Is(err, fs.ErrNotExist) && r.Exists("proc") { // a kernel without modules
		return nil, nil
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, " ")
		names = append(names, strings.TrimSpace(name))
	}
	return names, err
}

// isVersion reports whether a word is a driver version, such as 580.95.05.
func isVersion(word string) bool {
	parts := strings.Split(word, ".")
	return len(word) < 30 && len(parts) > 1 && !slices.ContainsFunc(parts, func(part string) bool {
		_, err := strconv.ParseUint(part, 10, 32)
		return err != nil
	})
}

// library finds NVML's library below a driver root. It searches the folders in searchPath first.
func library(r root, at string, searchPath []string) (doctor.NVMLLibrary, error) {
	found := doctor.NVMLLibrary{Root: at}
	for _, folder := range driverroot.LibraryFolders(searchPath...) {
		resolved, info, err := r.Resolve(path.Join(folder, driverroot.NVML))
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		found.Path = path.Join("/", at, resolved)
		const stem = "libnvidia-ml.so."
		if version := strings.TrimPrefix(path.Base(resolved), stem); isVersion(version) {
			found.Version = version
		}
		for _, other := range r.Match(path.Join(path.Dir(resolved), stem+"*")) {
			if version := strings.TrimPrefix(path.Base(other), stem); isVersion(version) && version != found.Version {
				found.Others = append(found.Others, version)
			}
		}
		return found, nil
	}
	return found, nil
}

// devices returns the device nodes in folder dev of root r. The path of the folder on the node is
// at. Links to the device nodes are in folder dev/char of root links.
func devices(kernel, links, r root, at string) (doctor.Devices, error) {
	found := doctor.Devices{Folder: at, Majors: majors(kernel), GPUs: minors(kernel)}
	names, err := r.List("dev")
	if err != nil {
		return found, err
	}
	for _, c := range []doctor.CompanionModule{doctor.GDRCopy, doctor.GDS, doctor.MOFED} {
		if r.Exists("dev/" + c.Device) {
			found.Companions = append(found.Companions, c.Device)
		}
	}
	caps, err := r.List("dev/nvidia-caps")
	if err == nil {
		for _, name := range caps {
			names = append(names, "nvidia-caps/"+name)
		}
	}
	for _, name := range names {
		if !strings.HasPrefix(name, "nvidia") {
			continue
		}
		info, err := fs.Lstat(r.FS, "dev/"+name)
		if err != nil || info.IsDir() {
			continue
		}
		node := doctor.DeviceFile{Name: name, Character: info.Mode()&fs.ModeCharDevice != 0}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && node.Character {
			node.Numbered = true
			node.Major, node.Minor = int(unix.Major(stat.Rdev)), int(unix.Minor(stat.Rdev))
			_, err := fs.Lstat(links.FS, fmt.Sprintf("dev/char/%d:%d", node.Major, node.Minor))
			node.Linked = err == nil
		}
		found.Nodes = append(found.Nodes, node)
	}
	return found, nil
}

// opens reports whether this process can open a device node of a MIG capability. Other device nodes
// are not opened, because that could wake a device.
func opens(r root, node doctor.DeviceFile) bool {
	if !node.Character || !strings.HasPrefix(node.Name, "nvidia-caps/") {
		return false
	}
	file, err := r.FS.Open("dev/" + node.Name)
	if err != nil {
		return false
	}
	return file.Close() == nil
}

// majors returns the major numbers of character device drivers.
func majors(kernel root) map[string]int {
	all := map[string]int{}
	text, _ := kernel.Read("proc/devices")
	for line := range strings.Lines(string(text)) {
		number, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if major, err := strconv.Atoi(number); err == nil {
			all[name] = major
		}
		if strings.HasPrefix(line, "Block devices") {
			break
		}
	}
	return all
}

// minors returns the minor numbers of the driver's GPUs, in order.
func minors(kernel root) []int {
	var all []int
	gpus, _ := kernel.List("proc/driver/nvidia/gpus")
	for _, gpu := range gpus {
		text, _ := kernel.Read(path.Join("proc/driver/nvidia/gpus", gpu, "information"))
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, "Device Minor:"); ok {
				if minor, err := strconv.Atoi(strings.TrimSpace(value)); err == nil {
					all = append(all, minor)
				}
			}
		}
	}
	slices.Sort(all)
	return all
}
