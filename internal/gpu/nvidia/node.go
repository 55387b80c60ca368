package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// devFolders are the folders below the root of the file system that may have the driver's device
// nodes: this container's own, and those that a driver container keeps in its root.
func devFolders(driverRoot string) []string {
	folders := []string{"dev"}
	if below := strings.TrimPrefix(path.Join(driverRoot, "dev"), "/"); below != "dev" {
		folders = append(folders, below)
	}
	return folders
}

// controlNodes returns the driver's device nodes that one of the folders has. Of those that cannot
// be looked at, it returns the ones that were there last.
func controlNodes(root fs.FS, folders []string, last inventory.ControlNodes) inventory.ControlNodes {
	var found inventory.ControlNodes
	for node, name := range inventory.AllControlNodes.All() {
		for _, folder := range folders {
			_, err := fs.Stat(root, path.Join(folder, name))
			switch {
			case err == nil:
				found |= node
			case !errors.Is(err, fs.ErrNotExist):
				found |= node & last
			}
		}
	}
	return found
}

// majors reads the numbers of the driver's device nodes. For a number that cannot be read, it
// returns the last one that was read.
func majors(root fs.FS, last inventory.Majors) inventory.Majors {
	text, err := fs.ReadFile(root, "proc/devices")
	if err != nil {
		return last
	}
	characters, _, _ := strings.Cut(string(text), "Block devices:")
	var found inventory.Majors
	of := map[string]*int{
		"nvidia": &found.GPU, "nvidia-frontend": &found.GPU, "nvidia-uvm": &found.UVM, // a driver has one of the first two
		"nvidia-caps": &found.Caps, "nvidia-caps-imex-channels": &found.IMEX,
	}
	for line := range strings.Lines(characters) {
		number, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if major, err := strconv.Atoi(number); err == nil && of[name] != nil {
			*of[name] = major
		}
	}
	return found
}

// migMinors is the driver's table of the minors of MIG capabilities: "gpu0/gi1/ci2/access 21". It
// is the same as long as the driver is.
const migMinors = "proc/driver/nvidia-caps/mig-minors"

// instanceFolders are the folders of compute instances among the driver's capabilities: the driver
// makes them with the instances, and everybody may list them. A container runtime may put what
// there was at the container's start in their place.
const instanceFolders = "proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*"

// shownInstances lists the folders of the MIG instances that there are.
func shownInstances(root fs.FS) []string {
	found, _ := fs.Glob(root, instanceFolders) // the pattern is a good one
	return found
}

// capabilities returns the minors of the capabilities of a GPU instance and of a compute instance
// in it; 0 where the driver's table does not have them.
func (s *scanner) capabilities(gpuMinor, gi, ci int) (giCap, ciCap int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.minors == nil {
		s.minors = readMinors(s.root)
	}
	instance := fmt.Sprintf("gpu%d/gi%d/", gpuMinor, gi)
	return s.minors[instance+"access"], s.minors[fmt.Sprintf("%sci%d/access", instance, ci)]
}

// readMinors reads the driver's table; nil where there is none.
func readMinors(root fs.FS) map[string]int {
	table, err := fs.ReadFile(root, migMinors)
	if err != nil {
		return nil
	}
	minors := map[string]int{}
	for line := range strings.Lines(string(table)) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		if minor, err := strconv.Atoi(number); err == nil {
			minors[name] = minor
		}
	}
	return minors
}
