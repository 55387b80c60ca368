package cdi

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Options is the part of the configuration that is about spec files. Neither it nor what its slices
// hold is changed after it was made.
type Options struct {
	// DriverRoot is the host's directory that the driver is installed below.
	DriverRoot string
	// ContainerDriverRoot is the path of the driver root in this container. If there is nothing,
	// DriverRoot is used.
	ContainerDriverRoot string
	// SearchPath are folders below the driver root in which libraries are looked for before others.
	SearchPath []string
	// HookPath is the host's path of nvidia-cdi-hook or nvidia-ctk. If it is empty, the usual paths
	// are looked at.
	HookPath string
	// DisabledHooks are the names of hooks to leave out, or "all".
	DisabledHooks []string
	// DevicesOnly is content with device nodes where the driver root has no libraries: on a simulated
	// node.
	DevicesOnly bool
}

// Wanted has the facts from which the spec files are made.
type Wanted struct {
	Snapshot inventory.Snapshot
	Plan     resource.Plan
	Edits    containeredits.Options
	Options  Options
}

// voidVariable in a spec has NVIDIA's container runtime add no GPU by itself, whatever the image's
// environment says.
const voidVariable = containeredits.EnvVisibleDevices + "=" + containeredits.Void

// specs returns the spec of each class that the node has, without a version. Root is the file
// system of this process. What cannot be read of the driver is as it was found before: an error
// that comes with specs says so.
func (w Wanted) specs(root fs.FS, before *found) (map[containeredits.CDIClass]*specs.Spec, error) {
	gpus, err := w.gpuSpec(root, before)
	if gpus == nil {
		return nil, err
	}
	all := map[containeredits.CDIClass]*specs.Spec{}
	if len(gpus.Devices) > 0 {
		all[containeredits.CDIGPU] = gpus
	}
	for class, name := range containeredits.CDICompanions(w.Snapshot.Control, w.Edits) {
		spec := newSpec(class)
		spec.Devices = []specs.Device{{Name: name, ContainerEdits: w.companion(root, class)}}
		all[class] = spec
	}
	maps.Copy(all, w.limits())
	return all, err
}

// A found is what was found of the driver, and for which version and options.
type found struct {
	version string
	options Options
	files   driverroot.Files
	hook    hook

	programs programs
}

// find looks for the driver's files. If they cannot be read, or are not there, although NVML goes
// on answering with the same version, those that were found before count as present: a mount that
// is away for a moment withdraws no device.
func (w Wanted) find(root fs.FS, before *found) error {
	version := w.Snapshot.Driver.Version
	view, err := w.driverView(root)
	if err != nil {
		return err
	}
	files, err := driverroot.Find(view, version, w.Options.SearchPath...)
	if err == nil || w.Options.DevicesOnly {
		before.version, before.options, before.files = version, w.Options, files
		before.hook = w.hook(root, &before.programs)
		return nil
	}
	if before.version != version || !reflect.DeepEqual(before.options, w.Options) {
		*before = found{programs: before.programs}
	}
	return fmt.Errorf("%w below %s; check --driver-root and --driver-root-ctr-path, and where the driver's "+
		"installation is mounted in this container", err, w.Options.ContainerDriverRoot)
}

func newSpec(class containeredits.CDIClass) *specs.Spec {
	return &specs.Spec{Kind: containeredits.CDIVendor + "/" + string(class)}
}

