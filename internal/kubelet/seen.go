package kubelet

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// A SeenContainer is a container of a pod, by its processes.
type SeenContainer struct {
	// Cgroup is the folder of the container's cgroup.
	Cgroup string
	// Nodes are the container's NVIDIA device nodes, by their names below /dev, such as
	// nvidia0 and nvidia-caps/nvidia-cap3.
	Nodes []string
	// Hidden says that the container's device nodes are not visible, or belong to the node:
	// the processes are in another PID namespace, this process lacks the rights, the
	// container is privileged, or its /dev has a link or too many entries.
	Hidden bool
}

// podUID is the UID in the name of a pod's cgroup.
var podUID = regexp.MustCompile(`pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})`)

// SeenContainers returns the containers of the wanted pods, by the UID of the pod. Cgroups
// is the node's /sys/fs/cgroup, of version 2, and proc its /proc. The error says why no pod
// is visible. SeenContainers reads a few files for each container.
func SeenContainers(cgroups, proc string, wanted func(uid string) bool) (map[string][]SeenContainer, error) {
	if _, err := os.ReadDir(cgroups); err != nil {
		return nil, err
	}
	all := map[string][]SeenContainer{}
	// a pod removed during the walk has no containers
	_ = filepath.WalkDir(cgroups, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil
		}
		if found := podUID.FindStringSubmatch(entry.Name()); found != nil {
			if uid := strings.ReplaceAll(found[1], "_", "-"); wanted(uid) {
				all[uid] = seenContainers(path, proc)
			}
			return fs.SkipDir
		}
		if below, err := filepath.Rel(cgroups, path); err != nil || strings.Count(below, "/") >= cgroupDepth-1 {
			return fs.SkipDir
		}
		return nil
	})
	return all, nil
}

// seenContainers returns the containers of a pod. Their cgroups are below the cgroup of the
// pod.
func seenContainers(pod, proc string) (all []SeenContainer) {
	entries, _ := os.ReadDir(pod)
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		cgroup := filepath.Join(pod, e.Name())
		if pid, runs := firstProcess(cgroup); runs {
			c := seenContainer(filepath.Join(proc, strconv.Itoa(pid)))
			c.Cgroup = cgroup
			all = append(all, c)
		}
	}
	return all
}

// firstProcess returns a process of a cgroup or of a cgroup below; 0 for a process of
// another PID namespace.
func firstProcess(cgroup string) (pid int, runs bool) {
	_ = filepath.WalkDir(cgroup, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil
		}
		text, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if first := strings.Fields(string(text)); len(first) > 0 {
			pid, _ = strconv.Atoi(first[0])
			runs = true
			return fs.SkipAll
		}
		return nil
	})
	return pid, runs
}

// capSysAdmin is the bit of the capability that privileged containers have: they see all devices of
// the node.
const capSysAdmin = 21

// seenContainer returns the view of a container's process. The view of an ended process is
// hidden.
func seenContainer(process string) SeenContainer {
	status, err := os.ReadFile(filepath.Join(process, "status"))
	_, rest, _ := strings.Cut(string(status), "\nCapEff:")
	line, _, _ := strings.Cut(rest, "\n")
	effective, problem := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	mounts, unread := os.ReadFile(filepath.Join(process, "mountinfo"))
	if err != nil || problem != nil || unread != nil || effective&(1<<capSysAdmin) != 0 || hasNodesDev(string(mounts)) {
		return SeenContainer{Hidden: true}
	}
	dev := filepath.Join(process, "root", "dev")
	entries, err := readFolder(dev)
	capabilities, failed := readFolder(filepath.Join(dev, "nvidia-caps"))
	if err != nil || failed != nil && !errors.Is(failed, fs.ErrNotExist) {
		return SeenContainer{Hidden: true}
	}
	var seen SeenContainer
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "nvidia") && !e.IsDir() {
			seen.Nodes = append(seen.Nodes, e.Name())
		}
	}
	for _, e := range capabilities {
		seen.Nodes = append(seen.Nodes, "nvidia-caps/"+e.Name())
	}
	return seen
}

// maxEntries is how many entries of a folder of a container are read. The container can make any
// number of them.
const maxEntries = 4096

// readFolder returns the entries of a folder of a container, by name. It fails for more than
// maxEntries, and for a link, because a link would lead to a folder of this process.
func readFolder(path string) ([]fs.DirEntry, error) {
	folder, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	entries, err := folder.ReadDir(maxEntries + 1)
	switch {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err == nil && len(entries) > maxEntries:
		err = fmt.Errorf("%s has more than %d entries", path, maxEntries)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, err
}

// hasNodesDev reports whether the /dev of a container is the node's /dev, by the container's
// mountinfo.
func hasNodesDev(mountinfo string) bool {
	for line := range strings.Lines(mountinfo) {
		before, after, _ := strings.Cut(line, " - ")
		if at := strings.Fields(before); len(at) > 4 && at[4] == "/dev" && strings.HasPrefix(after, "devtmpfs ") {
			return true
		}
	}
	return false
}
