// Package standinkernel is a stand-in for the kernel of a node to which driver modules are loaded. Its
// state is files below a folder, where the program under test finds /proc, /sys and /dev. So the state
// outlives a process that is killed, as that of a kernel does.
package standinkernel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

// Release is the release of the kernel.
const Release = "6.8.0-90-generic"

// A Kernel is a stand-in. Its methods Load, Unload, MakeNode and Run are those of driverkernel.Calls.
type Kernel struct {
	Root string
	mu   sync.Mutex // held while the files of modules and processes change
}

// New returns the kernel of a new node without a driver.
func New(t testing.TB) *Kernel {
	t.Helper()
	k := &Kernel{Root: t.TempDir()}
	for name, content := range map[string]string{
		"proc/sys/kernel/osrelease": Release + "\n", "etc/os-release": "ID=ubuntu\n", "dev/null": "",
		"lib/modules/" + Release + "/modules.dep": "", "boot/.keep": "", "usr/lib/.keep": "", "var/lib/.keep": "",
		"sys/bus/pci/devices/.keep": "", "sys/class/.keep": "", "boots": "0", "calls": "",
		"proc/1/maps": "", "proc/1/comm": "systemd\n", "proc/1/cgroup": "0::/init.scope\n", "proc/1/fd/.keep": "",
	} {
		k.put(name, content)
	}
	k.Boot()
	return k
}

func (k *Kernel) put(name, content string) {
	file := filepath.Join(k.Root, name)
	// As a whole: the program under test reads it meanwhile.
	err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file+".new", []byte(content), 0o600),
		os.Rename(file+".new", file))
	if err != nil {
		panic(err)
	}
}

func (k *Kernel) read(name string) string {
	text, err := os.ReadFile(filepath.Join(k.Root, name))
	if err != nil {
		return ""
	}
	return string(text)
}

// Boot restarts the node: nothing is loaded, and /dev has no nodes of the driver.
func (k *Kernel) Boot() {
	n, _ := strconv.Atoi(k.read("boots"))
	k.put("boots", strconv.Itoa(n+1))
	k.put("proc/sys/kernel/random/boot_id", fmt.Sprintf("00000000-0000-4000-8000-%012d\n", n+1))
	for _, name := range []string{"sys/module", "proc/driver", "dev"} {
		if err := os.RemoveAll(filepath.Join(k.Root, name)); err != nil {
			panic(err)
		}
	}
	k.put("dev/null", "")
	k.put("sys/module/firmware_class/parameters/path", "")
	k.put("proc/modules", "")
	k.put("proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n")
}

// Refuse lets the kernel refuse to load a module, by its name or by NAME=VERSION. Zero ends that.
func (k *Kernel) Refuse(module string, errno unix.Errno) {
	k.put("refused/"+module, strconv.Itoa(int(errno)))
}

// Hold lets a process have a device node of the driver open. The process's cgroup is that of a
// service if the service is not empty.
func (k *Kernel) Hold(pid int, name, service string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	folder := fmt.Sprintf("proc/%d/", pid)
	k.put(folder+"comm", name+"\n")
	k.put(folder+"maps", "")
	k.put(folder+"cgroup", "0::/system.slice/"+service+"\n")
	k.put(folder+"fd/.keep", "")
	if err := os.Symlink("/dev/nvidia0", filepath.Join(k.Root, folder, "fd/3")); err != nil {
		panic(err)
	}
}

// Map lets a process have libcuda mapped, which the kernel does not count.
func (k *Kernel) Map(pid int, name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	folder := fmt.Sprintf("proc/%d/", pid)
	k.put(folder+"comm", name+"\n")
	k.put(folder+"maps", "7f0000000000-7f0000001000 r--p 00000000 08:01 42 /usr/lib/libcuda.so.1\n")
	k.put(folder+"cgroup", "0::/user.slice\n")
	k.put(folder+"fd/.keep", "")
}

// Release ends a process of Hold or Map.
func (k *Kernel) Release(pid int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := os.RemoveAll(filepath.Join(k.Root, "proc", strconv.Itoa(pid))); err != nil {
		panic(err)
	}
}

// holders returns the number of processes that hold the driver.
func (k *Kernel) holders() int {
	all, _ := filepath.Glob(filepath.Join(k.Root, "proc/*/fd/3"))
	return len(all)
}

// Calls returns the calls that have changed the node, one on each line.
func (k *Kernel) Calls() string { return k.read("calls") }

// Forget empties Calls.
func (k *Kernel) Forget() { k.put("calls", "") }

