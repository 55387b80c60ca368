package driverkernel

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// module is a module file of a driver folder.
type module struct {
	name    string // as /proc/modules has it
	file    *os.File
	depends []string // names of modules
	version string   // of the driver; empty if the module has none
}

// required are the modules without which CUDA does not work. Another module that the kernel refuses
// is left out.
var required = []string{"nvidia", "nvidia_uvm"}

// Load loads the modules of a driver folder that are not loaded yet, in the order of their
// dependencies, and creates the device nodes. The folder must be at the same path on the node.
// Before a file is loaded, its digest is compared with the manifest. progress is called before each
// module. The error is a sentence for the user.
func (k *Kernel) Load(ctx context.Context, folder string, m driverfolder.Manifest, progress func(done, all int)) error {
	release, err := k.Release()
	if err != nil {
		return err
	}
	modules, err := openModules(folder, m, release)
	defer func() {
		for _, one := range modules {
			_ = one.file.Close() // only read
		}
	}()
	if err != nil {
		return err
	}
	if err := k.setFirmware(folder); err != nil {
		return err
	}
	for i, one := range modules {
		progress(i, len(modules)+1)
		err := ctx.Err()
		if err == nil {
			err = k.loadModule(ctx, one, release)
		}
		switch {
		case err == nil:
		case slices.Contains(required, one.name) || ctx.Err() != nil:
			return err
		default:
			klog.FromContext(ctx).Info("A module of the driver is not loaded; CUDA does not need it",
				"module", one.name, "reason", err.Error())
		}
	}
	progress(len(modules), len(modules)+1)
	if s, err := k.State(); err != nil {
		return err
	} else if s.Version != m.Version {
		return fmt.Errorf("the kernel says that driver %s is loaded, and the folder has %s",
			cmp.Or(s.Version, "none"), m.Version)
	}
	return k.MakeNodes()
}

// openModules returns the folder's modules for a kernel in the order in which they can be loaded.
func openModules(folder string, m driverfolder.Manifest, release string) (all []module, err error) {
	files := m.ModuleFiles(release)
	if len(files) == 0 {
		return nil, NoModules(m, release)
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }() // only read
	for _, f := range files {
		if path.Ext(f.Path) != ".ko" || f.Link != "" {
			continue
		}
		one, err := openModule(root, f)
		if err != nil {
			return all, fmt.Errorf("%s: %w", path.Join(folder, f.Path), err)
		}
		all = append(all, one)
	}
	return inOrder(all), nil
}

// NoModules returns the error for a folder without modules for a kernel.
func NoModules(m driverfolder.Manifest, release string) error {
	return fmt.Errorf("driver %s has no modules for the kernel %s; it has those for: %s. Pack it again with the "+
		"modules for this kernel", m.Version, release, cmp.Or(strings.Join(m.Releases(), ", "), "none"))
}

// openModule opens a module file and compares its digest.
func openModule(root *os.Root, f driverfolder.File) (_ module, err error) {
	if info, err := root.Lstat(f.Path); err != nil {
		return module{}, err
	} else if !info.Mode().IsRegular() {
		return module{}, errors.New("it is not a regular file")
	}
	file, err := root.OpenFile(f.Path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return module{}, err
	}
	defer func() {
		if err != nil {
			_ = file.Close() // only read
		}
	}()
	hash := sha256.New()
	if _, err := io.Copy(hash, io.LimitReader(file, f.Size+1)); err != nil {
		return module{}, err
	}
	if found := hex.EncodeToString(hash.Sum(nil)); found != f.SHA256 {
		return module{}, fmt.Errorf("it has the digest %s, and the manifest has %s: somebody has changed it", found,
			f.SHA256)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return module{}, err
	}
	info, err := driverfacts.ModuleInfo(file)
	if err != nil {
		return module{}, err
	}
	one := module{file: file, version: info["version"],
		name: moduleName(cmp.Or(info["name"], strings.TrimSuffix(path.Base(f.Path), ".ko")))}
	for name := range strings.SplitSeq(info["depends"], ",") {
		if name != "" {
			one.depends = append(one.depends, moduleName(name))
		}
	}
	return one, nil
}

// moduleName returns a name as /proc/modules has it.
func moduleName(name string) string { return strings.ReplaceAll(name, "-", "_") }

