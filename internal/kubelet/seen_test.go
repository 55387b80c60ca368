package kubelet_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// TestSeenContainers: the device nodes of containers are seen by their processes; a privileged one,
// one with the node's /dev and one of another PID namespace are hidden, and so is one of which this
// process may see nothing.
func TestSeenContainers(t *testing.T) {
	t.Parallel()
	const uid, other = "fc441736-117b-4514-bd97-131200757cde", "00000000-117b-4514-bd97-131200757cde"
	const unwanted = "11111111-117b-4514-bd97-131200757cde"
	root := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const pod = "cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podfc441736_117b_4514_bd97_131200757cde.slice/"
	const plain, mounted = "Name:\tx\nCapEff:\t00000000a80425fb\nx", "1 2 0:3 / /dev rw - tmpfs tmpfs rw\n"
	process := func(pid, status, mounts string, nodes ...string) {
		t.Helper()
		write("proc/"+pid+"/status", status)
		write("proc/"+pid+"/mountinfo", mounts)
		for _, node := range nodes {
			write("proc/"+pid+"/root/dev/"+node, "")
		}
	}
	write(pod+"cri-a.scope/cgroup.procs", "11\n12\n")
	process("11", plain, mounted, "null", "nvidia1", "nvidiactl", "nvidia-caps/nvidia-cap3")
	write(pod+"cri-b.scope/cgroup.procs", "")
	write(pod+"cri-b.scope/init.scope/cgroup.procs", "21\n")
	process("21", "Name:\tx\nCapEff:\t000001ffffffffff\n", mounted, "nvidia0")
	write(pod+"cri-c.scope/cgroup.procs", "31\n")
	process("31", plain, "1 2 0:3 / /dev rw,nosuid shared:2 - devtmpfs udev rw\n", "nvidia0")
	write(pod+"cri-d.scope/cgroup.procs", "0\n")
	write(pod+"cri-e.scope/cgroup.procs", "")
	write("cgroup/kubepods/besteffort/pod"+other+"/a/cgroup.procs", "41\n")
	write("cgroup/kubepods/besteffort/pod"+unwanted+"/a/cgroup.procs", "41\n")
	process("41", plain, mounted)
	write(pod+"cri-f.scope/cgroup.procs", "51\n") // a container can make any entries in its /dev
	process("51", plain, mounted, "nvidia2")
	for i := range 5000 {
		write(fmt.Sprintf("proc/51/root/dev/nvidia-%d", i), "")
	}
	write(pod+"cri-g.scope/cgroup.procs", "61\n")
	process("61", plain, mounted, "nvidia3")
	write("node/folder", "") // of this process, and no part of the container
	if err := os.Symlink(filepath.Join(root, "node"), filepath.Join(root, "proc/61/root/dev/nvidia-caps")); err != nil {
		t.Fatal(err)
	}
	write("cgroup/system.slice/a.service/cgroup.procs", "1\n")
	got, err := kubelet.SeenContainers(filepath.Join(root, "cgroup"), filepath.Join(root, "proc"),
		func(uid string) bool { return uid != unwanted })
	hidden := func(pod, name string) kubelet.SeenContainer {
		return kubelet.SeenContainer{Cgroup: filepath.Join(root, pod, name), Hidden: true}
	}
	want := map[string][]kubelet.SeenContainer{
		uid: {
			{Cgroup: filepath.Join(root, pod, "cri-a.scope"), Nodes: []string{"nvidia1", "nvidiactl",
				"nvidia-caps/nvidia-cap3"}},
			hidden(pod, "cri-b.scope"), hidden(pod, "cri-c.scope"), hidden(pod, "cri-d.scope"), hidden(pod,
				"cri-f.scope"), hidden(pod, "cri-g.scope"),
		},
		other: {hidden("cgroup/kubepods/besteffort/pod"+other, "a")},
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if _, err := kubelet.SeenContainers(filepath.Join(root, "none"), "/proc", nil); err == nil {
		t.Error("without cgroups: no error")
	}
}
