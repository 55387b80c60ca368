package driverkernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// A node is a device node of the driver.
type node struct {
	name         string // below /dev
	major, minor uint32
	mode         uint32
}

// MakeNodes creates the missing device nodes of the loaded driver in /dev, and replaces those with
// the number of a former driver.
func (k *Kernel) MakeNodes() error {
	var failed []error
	for _, n := range k.nodes() {
		if err := k.makeNode(n); err != nil {
			failed = append(failed, fmt.Errorf("create the device node /dev/%s: %w", n.name, err))
		}
	}
	return errors.Join(failed...)
}

// nodes returns the device nodes of the loaded driver: by the numbers in /proc/devices, the GPUs and
// the capabilities.
func (k *Kernel) nodes() []node {
	text, _ := os.ReadFile(filepath.Join(k.Root, "proc/devices")) // without a driver there are no numbers
	characters, _, _ := strings.Cut(string(text), "Block devices:")
	majors := map[string]uint32{}
	for line := range strings.Lines(characters) {
		number, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if major, err := strconv.ParseUint(number, 10, 20); err == nil {
			majors[name] = uint32(major)
		}
	}
	var all []node
	const everybody = 0o666
	gpu := majors["nvidia"]
	if gpu == 0 {
		gpu = majors["nvidia-frontend"] // of drivers before R545
	}
	if gpu > 0 {
		all = append(all, node{"nvidiactl", gpu, 255, everybody}, node{"nvidia-modeset", gpu, 254, everybody})
		for _, minor := range k.gpuMinors() {
			all = append(all, node{fmt.Sprintf("nvidia%d", minor), gpu, minor, everybody})
		}
	}
	if uvm := majors["nvidia-uvm"]; uvm > 0 {
		all = append(all, node{"nvidia-uvm", uvm, 0, everybody}, node{"nvidia-uvm-tools", uvm, 1, everybody})
	}
	if caps := majors["nvidia-caps"]; caps > 0 {
		for minor, mode := range k.capabilities() {
			all = append(all, node{fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor), caps, minor, mode})
		}
	}
	return all
}

// gpuMinors returns the minor numbers of the GPUs that the driver has.
func (k *Kernel) gpuMinors() (all []uint32) {
	files, _ := filepath.Glob(filepath.Join(k.Root, "proc/driver/nvidia/gpus/*/information")) // the pattern is valid
	for _, file := range files {
		if minor, ok := values(file)["Device Minor"]; ok {
			all = append(all, minor)
		}
	}
	return all
}

// capabilities returns the modes of the capabilities that exist now, by their minor numbers.
func (k *Kernel) capabilities() map[uint32]uint32 {
	all := map[uint32]uint32{}
	top := filepath.Join(k.Root, "proc/driver/nvidia/capabilities")
	_ = filepath.WalkDir(top, func(name string, e fs.DirEntry, err error) error { // a driver without MIG has none
		if err != nil || !e.Type().IsRegular() {
			return nil //nolint:nilerr // the others are found
		}
		v := values(name)
		if minor, ok := v["DeviceFileMinor"]; ok {
			all[minor] = 0o444
			if mode, ok := v["DeviceFileMode"]; ok {
				all[minor] = mode & 0o777
			}
		}
		return nil
	})
	return all
}

// values returns the numbers in a file of the driver with lines such as "Device Minor: 	 0".
func values(file string) map[string]uint32 {
	text, _ := os.ReadFile(file) // it goes with the GPU
	all := map[string]uint32{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		if n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32); err == nil {
			all[strings.TrimSpace(key)] = uint32(n)
		}
	}
	return all
}

// makeNode creates a node, unless it is there with the same number.
func (k *Kernel) makeNode(n node) error {
	file := filepath.Join(k.Root, "dev", n.name)
	device := unix.Mkdev(n.major, n.minor)
	info, err := os.Lstat(file)
	switch {
	case err == nil:
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Mode&syscall.S_IFMT == syscall.S_IFCHR &&
			stat.Rdev == device {
			return nil
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	// A process that opens the path finds the former node or the new one.
	temporary := statefile.TemporaryName(file, strconv.Itoa(os.Getpid()))
	if err := statefile.Remove(temporary); err != nil {
		return err
	}
	if err := k.Calls.MakeNode(temporary, n.mode, device); err != nil {
		return err
	}
	if err := os.Rename(temporary, file); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	return nil
}