// gpuSpec returns the spec of GPUs and MIG devices; nil if nothing is known of the driver's files.
// Devices that are not offered any more are in it, too: while a pod holds one, kubelet may give it
// to the next pod.
func (w Wanted) gpuSpec(root fs.FS, driver *found) (*specs.Spec, error) {
	problem := w.find(root, driver)
	if problem != nil && driver.version == "" {
		return nil, problem
	}
	spec := newSpec(containeredits.CDIGPU)
	var devices []resource.Device
	for _, r := range w.Plan.Resources {
		devices = append(devices, slices.DeleteFunc(r.Members(), isToken)...)
	}
	all := map[string]specs.ContainerEdits{} // by UUID
	names := map[string]string{}
	for _, d := range append(devices, w.Plan.NodeDevices()...) {
		if _, replica := all[d.UUID]; replica {
			continue
		}
		display, links := w.display(root, d)
		given := specs.ContainerEdits{DeviceNodes: w.nodes(append(containeredits.DevicePaths(d), display...)),
			Hooks: driver.hook.symlinks(links)}
		if d.UUID == d.GPU {
			given.Hooks = append(given.Hooks, driver.hook.memoryLimits(path.Join("/", w.Options.DriverRoot), d.UUID)...)
		}
		all[d.UUID] = given
		for _, by := range []containeredits.IDStrategy{containeredits.ByUUID, containeredits.ByIndex} {
			if name := containeredits.CDIName(d, by); names[name] == "" { // an index may be that of a GPU that was replaced, too
				names[name] = d.UUID
			}
		}
	}
	for name, uuid := range names {
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: all[uuid]})
	}
	if len(all) > 0 {
		spec.Devices = append(spec.Devices, specs.Device{Name: everyDevice, ContainerEdits: together(all)})
	}
	slices.SortFunc(spec.Devices, func(a, b specs.Device) int { return strings.Compare(a.Name, b.Name) })

	common := &spec.ContainerEdits
	if w.Edits.Void { // also beside another strategy: where the runtime knows CDI, the devices are not to be added twice
		common.Env = append(common.Env, voidVariable)
	}
	nodes := w.Snapshot.Control & containeredits.AlwaysNodes
	if w.Snapshot.Majors.UVM > 0 { // the module is loaded; the first process that computes makes its nodes
		nodes |= inventory.NodeUVM | inventory.NodeUVMTools
	}
	var control []string
	for _, name := range nodes.All() {
		control = append(control, "/dev/"+name)
	}
	common.DeviceNodes = w.nodes(control)
	w.addFiles(common, driver.files, driver.hook, driver.version)
	return spec, problem
}

// everyDevice is the name of all GPUs and MIG devices together.
const everyDevice = "all"

// together returns what a container is given with several devices. GPUs are given whole by their
// own name or by their MIG devices'.
func together(devices map[string]specs.ContainerEdits) specs.ContainerEdits {
	var all specs.ContainerEdits
	seen := map[string]bool{}
	for _, uuid := range slices.Sorted(maps.Keys(devices)) {
		for _, n := range devices[uuid].DeviceNodes {
			if !seen[n.Path] {
				seen[n.Path] = true
				all.DeviceNodes = append(all.DeviceNodes, n)
			}
		}
		all.Hooks = append(all.Hooks, devices[uuid].Hooks...)
	}
	return all
}

// driverView is the driver root as this process sees it.
func (w Wanted) driverView(root fs.FS) (fs.FS, error) {
	folder := below(w.Options.ContainerDriverRoot)
	if !exists(root, folder) {
		folder = below(w.Options.DriverRoot)
	}
	view, err := fs.Sub(root, folder)
	if err != nil {
		return nil, fmt.Errorf("look at the driver root: %w", err)
	}
	return view, nil
}

// hostRoots are where this process may see the host's root, or a part of it: the driver root where
// that is the host's, the place at which NVIDIA's operator mounts it, and what is mounted at the
// host's own paths.
func (w Wanted) hostRoots(root fs.FS) []fs.FS {
	folders := []string{"host", "."}
	if w.Options.DriverRoot == "/" {
		folders = append([]string{below(w.Options.ContainerDriverRoot)}, folders...)
	}
	var roots []fs.FS
	for _, folder := range folders {
		if view, err := fs.Sub(root, folder); err == nil {
			roots = append(roots, view)
		}
	}
	return roots
}

// onHost reports whether the host has a file, as far as this process can see: the driver root
// usually is the host's root. Links need not be resolved: the programs that use the file on the
// host follow them.
func (w Wanted) onHost(root fs.FS, name string) bool {
	view, err := fs.Sub(root, below(w.Options.ContainerDriverRoot))
	if err != nil {
		return false
	}
	_, _, err = driverroot.Resolve(view, name)
	return err == nil
}

