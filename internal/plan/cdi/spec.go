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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Options are the parts of the configuration about spec files. They are immutable, including the
// contents of the slices.
type Options struct {
	// DriverRoot is the host's directory below which the driver is installed.
	DriverRoot string
	// ContainerDriverRoot is the path of the driver root in this container. DriverRoot is used if
	// nothing is there.
	ContainerDriverRoot string
	// SearchPath are the folders below the driver root to search first for libraries.
	SearchPath []string
	// HookPath is the host's path of nvidia-cdi-hook or nvidia-ctk; empty for the usual paths.
	HookPath string
	// DisabledHooks are the names of unwanted hooks, or "all".
	DisabledHooks []string
	// DevicesOnly accepts a driver root without libraries and uses only device nodes: for a
	// simulated node.
	DevicesOnly bool
}

// Wanted has the inputs of the spec files.
type Wanted struct {
	Snapshot inventory.Snapshot
	Plan     resource.Plan
	Edits    containeredits.Options
	Options  Options
}

// voidVariable in a spec keeps NVIDIA's container runtime from adding GPUs for the image's
// environment.
const voidVariable = containeredits.EnvVisibleDevices + "=" + containeredits.Void

// specs returns the spec of each class of the node, without a version. Root is the file system of
// this process. Unreadable parts of the driver are taken from the previous result; the error names
// them.
func (w Wanted) specs(root fs.FS, before *searchResult) (map[containeredits.CDIClass]*specs.Spec, error) {
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

// A searchResult has the driver's files, with their version and options.
type searchResult struct {
	version string
	options Options
	files   driverroot.Files
	hook    hook

	programs programs
}

// find looks for the driver's files. If they are missing or unreadable while NVML reports the same
// version, the previous files count as present: a short absence of a mount withdraws no device.
func (w Wanted) find(root fs.FS, before *searchResult) error {
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
		*before = searchResult{programs: before.programs}
	}
	return fmt.Errorf("%w below %s; check --driver-root and --driver-root-ctr-path, and where the driver's "+
		"installation is mounted in this container", err, w.Options.ContainerDriverRoot)
}

func newSpec(class containeredits.CDIClass) *specs.Spec {
	return &specs.Spec{Kind: containeredits.CDIVendor + "/" + string(class)}
}

// gpuSpec returns the spec of GPUs and MIG devices; nil without knowledge of the driver's files. It
// includes devices no longer offered: while a pod holds such a device, the kubelet may give it to
// the next pod.
func (w Wanted) gpuSpec(root fs.FS, driver *searchResult) (*specs.Spec, error) {
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
			// The index may also belong to a replaced GPU.
			if name := containeredits.CDIName(d, by); names[name] == "" {
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
	order.Sort(spec.Devices, func(a, b specs.Device) int { return strings.Compare(a.Name, b.Name) })

	common := &spec.ContainerEdits
	if w.Edits.Void { // also beside another strategy: a runtime with CDI must not
		common.Env = append(common.Env, voidVariable)
	}
	nodes := w.Snapshot.Control & containeredits.AlwaysNodes
	if w.Snapshot.Majors.UVM > 0 { // the module is loaded; the first process that computes creates its nodes
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

// together returns the edits for several devices. A GPU has a name, or the names of its MIG
// devices.
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

// driverView returns the driver root as this process sees it.
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

// hostRoots returns the file systems with the host's root or a part of it: the driver root, if
// equal to the host's root; the mount of NVIDIA's operator; and mounts at the host's own paths.
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

// onHost reports whether the host has a file, as far as visible to this process. The driver root
// usually is the host's root. Links stay unresolved, because programs on the host follow them.
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

// below returns an absolute path relative to the root of a file system.
func below(absolute string) string {
	if p := strings.TrimPrefix(path.Clean("/"+absolute), "/"); p != "" {
		return p
	}
	return "."
}

// display returns the device nodes of a device's display engine, and the links by which programs
// find the nodes by PCI address. Whole GPUs and MIG devices with graphics have a display engine.
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
		return nil, nil // no display engine
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

// nodes returns the device nodes at the given paths in the container. A runtime creates nodes with
// a number itself; for the others it needs the host's node.
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

// companion returns the edits for a companion of the driver.
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
