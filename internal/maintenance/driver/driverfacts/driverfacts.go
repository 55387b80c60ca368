// Package driverfacts reads the facts for package preflight from the files of a node: from /etc,
// /boot, /lib, /proc, /sys, /run, /usr and /var below a root folder. The package changes nothing,
// opens only regular files and folders, limits the size and the number of reads, and abandons reads
// that do not return.
package driverfacts

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// Timeout limits the time for reading all facts for a command. A node with 3,000 processes needs less
// than half of it.
const Timeout = 900 * time.Millisecond

// Places are the locations of the node's files.
type Places struct {
	// Kernel has the node's /proc and /sys.
	Kernel fs.FS
	// Host has the node's other files and, if they are visible, all processes; nil if the node's
	// files are not visible. Hidden then explains why.
	Host   fs.FS
	Hidden string
	// Free returns the free bytes of the file system with a folder of Host; nil for the real one.
	Free func(host fs.FS, folder string) (uint64, error)
	// Limit limits the time for reading all facts; Timeout if it is 0.
	Limit time.Duration
	// Readers are shared by several readings; nil for none.
	Readers *Readers
}

type root = nodefiles.Root

// Read reads the facts about kernels, modules, GPUs and owners. It also returns when ctx ends.
func (p Places) Read(ctx context.Context) preflight.Facts {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(p.Limit, Timeout))
	defer cancel()
	var f preflight.Facts
	for _, wait := range p.begin(ctx, &f) {
		wait()
	}
	return f
}

// ReadAll reads all facts of Read, and the users of the driver. PodResources and claims are not
// among them.
func (p Places) ReadAll(ctx context.Context) preflight.Facts {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(p.Limit, Timeout))
	defer cancel()
	kernel, host := root{FS: p.Kernel}, root{FS: p.Host}
	var f preflight.Facts
	waits := p.begin(ctx, &f)
	waits = append(waits,
		nodefiles.ReadFact(ctx, &f.Displays, "the displays", "",
			func() ([]preflight.Display, error) { return displays(kernel) }),
		nodefiles.ReadFact(ctx, &f.Space, "the free space", p.hidden(), p.space),
	)
	if f.Processes.Missing = p.hidden(); f.Processes.Missing == "" {
		f.Processes = processes(ctx, host, p.Readers)
	}
	for _, wait := range waits {
		wait()
	}
	return f
}

// hidden returns why the node's files are not visible; empty if they are.
func (p Places) hidden() string {
	if p.Host == nil {
		return p.Hidden
	}
	return ""
}