func exists(root fs.FS, name string) bool {
	_, err := fs.Stat(root, name)
	return err == nil
}

// below returns an absolute path as one below the root of a file system.
func below(absolute string) string {
	if p := strings.TrimPrefix(path.Clean("/"+absolute), "/"); p != "" {
		return p
	}
	return "."
}

// display returns the device nodes of a device's display engine, which whole GPUs have, and MIG
// devices with graphics; and the links by which programs find them by PCI address.
func (w Wanted) display(root fs.FS, d resource.Device) (paths []string, links [][2]string) {
	g, known := w.Snapshot.GPU(d.GPU)
	partial := slices.ContainsFunc(g.MIGDevices, func(m inventory.MIGDevice) bool {
		return m.UUID == d.UUID && !strings.Contains(m.Profile, "+gfx")
	})
	if !known || partial {
		return nil, nil
	}
	entries, err := fs.ReadDir(root, "sys/bus/pci/devices/"+g.BDF+"/drm")
	if err != nil {
		return nil, nil // it has none
	}
	for _, e := range entries {
		for prefix, kind := range map[string]string{"card": "card", "renderD": "render"} {
			if strings.HasPrefix(e.Name(), prefix) {
				paths = append(paths, "/dev/dri/"+e.Name())
				links = append(links, [2]string{"../" + e.Name(), "/dev/dri/by-path/pci-" + g.BDF + "-" + kind})
			}
		}
	}
	return paths, links
}

// nodes returns the device nodes of the given paths in the container. A runtime makes those with a
// number by that; for the others, it needs the host's node.
func (w Wanted) nodes(paths []string) []*specs.DeviceNode {
	nodes := make([]*specs.DeviceNode, 0, len(paths))
	for _, p := range paths {
		node := &specs.DeviceNode{Path: p}
		if number, known := containeredits.NumberOf(p, w.Snapshot.Majors); known {
			node.Type, node.Major, node.Minor = "c", int64(number.Major), int64(number.Minor)
			if number.Mode != 0 {
				node.FileMode = new(fs.FileMode(number.Mode))
			}
		}
		if host := path.Join("/", w.Edits.DevRoot, p); host != p {
			node.HostPath = host
		}
		nodes = append(nodes, node)
	}
	return nodes
}

// companion returns what a container is given of a companion of the driver.
func (w Wanted) companion(root fs.FS, class containeredits.CDIClass) specs.ContainerEdits {
	patterns := map[containeredits.CDIClass][]string{
		containeredits.CDIIMEX:    {inventory.NodeIMEXChannel0.String()},
		containeredits.CDIGDRCopy: {inventory.NodeGDRCopy.String()},
		containeredits.CDIGDS:     {"nvidia-fs[0-9]*"},
		containeredits.CDIMOFED:   {"infiniband/uverbs*", inventory.NodeRDMA.String()},
	}[class]
	var paths []string
	for _, pattern := range patterns {
		for _, folder := range []string{"dev", path.Join(below(w.Options.ContainerDriverRoot), "dev")} {
			found, err := fs.Glob(root, path.Join(folder, pattern))
			if err != nil || len(found) == 0 {
				continue
			}
			for _, p := range found {
				paths = append(paths, "/dev"+strings.TrimPrefix(p, folder))
			}
			break
		}
	}
	given := specs.ContainerEdits{DeviceNodes: w.nodes(paths)}
	if class != containeredits.CDIGDS {
		return given
	}
	for _, p := range []string{"run/udev", "etc/cufile.json"} {
		switch {
		case w.onHost(root, p):
			given.Mounts = append(given.Mounts, mount(path.Join("/", w.Options.DriverRoot, p), "/"+p, readOnly))
		case exists(root, p):
			given.Mounts = append(given.Mounts, mount("/"+p, "/"+p, readOnly))
		}
	}
	return given
}
