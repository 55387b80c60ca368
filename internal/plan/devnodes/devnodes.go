// Package devnodes creates the driver's device nodes on the host, for containers with nodes of the
// host from the kubelet. Nothing else creates the nodes of a new MIG device there.
package devnodes

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Roots are the paths to the host's device nodes.
type Roots struct {
	// Driver is the host's directory of the driver root, and Container the same directory in this
	// container.
	Driver, Container string
	// Dev is the host's directory that contains dev/.
	Dev string
	// Divides is true if this program creates MIG devices. Then nothing else creates their nodes on
	// the host.
	Divides bool
}

// folder returns the path of Dev for this process; false if this process does not see Dev, or Dev
// has no node of the driver.
func (r Roots) folder() (string, bool) {
	inside, err := filepath.Rel(path.Join("/", r.Driver), path.Join("/", r.Dev))
	if err != nil || inside == ".." || strings.HasPrefix(inside, "../") {
		return "", false
	}
	folder := path.Join("/", r.Container, inside)
	_, err = os.Stat(path.Join(folder, "dev/nvidiactl"))
	return folder, err == nil
}

// A Maker creates device nodes. Apply is for one goroutine, Lacks for any. The zero value is ready
// for use.
type Maker struct {
	// Mknod creates a character device; nil for the kernel's mknod.
	Mknod        func(name string, mode uint32, device int) error
	last         atomic.Pointer[result]
	sweptFolders map[string]bool // folders without temporary nodes
}

// capabilities is the folder of the nodes of MIG devices.
const capabilities = "/dev/nvidia-caps/"

// result is the outcome of the last Apply.
type result struct {
	isHidden   bool // this process does not see the host's nodes
	lacksNodes bool // unseen, and nothing else creates the nodes of MIG devices
	// By the path in a container: why the node could not be created, or "" for an existing node.
	lacks map[string]string
}

// Apply creates missing device nodes of a plan on the host, and replaces nodes with the number of a
// previous driver. If this process does not see the host's nodes, Apply does nothing: MIG devices
// of this program then lack their nodes, and all other nodes count as present. The error names the
// nodes that could not be created.
func (m *Maker) Apply(roots Roots, snapshot inventory.Snapshot, plan resource.Plan, o containeredits.Options) error {
	folder, seen := roots.folder()
	if !seen {
		m.last.Store(&result{isHidden: true, lacksNodes: roots.Divides})
		return nil
	}
	lacks := map[string]string{}
	var failed []error
	wanted := nodes(snapshot, plan, o)
	m.sweep(folder, wanted)
	for _, node := range wanted {
		lacks[node] = ""
		host := path.Join("/", o.DevRoot, node)
		number, known := containeredits.NumberOf(node, snapshot.Majors)
		if err := m.ensure(path.Join(folder, node), number, known); err != nil {
			lacks[node] = fmt.Sprintf("its device node %s is not on the host, and cannot be created: %v", host, err)
			if known {
				lacks[node] += fmt.Sprintf("; make it there: mknod -m %o %s c %d %d", mode(number), host, number.Major,
					number.Minor)
			}
			failed = append(failed, errors.New(lacks[node]))
		}
	}
	m.last.Store(&result{lacks: lacks})
	return errors.Join(failed...)
}

// nodes returns the device nodes of the devices of a plan, by their paths in a container.
func nodes(snapshot inventory.Snapshot, plan resource.Plan, o containeredits.Options) []string {
	all := map[string]bool{}
	for _, r := range plan.Resources {
		for _, d := range r.Members() {
			if snapshot.Majors.UVM > 0 { // the module is loaded
				d.Control |= inventory.NodeUVM | inventory.NodeUVMTools
			}
			for _, n := range nodesOf(d, o) {
				all[n.ContainerPath] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// nodesOf returns the nodes of a device; none if the device cannot be given to a container.
func nodesOf(d resource.Device, o containeredits.Options) []containeredits.DeviceNode {
	e, err := containeredits.For([]resource.Device{d}, o)
	if err != nil {
		return nil
	}
	return e.Nodes
}

// ensure creates a node, unless a node with the same number exists.
func (m *Maker) ensure(name string, number containeredits.Number, known bool) error {
	there, err := os.Stat(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	device := int(unix.Mkdev(uint32(number.Major), uint32(number.Minor)))
	switch {
	case err == nil && (!known || !isOutdated(there, uint64(device))):
		return nil
	case !known:
		return errors.New("the kernel has no number for it")
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	// Another process that starts may remove the temporary node as a leftover.
	for again := true; ; again = false {
		if err := m.put(name, number, device); err == nil || !again || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
}

// put creates a node in place of the node at its path.
func (m *Maker) put(name string, number containeredits.Number, device int) error {
	mknod := m.Mknod
	if mknod == nil {
		mknod = syscall.Mknod
	}
	// Each container has a process 1, and each may be killed before the rename.
	temporary := statefile.TemporaryName(name, rand.Text())
	if err := mknod(temporary, syscall.S_IFCHR|mode(number), device); err != nil {
		return err
	}
	err := os.Chmod(temporary, fs.FileMode(mode(number))) // regardless of the umask
	if err == nil {
		err = os.Rename(temporary, name)
	}
	if err != nil {
		return errors.Join(err, statefile.Remove(temporary))
	}
	return nil
}

// sweep removes temporary nodes of killed processes from the folders of nodes.
func (m *Maker) sweep(folder string, nodes []string) {
	if m.sweptFolders == nil {
		m.sweptFolders = map[string]bool{}
	}
	for _, node := range nodes {
		at := filepath.Dir(path.Join(folder, node))
		if m.sweptFolders[at] {
			continue
		}
		m.sweptFolders[at] = true
		entries, _ := os.ReadDir(at) // nothing can be removed from an unreadable folder
		for _, e := range entries {
			if statefile.IsTemporary(e.Name()) {
				_ = os.Remove(filepath.Join(at, e.Name())) // the next process tries again
			}
		}
	}
}

// mode returns the mode of a node: by default the mode set by the driver's own tool.
func mode(n containeredits.Number) uint32 {
	if n.Mode != 0 {
		return n.Mode
	}
	return 0o666
}

// isOutdated reports whether a file is a character device with another number.
func isOutdated(there fs.FileInfo, device uint64) bool {
	stat, ok := there.Sys().(*syscall.Stat_t)
	return ok && stat.Mode&syscall.S_IFMT == syscall.S_IFCHR && uint64(stat.Rdev) != device
}

// Lacks returns the devices of a plan, by UUID, with nodes that could not be created or were not
// checked yet, each with the reason.
func (m *Maker) Lacks(plan resource.Plan, o containeredits.Options) map[string]string {
	t := m.last.Load()
	if t == nil {
		t = &result{}
	}
	devices := map[string]string{}
	if t.isHidden && !t.lacksNodes {
		return devices
	}
	for _, r := range plan.Resources {
		for _, d := range r.Members() {
			for _, n := range nodesOf(d, o) {
				why, looked := t.lacks[n.ContainerPath]
				switch {
				case t.isHidden && strings.HasPrefix(n.ContainerPath, capabilities):
					why = "its device node " + n.HostPath + " cannot be created on the host, whose /dev this process " +
						"does not see: set hostDev in the chart or mount it as deployments/node-agent-mig does, or " +
						"use the device list strategy cdi-cri"
				case !t.isHidden && !looked:
					why = "it is not known yet whether its device node " + n.HostPath + " is on the host"
				}
				if why != "" {
					devices[d.UUID] = why
				}
			}
		}
	}
	return devices
}