// begin begins to read the facts of Read. The returned functions wait for them.
func (p Places) begin(ctx context.Context, f *preflight.Facts) []func() {
	kernel, host := root{FS: p.Kernel}, root{FS: p.Host}
	hidden := p.hidden()
	release := func() (string, error) {
		text := kernel.Line("proc/sys/kernel/osrelease")
		if text == "" || strings.ContainsAny(text, "/\x00") {
			return "", errors.New("/proc/sys/kernel/osrelease cannot be read")
		}
		return text, nil
	}
	return []func(){
		nodefiles.ReadFact(ctx, &f.System, "/etc/os-release", hidden,
			func() (preflight.System, error) { return system(host), nil }),
		nodefiles.ReadFact(ctx, &f.Kernel, "the release of the kernel", "", release),
		nodefiles.ReadFact(ctx, &f.NextBoot, "the kernel of the next boot", hidden, func() (preflight.NextBoot, error) {
			return nextBoot(host, kernel)
		}),
		nodefiles.ReadFact(ctx, &f.Sets, "the kernel modules", hidden, func() ([]preflight.ModuleSet, error) {
			running, err := release()
			if err != nil {
				return nil, err
			}
			releases := []string{running}
			if next, err := nextBoot(host, kernel); err == nil && next.Release != running {
				releases = append(releases, next.Release)
			}
			var sets []preflight.ModuleSet
			for _, r := range releases {
				sets = append(sets, moduleSet(host, r))
			}
			return sets, nil
		}),
		nodefiles.ReadFact(ctx, &f.Loaded, "the loaded modules", "",
			func() ([]preflight.LoadedModule, error) {
				return loaded(kernel)
			}),
		nodefiles.ReadFact(ctx, &f.Driver, "the loaded driver", "",
			func() (preflight.Driver, error) { return driver(kernel), nil }),
		nodefiles.ReadFact(ctx, &f.GPUs, "the PCI bus", "", func() ([]preflight.GPU, error) { return gpus(kernel) }),
		nodefiles.ReadFact(ctx, &f.Signatures, "the kernel's demands of modules", "",
			func() (preflight.Signatures, error) {
				return signatures(kernel)
			}),
		nodefiles.ReadFact(ctx, &f.Memory, "the NUMA nodes", "",
			func() (preflight.Memory, error) { return memory(kernel) }),
		nodefiles.ReadFact(ctx, &f.Owners, "what installed the driver", hidden,
			func() ([]preflight.Owner, error) {
				return owners(host)
			}),
		nodefiles.ReadFact(ctx, &f.FabricManager, "Fabric Manager", hidden, func() (preflight.Companion, error) {
			return companion(host, "nv-fabricmanager", "nvidia-fabricmanager", "var/log/fabricmanager.log",
				"Fabric Manager version")
		}),
		nodefiles.ReadFact(ctx, &f.IMEX, "IMEX", hidden, func() (preflight.Companion, error) {
			return companion(host, "nvidia-imex", "nvidia-imex", "var/log/nvidia-imex.log", "IMEX version")
		}),
	}
}

// images are the systems that are replaced as a whole, by their ID in /etc/os-release.
var images = []string{"talos", "bottlerocket", "cos", "flatcar", "azurelinux-osguard"}

func system(host root) preflight.System {
	text := host.Line("etc/os-release")
	if text == "" {
		text = host.Line("usr/lib/os-release")
	}
	var s preflight.System
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.Trim(value, `"'`)
		switch key {
		case "ID":
			s.ID = value
		case "PRETTY_NAME":
			s.Name = value
		}
	}
	s.Image = slices.Contains(images, s.ID) || host.Exists("run/ostree-booted")
	if dgx := host.Line("etc/dgx-release"); dgx != "" {
		for line := range strings.Lines(dgx) {
			if value, ok := strings.CutPrefix(strings.TrimSpace(line), "DGX_SWBUILD_VERSION="); ok {
				s.Name = "DGX OS " + strings.Trim(value, `"`)
			}
		}
	}
	return s
}

// loaded returns the rows of /proc/modules.
func loaded(kernel root) ([]preflight.LoadedModule, error) {
	text, err := kernel.Read("proc/modules")
	if errors.Is(err, fs.ErrNotExist) && kernel.Exists("proc") { // a kernel without modules
		return nil, nil
	}
	var all []preflight.LoadedModule
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) < 4 {
			continue
		}
		m := preflight.LoadedModule{Name: words[0]}
		m.References, _ = strconv.Atoi(words[2]) // "-" for a kernel that cannot unload modules
		for user := range strings.SplitSeq(words[3], ",") {
			if user != "" && user != "-" && user != "[permanent]" {
				m.Users = append(m.Users, user)
			}
		}
		all = append(all, m)
	}
	return all, err
}

// driver returns the loaded driver. If it is not loaded, the version is empty.
func driver(kernel root) preflight.Driver {
	var d preflight.Driver
	for line := range strings.Lines(kernel.Line("proc/driver/nvidia/version")) {
		if !strings.HasPrefix(line, "NVRM version:") {
			continue
		}
		d.Open = strings.Contains(line, "Open Kernel Module")
		for word := range strings.FieldsSeq(line) {
			if isVersion(word) {
				d.Version = word
				return d
			}
		}
	}
	if version := kernel.Line("sys/module/nvidia/version"); isVersion(version) {
		d.Version = version
		// The kernel marks proprietary modules.
		d.Open = !strings.Contains(kernel.Line("sys/module/nvidia/taint"), "P")
	}
	return d
}

