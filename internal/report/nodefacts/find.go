package nodefacts

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Roots are paths on the node, except for Container.
type Roots struct {
	Driver    string // the root folder of the driver's installation
	Dev       string // the folder of the driver's folder dev
	Container string // where this process sees Driver; it may be missing
}

// Find returns where the node's files are: below hostRoot, if set. container says that this process is
// in a container. at is the place in words. The caller sets SearchPath and the sockets. The error says
// that hostRoot is not a folder.
func Find(roots Roots, hostRoot string, container bool) (p Places, at string, err error) {
	folder := func(name string) bool {
		info, err := os.Stat(name)
		return err == nil && info.IsDir()
	}
	mounted := folder(roots.Container)
	switch {
	case hostRoot != "" && !folder(hostRoot):
		return p, "", fmt.Errorf("--host-root: %s is not a folder", hostRoot)
	case hostRoot != "":
		container = container && filepath.Clean(hostRoot) != "/"
	case !container:
		hostRoot = "/"
	case roots.Driver == "/" && mounted:
		hostRoot = roots.Container
	}
	below := func(name string) fs.FS { return os.DirFS(filepath.Join(hostRoot, name)) }
	p = Places{
		Kernel: os.DirFS("/"), DriverRoot: roots.Driver,
		DevFolder: filepath.Join(roots.Dev, "dev"),
	}
	if container {
		p.Container = os.DirFS("/")
	}
	if hostRoot == "" {
		p.Hidden = "The node's files are not visible in this container: mount the node's / read-only and give its " +
			"path with --host-root, or run doctor on the node"
		at = "the node's files are not visible in this container"
	} else {
		p.Host, at = below("/"), "the node's files: "+hostRoot
		if folder(filepath.Join(hostRoot, "proc")) && folder(filepath.Join(hostRoot, "sys")) {
			p.Kernel = p.Host
		}
		p.Driver, p.Devices = below(roots.Driver), below(roots.Dev)
	}
	if mounted {
		p.Driver = os.DirFS(roots.Container)
		if p.Devices == nil && roots.Dev == roots.Driver {
			p.Devices = p.Driver
		}
	}
	return p, at, nil
}
