package nvidia_test

import (
	"io/fs"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// hiding is a root in which the open files of one process are those of somebody else.
type hiding struct{ fstest.MapFS }

func (h hiding) ReadDir(name string) ([]fs.DirEntry, error) {
	if name == "proc/5000009/fd" {
		return nil, fs.ErrPermission
	}
	return h.MapFS.ReadDir(name)
}

// TestClients reads control groups as they are named by systemd and cgroupfs, with control groups
// of both versions, and of static pods.
func TestClients(t *testing.T) {
	t.Parallel()
	const pod = "0f3e9d52-1c1b-4f0a-9c8e-5d1f6a7b8c9d"
	root := fstest.MapFS{}
	// The numbers are larger than those of processes, one of which is this one.
	process := func(pid, name, group string, opened ...string) {
		root["proc/"+pid+"/comm"] = &fstest.MapFile{Data: []byte(name + "\n")}
		root["proc/"+pid+"/cgroup"] = &fstest.MapFile{Data: []byte(group + "\n")}
		for i, path := range opened {
			root["proc/"+pid+"/fd/"+string(rune('0'+i))] = &fstest.MapFile{Data: []byte(path), Mode: fs.ModeSymlink}
		}
	}
	under := func(uid string) string { return strings.ReplaceAll(uid, "-", "_") }
	process("5000001", "init", "0::/init.scope", "/dev/null")
	process("5000002", "nv-hostengine", "0::/../../../kubepods-burstable.slice/kubepods-burstable-pod"+under(pod)+
		".slice/cri-containerd-a.scope",
		"/dev/nvidiactl", "/dev/nvidia1", "/dev/nvidia12")
	process("5000003", "dcgm-exporter", "12:pids:/kubepods/besteffort/pod"+pod+
		"/abc\n0::/system.slice/containerd.service", "/dev/nvidia1")
	process("5000004", "st\x1b]0;a\x07at\nic", "0::/kubepods/podaaaabbbbccccddddeeeeffff00001111/x", "/dev/nvidia1")
	process("5000005", "nvidia-persiste", "0::/../../../../system.slice/nvidia-persistenced.service", "/dev/nvidia1")
	process("5000006", "gpu-node-agent", "0::/kubepods/pod11111111-1111-1111-1111-111111111111/x", "/dev/nvidia1")
	process("self", "gpu-node-agent", "0::/kubepods/pod11111111-1111-1111-1111-111111111111/y", "/dev/nvidia1")
	process("5000007", "other", "0::/", "/dev/nvidia12", "/dev/nvidia10")
	process(strconv.Itoa(os.Getpid()), "nvidia.test", "0::/", "/dev/nvidia1")
	got, err := nvidia.Clients(root, 1)
	want := []inventory.DriverClient{
		{PID: 5000002, Name: "nv-hostengine", Pod: pod}, {PID: 5000003, Name: "dcgm-exporter", Pod: pod},
		{PID: 5000004, Name: "st]0;aat ic", Pod: "aaaabbbbccccddddeeeeffff00001111"},
		{PID: 5000005, Name: "nvidia-persiste"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	process("5000009", "hidden", "0::/", "/dev/nvidia1")
	if got, err := nvidia.Clients(hiding{root}, 1); len(got) != 4 || err == nil ||
		!strings.Contains(err.Error(), "the open files of 1 processes are hidden") {
		t.Errorf("with a process that is not shown: %v, %v", got, err)
	}
	if _, err := nvidia.Clients(fstest.MapFS{}, 1); err == nil {
		t.Error("a node without /proc has no clients")
	}
}

// unread is a root in which it is not shown where the open files of one process lead.
type unread struct{ fstest.MapFS }

func (l unread) ReadLink(name string) (string, error) {
	if strings.HasPrefix(name, "proc/5000002/fd/") {
		return "", fs.ErrPermission
	}
	return l.MapFS.ReadLink(name)
}

func TestClientsWhoseFilesAreNotShown(t *testing.T) {
	t.Parallel()
	open := &fstest.MapFile{Data: []byte("/dev/nvidia1"), Mode: fs.ModeSymlink}
	root := unread{fstest.MapFS{"proc/5000001/fd/3": open, "proc/5000002/fd/3": open, "proc/5000002/fd/4": open,
		"proc/5000003/fd/3": open}}
	got, err := nvidia.Clients(root, 1)
	if diff := cmp.Diff([]inventory.DriverClient{{PID: 5000001}, {PID: 5000003}}, got); diff != "" || err == nil ||
		!strings.Contains(err.Error(), "the open files of 1 processes") {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// TestClientsOfTheSimulator: what is injected is found.
func TestClientsOfTheSimulator(t *testing.T) {
	t.Parallel()
	p, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	node := simulator.New(p)
	t.Cleanup(node.Close)
	const pod = "0f3e9d52-1c1b-4f0a-9c8e-5d1f6a7b8c9d"
	if err := node.Inject(simulator.Fault{Kind: simulator.KindClients, GPU: "3",
		Clients: []string{pod, "host"}}); err != nil {
		t.Fatal(err)
	}
	for minor, want := range map[int][]inventory.DriverClient{
		2: nil, 3: {{PID: 300300, Name: "nv-hostengine", Pod: pod}, {PID: 300301, Name: "nv-hostengine"}},
	} {
		if got, err := nvidia.Clients(node.Root(), minor); err != nil || !cmp.Equal(want, got) {
			t.Errorf("GPU %d: %v, %v", minor, got, err)
		}
	}
}