// Loaded returns the rows of /proc/modules, and the version of the loaded driver, in the node's root.
// The version is empty if no driver is loaded.
func Loaded(host fs.FS) ([]preflight.LoadedModule, string, error) {
	modules, err := loaded(root{FS: host})
	return modules, driver(root{FS: host}).Version, err
}

// isVersion reports whether a word is a driver version, such as 580.95.05.
func isVersion(word string) bool {
	parts := strings.Split(word, ".")
	return len(word) < 30 && len(parts) > 1 && !slices.ContainsFunc(parts, func(part string) bool {
		_, err := strconv.ParseUint(part, 10, 32)
		return err != nil
	})
}

const pciFolder = "sys/bus/pci/devices"

// gpus returns the NVIDIA GPUs on the PCI bus that are not given to virtual machines.
func gpus(kernel root) ([]preflight.GPU, error) {
	addresses, err := kernel.List(pciFolder)
	if errors.Is(err, fs.ErrNotExist) && kernel.Exists("sys") {
		return nil, nil
	}
	var all []preflight.GPU
	for _, address := range addresses {
		device := path.Join(pciFolder, address)
		if kernel.Line(device+"/vendor") != "0x10de" || !strings.HasPrefix(kernel.Line(device+"/class"), "0x03") {
			continue
		}
		id, err := strconv.ParseUint(kernel.Line(device+"/device"), 0, 16)
		if err != nil {
			id = 0 // in no table
		}
		g := preflight.GPU{Address: address, Device: uint16(id)}
		if target, err := kernel.Link(device + "/driver"); err == nil {
			g.Module = path.Base(target)
		}
		if g.Module != "vfio-pci" {
			all = append(all, g)
		}
	}
	return all, err
}

// efiSecureBoot is the variable of the firmware with the state of secure boot.
const efiSecureBoot = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

// maxKeys limits the names of keys.
const maxKeys = 64

func signatures(kernel root) (preflight.Signatures, error) {
	var s preflight.Signatures
	if !kernel.Exists("sys/module") {
		return s, errors.New("/sys/module does not exist")
	}
	switch value, err := kernel.Read(efiSecureBoot); {
	case err == nil && len(value) == 5: // four bytes of attributes
		s.SecureBoot.Value = value[4] == 1
	case err != nil && !kernel.Exists("sys/firmware"):
		s.SecureBoot.Missing = "Secure boot is not known: /sys/firmware is not visible"
	case err != nil && kernel.Exists("sys/firmware/efi"):
		s.SecureBoot.Missing = "Secure boot is not known: the variables of the firmware cannot be read"
	}
	for word := range strings.FieldsSeq(kernel.Line("sys/kernel/security/lockdown")) {
		if inner, ok := strings.CutPrefix(word, "["); ok {
			s.Lockdown = strings.TrimSuffix(inner, "]")
		}
	}
	s.Enforced = kernel.Line("sys/module/module/parameters/sig_enforce") == "Y"
	keys, _ := kernel.Read("proc/keys") // masked in containers
	for line := range strings.Lines(string(keys)) {
		// ID flags usage timeout permissions uid gid type description
		words := strings.Fields(line)
		if len(words) < 9 || !strings.HasPrefix(words[7], "asymmetri") {
			continue
		}
		description := strings.Join(words[8:], " ")
		name, _, ok := strings.Cut(description, ": X509.")
		if at := strings.LastIndex(name, ": "); ok && at >= 0 && len(s.Keys) < maxKeys {
			s.Keys = append(s.Keys, name[:at])
		}
	}
	slices.Sort(s.Keys)
	s.Keys = slices.Compact(s.Keys)
	return s, nil
}