func (k *Kernel) called(format string, args ...any) {
	k.put("calls", k.read("calls")+fmt.Sprintf(format, args...)+"\n")
}

// modules returns the loaded modules with the modules on which each depends, in their order.
func (k *Kernel) modules() (names []string, depends map[string][]string) {
	depends = map[string][]string{}
	for line := range strings.Lines(k.read("loaded")) {
		name, on, _ := strings.Cut(strings.TrimSpace(line), " ")
		if k.read("sys/module/"+name+"/refcnt") == "" {
			continue // of a former boot
		}
		names, depends[name] = append(names, name), strings.Split(on, ",")
	}
	return names, depends
}

// Modules returns the names and versions of the loaded modules, in the order of their loading.
func (k *Kernel) Modules() (all []string) {
	names, _ := k.modules()
	for _, name := range names {
		all = append(all, name+"="+strings.TrimSpace(k.read("sys/module/"+name+"/version")))
	}
	return all
}

// set writes the files of the loaded modules.
func (k *Kernel) set(names []string, depends map[string][]string) {
	var loaded, modules, devices strings.Builder
	majors := map[string]int{"nvidia": 195, "nvidia_uvm": 500}
	for _, name := range names {
		var users []string
		for _, other := range names {
			if slices.Contains(depends[other], name) {
				users = append(users, other)
			}
		}
		references := len(users)
		if name == "nvidia" {
			references += k.holders()
		}
		fmt.Fprintf(&loaded, "%s %s\n", name, strings.Join(depends[name], ","))
		list := "-"
		if len(users) > 0 {
			list = strings.Join(users, ",") + ","
		}
		fmt.Fprintf(&modules, "%s 1000 %d %s Live 0x0\n", name, references, list)
		if majors[name] > 0 {
			fmt.Fprintf(&devices, "%d %s\n", majors[name], strings.ReplaceAll(name, "_", "-"))
		}
	}
	k.put("loaded", loaded.String())
	k.put("proc/modules", modules.String())
	k.put("proc/devices", "Character devices:\n  1 mem\n"+devices.String()+"\nBlock devices:\n")
}

// Refresh counts the references again, after Hold and Release.
func (k *Kernel) Refresh() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.set(k.modules())
}