// inOrder returns modules so that each comes after those on which it depends.
func inOrder(all []module) (sorted []module) {
	slices.SortStableFunc(all, func(a, b module) int {
		return cmp.Compare(slices.Index(preflight.OwnModules, a.name), slices.Index(preflight.OwnModules, b.name))
	})
	for len(all) > 0 {
		i := slices.IndexFunc(all, func(m module) bool {
			return !slices.ContainsFunc(all, func(o module) bool { return slices.Contains(m.depends, o.name) })
		})
		i = max(i, 0) // in a circle any: the kernel refuses it
		sorted = append(sorted, all[i])
		all = slices.Delete(all, i, i+1)
	}
	return sorted
}

// loadModule loads a module and, before it, the modules of the kernel that it needs.
func (k *Kernel) loadModule(ctx context.Context, m module, release string) error {
	if k.isLoaded(m.name) {
		return nil
	}
	for _, name := range m.depends {
		switch {
		case k.isLoaded(name) || preflight.IsOwnModule(name):
			// The kernel says if a module of the driver is missing.
		case m.name == "nvidia_peermem":
			return fmt.Errorf("the module %s of InfiniBand is not loaded", name)
		default:
			if err := k.Calls.Run(ctx, "modprobe", name); err != nil {
				return fmt.Errorf("%s needs the kernel's module %s, which cannot be loaded: %w", m.name, name, err)
			}
		}
	}
	err := k.Calls.Load(m.file, k.Parameters[m.name])
	if err == nil || errors.Is(err, unix.EEXIST) {
		return nil
	}
	return &refusal{explainLoad(m.name, release, err), err}
}

// isLoaded reports whether the kernel has a module, loaded or built in.
func (k *Kernel) isLoaded(name string) bool {
	_, err := os.Stat(filepath.Join(k.Root, "sys/module", name))
	return err == nil
}

const notSigned = "it demands signed modules, and knows no key with which this one is signed; sign the modules " +
	"with a key that the nodes know, and pack the driver again"

// explainLoad returns the sentence for a refusal of the kernel to load a module.
func explainLoad(name, release string, err error) string {
	refuses := "the kernel " + release + " refuses the module " + name + ": "
	for _, known := range []struct {
		is       error
		sentence string
	}{
		{unix.ENOEXEC, "it was built for another kernel or configuration of the kernel"},
		{unix.EKEYREJECTED, notSigned},
		{unix.ENOKEY, notSigned},
		{unix.EPERM, "it does not let this program load modules: the kernel is locked down, or gpu-driver does not " +
			"run as root in a privileged container"},
		{unix.ENODEV, "the driver found no GPU that it supports; the kernel log has the reason: dmesg | grep NVRM"},
		{unix.EBUSY, "another driver, such as nouveau or vfio-pci, has the GPUs"},
		{unix.ENOENT, "it needs a symbol that this kernel does not have; the kernel log has the name"},
		{unix.EINVAL, "a parameter or a symbol does not fit; the kernel log has the reason"},
		{unix.ENOSYS, "it cannot load modules at all"},
		{unix.ENOMEM, "the kernel has no memory for it"},
	} {
		if errors.Is(err, known.is) {
			return refuses + known.sentence
		}
	}
	return refuses + "the kernel log may have the reason"
}

// firmwareParameter is the file with the kernel's additional folder for firmware.
const firmwareParameter = "sys/module/firmware_class/parameters/path"

// setFirmware lets the kernel look for the driver's firmware in a driver folder. The path of another
// program stays.
func (k *Kernel) setFirmware(folder string) error {
	firmware := filepath.Join(folder, "lib/firmware")
	if _, err := os.Lstat(firmware); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	file := filepath.Join(k.Root, firmwareParameter)
	now, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("the kernel does not tell where it looks for firmware: %w", err)
	}
	has := strings.TrimSpace(string(now))
	if has == firmware {
		return nil
	}
	if has != "" && filepath.Dir(filepath.Dir(filepath.Dir(has))) != filepath.Dir(folder) {
		return fmt.Errorf("the kernel looks for firmware in %s, which another program has set: empty /%s", has,
			firmwareParameter)
	}
	if err := os.WriteFile(file, []byte(firmware), 0o600); err != nil { // without a line feed: older kernels keep it
		return fmt.Errorf("tell the kernel where the driver's firmware is: %w", err)
	}
	return nil
}