// memory returns the mode of coherent GPU memory, and the NUMA nodes that only have memory.
func memory(kernel root) (preflight.Memory, error) {
	var m preflight.Memory
	for line := range strings.Lines(kernel.Line("proc/driver/nvidia/params")) {
		if value, ok := strings.CutPrefix(line, "CoherentGPUMemoryMode:"); ok {
			m.Mode = strings.Trim(strings.TrimSpace(value), `"`)
		}
	}
	nodes, err := kernel.List("sys/devices/system/node")
	if errors.Is(err, fs.ErrNotExist) && kernel.Exists("sys") {
		return m, nil
	}
	for _, name := range nodes {
		number, err := strconv.Atoi(strings.TrimPrefix(name, "node"))
		if err != nil {
			continue
		}
		folder := "sys/devices/system/node/" + name
		words := strings.Fields(kernel.Line(folder + "/meminfo")) // Node 2 MemTotal: 97280 kB
		if len(words) > 3 && words[3] != "0" && kernel.Line(folder+"/cpulist") == "" {
			m.Nodes = append(m.Nodes, number)
		}
	}
	slices.Sort(m.Nodes)
	return m, err
}

// displays returns the consoles and screens of the driver.
func displays(kernel root) ([]preflight.Display, error) {
	if !kernel.Exists("sys/class") {
		return nil, errors.New("/sys/class does not exist")
	}
	var all []preflight.Display
	cards, _ := kernel.List("sys/class/drm")
	nvidia := map[string]bool{}
	for _, name := range cards {
		card, connector, isConnector := strings.Cut(name, "-")
		folder := "sys/class/drm/" + name
		if !isConnector {
			resolved, _, err := kernel.Resolve(folder + "/device/driver")
			nvidia[card] = err == nil && path.Base(resolved) == "nvidia"
			continue
		}
		if nvidia[card] && kernel.Line(folder+"/enabled") == "enabled" {
			all = append(all, preflight.Display{Name: name, Evidence: "/" + folder + "/enabled: " + connector})
		}
	}
	buffers, _ := kernel.List("sys/class/graphics")
	hasBuffer := slices.ContainsFunc(buffers, func(name string) bool {
		return strings.HasPrefix(kernel.Line("sys/class/graphics/"+name+"/name"), "nvidia")
	})
	consoles, _ := kernel.List("sys/class/vtconsole")
	for _, name := range consoles {
		folder := "sys/class/vtconsole/" + name
		if hasBuffer && strings.Contains(kernel.Line(folder+"/name"), "frame "+
			"buffer") && kernel.Line(folder+"/bind") == "1" {
			all = append(all, preflight.Display{Name: name, Console: true, Evidence: "/" + folder + "/bind: 1"})
		}
	}
	return all, nil
}

// space returns the free space where drivers are installed, or placed by gpu-driver.
func (p Places) space() ([]preflight.Space, error) {
	free := p.Free
	if free == nil {
		free = freeBytes
	}
	var all []preflight.Space
	for _, folder := range []string{"usr", "boot", "var/lib"} {
		resolved, info, err := root{FS: p.Host}.Resolve(folder)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !info.IsDir() {
			err = errors.New("/" + folder + " is not a folder")
		}
		var bytes uint64
		if err == nil {
			bytes, err = free(p.Host, resolved)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, preflight.Space{Path: "/" + folder, Free: bytes})
	}
	return all, nil
}

// freeBytes returns the free bytes of the file system with a folder.
func freeBytes(host fs.FS, folder string) (uint64, error) {
	f, err := host.Open(folder)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	file, is := f.(*os.File)
	if !is {
		return 0, errors.New("no real file system")
	}
	var s unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &s); err != nil {
		return 0, err
	}
	return s.Bavail * uint64(s.Bsize), nil
}