// Load loads a module.
func (k *Kernel) Load(module *os.File, parameters string) error {
	content, err := io.ReadAll(module)
	if err != nil {
		return err
	}
	info, err := driverfacts.ModuleInfo(bytes.NewReader(content))
	if err != nil {
		return unix.ENOEXEC
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	name := strings.ReplaceAll(info["name"], "-", "_")
	for _, refused := range []string{name, name + "=" + info["version"]} {
		if n, _ := strconv.Atoi(k.read("refused/" + refused)); n > 0 {
			return unix.Errno(n)
		}
	}
	if !strings.HasPrefix(info["vermagic"], Release+" ") {
		return unix.ENOEXEC
	}
	names, depends := k.modules()
	if slices.Contains(names, name) {
		return unix.EEXIST
	}
	on := strings.Split(info["depends"], ",")
	for _, one := range on {
		if !strings.HasPrefix(one, "nvidia") {
			continue // of the kernel
		}
		if !slices.Contains(names, strings.ReplaceAll(one, "-", "_")) {
			return unix.ENOENT
		}
		depends[name] = append(depends[name], strings.ReplaceAll(one, "-", "_"))
	}
	k.called("load %s %s%s", name, info["version"], parameters)
	k.put("sys/module/"+name+"/version", info["version"]+"\n")
	k.put("sys/module/"+name+"/refcnt", "0\n")
	if name == "nvidia" {
		k.put("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n")
	}
	k.set(append(names, name), depends)
	return nil
}

// Unload unloads a module that nothing uses.
func (k *Kernel) Unload(name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	names, depends := k.modules()
	i := slices.Index(names, name)
	if i < 0 {
		return unix.ENOENT
	}
	for _, other := range names {
		if slices.Contains(depends[other], name) {
			return unix.EWOULDBLOCK
		}
	}
	if name == "nvidia" && k.holders() > 0 {
		return unix.EWOULDBLOCK
	}
	k.called("unload %s", name)
	if err := os.RemoveAll(filepath.Join(k.Root, "sys/module", name)); err != nil {
		return err
	}
	if name == "nvidia" {
		if err := os.RemoveAll(filepath.Join(k.Root, "proc/driver")); err != nil {
			return err
		}
	}
	k.set(slices.Delete(names, i, i+1), depends)
	return nil
}

// MakeNode writes the number into a file.
func (k *Kernel) MakeNode(path string, mode uint32, device uint64) error {
	return errors.Join(os.WriteFile(path, fmt.Appendf(nil, "%d:%d", unix.Major(device), unix.Minor(device)), 0o600),
		os.Chmod(path, os.FileMode(mode)))
}

// Run records a program. systemctl stop ends the process of a service, and start starts it.
func (k *Kernel) Run(_ context.Context, program string, arguments ...string) error {
	k.called("%s %s", program, strings.Join(arguments, " "))
	if program != "systemctl" {
		return nil
	}
	const pid = 900
	if arguments[0] == "stop" {
		k.Release(pid)
	}
	k.Refresh()
	return nil
}

// Module returns a module file with the given values in .modinfo.
func Module(values map[string]string) []byte {
	var info bytes.Buffer
	for key, value := range values {
		info.WriteString(key + "=" + value + "\x00")
	}
	names := "\x00.modinfo\x00.shstrtab\x00"
	var b bytes.Buffer
	header := make([]byte, 64)
	copy(header, "\x7fELF\x02\x01\x01")
	machine := map[string]uint16{"amd64": 62, "arm64": 183}[runtime.GOARCH]
	binary.LittleEndian.PutUint16(header[16:], 1) // relocatable
	binary.LittleEndian.PutUint16(header[18:], machine)
	binary.LittleEndian.PutUint64(header[40:], uint64(64+info.Len()+len(names)))
	binary.LittleEndian.PutUint16(header[58:], 64)
	binary.LittleEndian.PutUint16(header[60:], 3)
	binary.LittleEndian.PutUint16(header[62:], 2)
	b.Write(header)
	b.Write(info.Bytes())
	b.WriteString(names)
	for _, s := range [][3]int{{0, 0, 0}, {1, 64, info.Len()}, {10, 64 + info.Len(), len(names)}} {
		section := make([]byte, 64)
		binary.LittleEndian.PutUint32(section, uint32(s[0]))
		binary.LittleEndian.PutUint64(section[24:], uint64(s[1]))
		binary.LittleEndian.PutUint64(section[32:], uint64(s[2]))
		b.Write(section)
	}
	return b.Bytes()
}

// Driver writes a driver folder for a version into a new folder below sources, and returns its
// digest. Its modules are for the given kernels.
func Driver(t testing.TB, sources, name, version string, kernels ...string) string {
	t.Helper()
	m := driverfolder.Manifest{Schema: driverfolder.Schema, Version: version, Architecture: runtime.GOARCH,
		Source: strings.Repeat("0", 64)}
	files := map[string][]byte{
		"usr/lib/libcuda.so." + version:                     []byte("libcuda " + version),
		"usr/bin/nvidia-smi":                                []byte("nvidia-smi " + version),
		"lib/firmware/nvidia/" + version + "/gsp_ga10x.bin": bytes.Repeat([]byte(version), 5000),
	}
	slices.Sort(kernels)
	for _, kernel := range kernels {
		m.Kernels = append(m.Kernels, driverfolder.Kernel{Release: kernel, Open: true, Vermagic: kernel + " SMP"})
		for file, depends := range map[string]string{"nvidia": "", "nvidia-uvm": "nvidia", "nvidia-modeset": "nvidia"} {
			files[driverfolder.ModuleFolder(kernel)+"/"+file+".ko"] = Module(map[string]string{
				"name": file, "version": version, "license": "Dual MIT/GPL", "vermagic": kernel + " SMP", "depends": depends,
			})
		}
	}
	folder := filepath.Join(sources, name)
	for file, content := range files {
		sum := sha256.Sum256(content)
		mode := "0644"
		if strings.HasPrefix(file, "usr/bin") {
			mode = "0755"
		}
		m.Files = append(m.Files, driverfolder.File{Path: file, Mode: mode, Size: int64(len(content)),
			SHA256: hex.EncodeToString(sum[:])})
	}
	m.Files = append(m.Files, driverfolder.File{Path: "usr/lib/libcuda.so.1", Link: "libcuda.so." + version})
	slices.SortFunc(m.Files, func(a, b driverfolder.File) int { return strings.Compare(a.Path, b.Path) })
	text, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	files[driverfolder.ManifestName] = text
	for file, content := range files {
		at := filepath.Join(folder, file)
		mode := os.FileMode(0o644)
		if strings.HasPrefix(file, "usr/bin") {
			mode = 0o755
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, content, mode),
			os.Chmod(at, mode)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libcuda.so."+version, filepath.Join(folder, "usr/lib/libcuda.so.1")); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}
