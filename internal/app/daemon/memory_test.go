package daemon_test

import (
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
)

// TestMemoryLimit: the lowest limit of the process's own cgroups counts, inside and outside of
// containers, for both versions of cgroups.
func TestMemoryLimit(t *testing.T) {
	t.Parallel()
	const v1 = "9223372036854771712\n" // no limit
	for name, tt := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"nothing": {nil, 0},
		"container": {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "41943040\n"},
			40 << 20},
		"container, unlimited": {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 0},
		"host": {map[string]string{
			"proc/self/cgroup": "0::/kubepods.slice/pod1/c\n", "sys/fs/cgroup/kubepods.slice/memory.max": "1073741824\n",
			"sys/fs/cgroup/kubepods.slice/pod1/memory.max":   "67108864\n",
			"sys/fs/cgroup/kubepods.slice/pod1/c/memory.max": "max\n",
			"sys/fs/cgroup/kubepods.slice/pod2/memory.max":   "1000000\n",
		}, 64 << 20},
		"version 1": {map[string]string{
			"proc/self/cgroup": "5:cpu,cpuacct:/a\n3:memory:/kubepods/c\n" +
				"1:name=systemd:/x\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":            v1,
			"sys/fs/cgroup/memory/kubepods/c/memory.limit_in_bytes": "50331648\n",
		}, 48 << 20},
		"version 1, unlimited": {map[string]string{"sys/fs/cgroup/memory/memory.limit_in_bytes": v1}, 0},
		"garbage":              {map[string]string{"proc/self/cgroup": "x\n:::\n", "sys/fs/cgroup/memory.max": "-5\n"}, 0},
	} {
		root := fstest.MapFS{}
		for path, text := range tt.files {
			root[path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got, limited := daemon.MemoryLimit(root); limited != (tt.want > 0) || limited && got != tt.want {
			t.Errorf("%s: %d, %t, want %d", name, got, limited, tt.want)
		}
	}
}
