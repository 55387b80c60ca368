package daemon

import (
	"context"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime/debug"
	"strconv"
	"strings"

	"k8s.io/klog/v2"
)

// otherMemory is the memory outside of Go's runtime, in bytes: the code and the driver's library.
const otherMemory = 24 << 20

// limitMemory makes the runtime collect garbage more often near the container's memory limit, where
// the kernel would kill this process. An operator's GOMEMLIMIT has precedence.
func limitMemory(ctx context.Context, root fs.FS) {
	limit, limited := MemoryLimit(root)
	if !limited || os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	own := max(limit-otherMemory, limit/2)
	debug.SetMemoryLimit(own)
	klog.FromContext(ctx).V(2).Info("The container has a limit of memory", "bytes", limit, "own", own)
}

// MemoryLimit returns the lowest visible memory limit of this process's cgroups in bytes,
// for cgroups of version 1 and 2.
func MemoryLimit(root fs.FS) (limit int64, limited bool) {
	limit = math.MaxInt64
	own, _ := fs.ReadFile(root, "proc/self/cgroup") // without it, the root of a container's own namespace counts
	folders := map[string]string{"sys/fs/cgroup": "memory.max", "sys/fs/cgroup/memory": "memory.limit_in_bytes"}
	for line := range strings.Lines(string(own)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(parts) != 3:
		case parts[1] == "":
			addParents(folders, "sys/fs/cgroup", parts[2], "memory.max")
		case strings.Contains(","+parts[1]+",", ",memory,"):
			addParents(folders, "sys/fs/cgroup/memory", parts[2], "memory.limit_in_bytes")
		}
	}
	for folder, name := range folders {
		text, err := fs.ReadFile(root, path.Join(folder, name))
		if err != nil {
			continue
		}
		// Version 1 expresses no limit by a number beyond any machine.
		if bytes, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && bytes > 0 &&
			bytes < 1<<60 {
			limit, limited = min(limit, bytes), true
		}
	}
	return limit, limited
}

// addParents adds a cgroup and its parents, below their mount point.
func addParents(folders map[string]string, mount, cgroup, name string) {
	for at := path.Clean("/" + cgroup); at != "/"; at = path.Dir(at) {
		folders[path.Join(mount, at)] = name
	}
}
