// Package nodefacts reads the facts for package doctor from the files of a node: from /etc, /sys,
// /proc, /dev and /run below a root folder, from the kubelet's folder, and from the folders of CDI
// specs. The package changes nothing, opens only regular files and folders, limits the size of
// reads, and abandons reads that do not return.
package nodefacts

import (
	"context"
	"io/fs"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// A root is a root folder of the node.
type root = nodefiles.Root

// Timeout limits the time for reading all facts.
const Timeout = 5 * time.Second

// Places are the locations of the node's files.
type Places struct {
	// Kernel has the node's /proc and /sys.
	Kernel fs.FS
	// Host has the node's other files; nil if they are not visible. Hidden then explains why.
	Host   fs.FS
	Hidden string
	// Driver has the driver root; nil if it is not visible. DriverRoot is its path on the node.
	Driver     fs.FS
	DriverRoot string
	// SearchPath are folders below the driver root that are searched for libraries first.
	SearchPath []string
	// Devices has the device nodes in its folder dev; nil if they are not visible. DevFolder is the
	// path of that folder on the node.
	Devices   fs.FS
	DevFolder string
	// Container has the file system of doctor's container; nil outside of containers.
	Container fs.FS

	// KubeletSocket and PodResourcesSocket are paths for this process; empty if unused.
	KubeletSocket, PodResourcesSocket string
	// Simulated is true if Kernel and Devices belong to a simulated node.
	Simulated bool
}

// Gather reads all facts except the settings and the daemon. It also returns when ctx ends.
func (p Places) Gather(ctx context.Context) doctor.NodeFacts {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	kernel, host := root{FS: p.Kernel}, root{FS: p.Host}
	f := doctor.NodeFacts{Simulated: p.Simulated}
	var atWSL diagnosis.Fact[bool]
	var waits []func()
	waits = append(waits,
		nodefiles.ReadFact(ctx, &f.GPUs, "the PCI bus", "",
			func() ([]doctor.PCIDevice, error) { return pciGPUs(kernel, false) }),
		nodefiles.ReadFact(ctx, &f.GPUsGivenAway, "the PCI bus", "",
			func() ([]doctor.PCIDevice, error) { return pciGPUs(kernel, true) }),
		nodefiles.ReadFact(ctx, &atWSL, "the release of the kernel", "", func() (bool, error) {
			return driverroot.IsWSL(p.Kernel) || p.Devices != nil && driverroot.IsWSL(p.Devices), nil
		}),
		nodefiles.ReadFact(ctx, &f.NVSwitches, "the PCI bus", "", func() ([]doctor.PCIDevice, error) {
			return pciDevices(kernel, "0x0680")
		}),
		nodefiles.ReadFact(ctx, &f.Module, "the version of the kernel module", "",
			func() (string, error) { return moduleVersion(kernel) }),
		nodefiles.ReadFact(ctx, &f.Modules, "the kernel's modules", "",
			func() ([]string, error) { return modules(kernel) }),
		nodefiles.ReadFact(ctx, &f.Library, "the driver's libraries", p.noDriver(), func() (doctor.NVMLLibrary, error) {
			return library(root{FS: p.Driver}, p.DriverRoot, p.SearchPath)
		}),
		nodefiles.ReadFact(ctx, &f.Devices, "the device nodes", p.noDevices(), func() (doctor.Devices, error) {
			links := host // the folder of systemd and runc
			if links.FS == nil {
				links = root{FS: p.Devices}
			}
			return devices(kernel, links, root{FS: p.Devices}, p.DevFolder)
		}),
		nodefiles.ReadFact(ctx, &f.Container, "the device nodes of this container", p.noContainer(),
			func() (doctor.Devices, error) {
				own, err := devices(kernel, root{FS: p.Container}, root{FS: p.Container}, "/dev")
				for i := range own.Nodes {
					own.Nodes[i].Opens = opens(root{FS: p.Container}, own.Nodes[i])
				}
				return own, err
			}),
		nodefiles.ReadFact(ctx, &f.Processes, "the node's processes", p.Hidden, func() ([]string, error) {
			all, err := processes(host)
			return names(all), err
		}),
		nodefiles.ReadFact(ctx, &f.Runtime, "the configuration of the container runtime", p.Hidden,
			func() (doctor.Runtime, error) {
				return kubeletRuntime(host)
			}),
		nodefiles.ReadFact(ctx, &f.Toolkit, "the configuration of NVIDIA's runtime", p.Hidden,
			func() (doctor.Toolkit, error) { return toolkit(host), nil }),
		nodefiles.ReadFact(ctx, &f.Specs, "the CDI specs", p.noSpecs(),
			func() ([]doctor.Spec, error) { return specs(host) }),
		nodefiles.ReadFact(ctx, &f.SELinux, "the state of SELinux", "",
			func() (doctor.SELinux, error) { return p.selinux(kernel) }),
		nodefiles.ReadFact(ctx, &f.Kubelet, "the kubelet's folder", p.noKubelet(),
			func() (doctor.Kubelet, error) { return kubeletFolder(ctx, p.KubeletSocket) }),
		nodefiles.ReadFact(ctx, &f.PodResources, "PodResources", p.noPodResources(),
			func() (doctor.PodResourcesAnswer, error) {
				return podResources(ctx, p.PodResourcesSocket, p.Host)
			}),
	)
	for _, wait := range waits {
		wait()
	}
	f.WSL = atWSL.Value
	return f
}

func (p Places) noDriver() string {
	switch {
	case p.Simulated:
		return "The node is simulated, and has no driver root"
	case p.Driver == nil:
		return "The driver root is not visible here: mount it, and set --driver-root-ctr-path"
	}
	return ""
}

func (p Places) noDevices() string {
	if p.Devices == nil {
		return p.Hidden
	}
	return ""
}

func (p Places) noSpecs() string {
	if p.Simulated {
		return "The node is simulated, and its CDI specs name files that do not exist"
	}
	return p.Hidden
}

func (p Places) noContainer() string {
	if p.Container == nil {
		return "Not in a container"
	}
	return ""
}

func (p Places) noKubelet() string {
	if p.KubeletSocket == "" {
		return "The daemon is configured not to register with the kubelet: --kubelet-socket is empty"
	}
	return ""
}

func (p Places) noPodResources() string {
	if p.PodResourcesSocket == "" {
		return "The daemon is configured not to use PodResources: --pod-resources-socket is empty"
	}
	return ""
}
