package kubelet

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// PodCgroups is where the deployments mount the node's /sys/fs/cgroup for PodRuns.
const PodCgroups = "/host/sys/fs/cgroup"

// cgroupDepth is how deep cgroups of pods are looked for: such as
// kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<UID>.slice, below the cgroup that
// the kubelet is configured with.
const cgroupDepth = 5

// podCgroup is the name of a pod's cgroup, as the kubelet's cgroupfs and systemd drivers form it.
var podCgroup = regexp.MustCompile(`pod[0-9a-f]{8}[-_]`)

// PodRuns reports whether the pod has a process, by the pod's cgroup. The folder cgroups is
// the node's /sys/fs/cgroup, version 1 or 2. PodRuns returns false if the folder or the
// cgroup is missing, because a missing cgroup is no evidence.
func PodRuns(cgroups, uid string) bool {
	root := cgroups
	if info, err := os.Stat(filepath.Join(cgroups, "pids")); err == nil && info.IsDir() {
		root = filepath.Join(cgroups, "pids") // version 1
	}
	runs := false
	// a cgroup removed during the walk is no evidence
	_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil
		}
		name := entry.Name()
		if strings.Contains(name, "pod"+uid) || strings.Contains(name, "pod"+strings.ReplaceAll(uid, "-", "_")) {
			text, _ := os.ReadFile(filepath.Join(path, "pids.current"))
			n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
			runs = n > 0
			return fs.SkipAll
		}
		if below, err := filepath.Rel(root, path); err != nil || podCgroup.MatchString(name) ||
			strings.Count(below, "/") >= cgroupDepth-1 {
			return fs.SkipDir
		}
		return nil
	})
	return runs
}
