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

// devFolders returns the directories below the root of the file system for the driver's device
// nodes: those of this container, and those in the root of a driver container.
func devFolders(driverRoot string) []string {
	folders := []string{"dev"}
	if below := strings.TrimPrefix(path.Join(driverRoot, "dev"), "/"); below != "dev" {
		folders = append(folders, below)
	}
	return folders
}

// controlNodes returns the driver's device nodes in any of the directories. For unreadable
// directories it returns the last known nodes.
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

// majors reads the major numbers of the driver's device nodes. An unreadable number keeps its last
// value.
func majors(root fs.FS, last inventory.Majors) inventory.Majors {
	text, err := fs.ReadFile(root, "proc/devices")
	if err != nil {
		return last
	}
	characters, _, _ := strings.Cut(string(text), "Block devices:")
	var found inventory.Majors
	of := map[string]*int{
		// A driver has either nvidia or nvidia-frontend.
		"nvidia": &found.GPU, "nvidia-frontend": &found.GPU, "nvidia-uvm": &found.UVM,
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
// changes only with the driver.
const migMinors = "proc/driver/nvidia-caps/mig-minors"

// instanceFolders are the directories of compute instances among the driver's capabilities. The
// driver creates them with the instances, and every process may list them. Instead, a container
// runtime may mount the state at the start of the container.
const instanceFolders = "proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*"

// listInstances lists the directories of the existing MIG instances.
func listInstances(root fs.FS) []string {
	found, _ := fs.Glob(root, instanceFolders) // the pattern is valid
	return found
}

// capabilities returns the minors of the capabilities of a GPU instance and a compute instance in
// it; 0 if missing from the driver's table.
func (s *scanner) capabilities(gpuMinor, gi, ci int) (giCap, ciCap int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.minors == nil {
		s.minors = readMinors(s.root)
	}
	instance := fmt.Sprintf("gpu%d/gi%d/", gpuMinor, gi)
	return s.minors[instance+"access"], s.minors[fmt.Sprintf("%sci%d/access", instance, ci)]
}

// readMinors reads the driver's table; nil without one.
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
