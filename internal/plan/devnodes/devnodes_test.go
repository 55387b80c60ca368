package devnodes_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/devnodes"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// host has these files below dev/.
func host(t *testing.T, names ...string) (container string) {
	t.Helper()
	container = t.TempDir()
	for _, name := range names {
		file := filepath.Join(container, "dev", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return container
}

// divided is a GPU with a MIG device, and a GPU without.
func divided() (inventory.Snapshot, resource.Plan) {
	s := inventory.Snapshot{
		Control: inventory.NodeControl | inventory.NodeUVM, Majors: inventory.Majors{GPU: 195, UVM: 510, Caps: 234},
		GPUs: []inventory.GPU{
			{UUID: "GPU-0", Health: inventory.Health{State: inventory.Healthy}},
			{UUID: "GPU-1", Index: 1, Minor: 1, MIG: inventory.MIGEnabled,
				Health: inventory.Health{State: inventory.Healthy},
				MIGDevices: []inventory.MIGDevice{
					{UUID: "MIG-1", GI: 1, Profile: "1g.10gb", GICap: 30, CICap: 31,
						Health: inventory.Health{State: inventory.Healthy}},
				}},
		},
	}
	return s, resource.New(s, resource.Options{MIG: resource.MIGMixed})
}

func specs(devRoot string) containeredits.Options {
	return containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}, DeviceNodes: true,
		DevRoot: devRoot}
}

// write is a mknod that writes what it was told into a file.
func write(name string, mode uint32, device int) error {
	return os.WriteFile(name, fmt.Appendf(nil, "%o %d:%d", mode&0o777, unix.Major(uint64(device)),
		unix.Minor(uint64(device))), 0o600)
}

// TestNodesAreMadeOnTheHost: kubelet gives containers the host's nodes. Those that it lacks are
// made there, where it can be seen.
func TestNodesAreMadeOnTheHost(t *testing.T) {
	t.Parallel()
	snapshot, plan := divided()
	for name, tt := range map[string]struct {
		driver, dev string // on the host
		has         []string
		below       string
		want        map[string]string
	}{
		"the host's root": {driver: "/", dev: "/", has: []string{"nvidiactl", "nvidia0", "nvidia1"},
			want: map[string]string{
				"nvidia-uvm": "666 510:0", "nvidia-uvm-tools": "666 510:1",
				"nvidia-caps/nvidia-cap30": "444 234:30", "nvidia-caps/nvidia-cap31": "444 234:31",
			}},
		"all are there": {driver: "/", dev: "/", has: []string{
			"nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps/nvidia-cap30",
			"nvidia-caps/nvidia-cap31",
		}},
		"that of a driver container": {driver: "/run/nvidia/driver", dev: "/run/nvidia/driver",
			has: []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia1",
				"nvidia-caps/nvidia-cap30"}, want: map[string]string{
				"nvidia0": "666 195:0", "nvidia-caps/nvidia-cap31": "444 234:31",
			}},
		"a folder that is not seen":       {driver: "/run/nvidia/driver", dev: "/", has: []string{"nvidiactl"}},
		"a folder of which nothing is it": {driver: "/", dev: "/", has: []string{"null"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			container := host(t, tt.has...)
			m := devnodes.Maker{Mknod: write}
			if err := m.Apply(devnodes.Roots{Driver: tt.driver, Container: container, Dev: tt.dev}, snapshot, plan,
				specs(tt.dev)); err != nil {
				t.Error(err)
			}
			made := map[string]string{}
			for _, folder := range []string{"", "nvidia-caps"} {
				entries, _ := os.ReadDir(filepath.Join(container, "dev", folder))
				for _, e := range entries {
					content, err := os.ReadFile(filepath.Join(container, "dev", folder, e.Name()))
					if err == nil && len(content) > 0 {
						made[filepath.Join(folder, e.Name())] = string(content)
					}
				}
			}
			if len(tt.want) == 0 {
				tt.want = map[string]string{}
			}
			if diff := cmp.Diff(tt.want, made); diff != "" {
				t.Errorf("made (-want +got):\n%s", diff)
			}
			if lacks := m.Lacks(plan, specs(tt.dev)); len(lacks) > 0 {
				t.Errorf("lacks %v", lacks)
			}
		})
	}
}

// TestNodesThatCannotBeMade: the devices that lack one are told, with what to do, and no others.
func TestNodesThatCannotBeMade(t *testing.T) {
	t.Parallel()
	snapshot, plan := divided()
	container := host(t, "nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "nvidia-uvm-tools")
	denied := true
	m := devnodes.Maker{Mknod: func(name string, mode uint32, device int) error {
		if denied {
			return syscall.EPERM
		}
		return write(name, mode, device)
	}}
	if lacks := m.Lacks(plan, specs("/")); len(lacks) != 2 {
		t.Errorf("lacks %v before anything was looked at", lacks)
	}
	roots := devnodes.Roots{Driver: "/", Container: container, Dev: "/"}
	if err := m.Apply(roots, snapshot, plan, specs("/")); err == nil {
		t.Error("no error")
	}
	lacks := m.Lacks(plan, specs("/"))
	if len(lacks) != 1 || !strings.Contains(lacks["MIG-1"], "mknod -m 444 /dev/nvidia-caps/nvidia-cap31 c 234 31") {
		t.Errorf("lacks %v", lacks)
	}
	denied = false
	if err := m.Apply(roots, snapshot, plan, specs("/")); err != nil || len(m.Lacks(plan, specs("/"))) > 0 {
		t.Errorf("%v, lacks %v", err, m.Lacks(plan, specs("/")))
	}
}

// TestNodesThatNobodyMakes: where the host's nodes are not seen, MIG devices that this program
// makes lack theirs, with what to do.
func TestNodesThatNobodyMakes(t *testing.T) {
	t.Parallel()
	snapshot, plan := divided()
	roots := devnodes.Roots{Driver: "/run/nvidia/driver", Container: host(t, "nvidiactl"), Dev: "/"}
	for _, roots.Divides = range []bool{false, true} {
		m := devnodes.Maker{Mknod: write}
		if err := m.Apply(roots, snapshot, plan, specs("/")); err != nil {
			t.Error(err)
		}
		lacks := m.Lacks(plan, specs("/"))
		if !roots.Divides && len(lacks) > 0 || roots.Divides &&
			(len(lacks) != 1 || !strings.Contains(lacks["MIG-1"], "hostDev")) {
			t.Errorf("this program divides GPUs: %v; lacks %v", roots.Divides, lacks)
		}
	}
}

// TestNodesOfADriverThatWasLoadedBefore: their majors were other ones; the nodes are created again.
func TestNodesOfADriverThatWasLoadedBefore(t *testing.T) {
	t.Parallel()
	snapshot, plan := divided()
	container := host(t, "nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "nvidia-uvm-tools",
		"nvidia-caps/nvidia-cap31")
	stale := filepath.Join(container, "dev/nvidia-caps/nvidia-cap30")
	if err := syscall.Mknod(stale, syscall.S_IFCHR|0o444, int(unix.Mkdev(233, 30))); err != nil {
		t.Skipf("NOT TESTED here: this user may not make device nodes: %v", err)
	}
	var m devnodes.Maker
	for range 2 {
		if err := m.Apply(devnodes.Roots{Driver: "/", Container: container, Dev: "/"}, snapshot, plan,
			specs("/")); err != nil {
			t.Fatal(err)
		}
		var stat syscall.Stat_t
		if err := syscall.Stat(stale, &stat); err != nil || stat.Rdev != unix.Mkdev(234, 30) ||
			stat.Mode != syscall.S_IFCHR|0o444 {
			t.Errorf("%+v, %v", stat, err)
		}
	}
}

// TestNodesOfAProcessThatWasKilled: it had made a node, and not yet put it in its place. The next
// process, which has the same process ID in its container, makes the node, also while a third one
// sweeps, and leaves nothing.
func TestNodesOfAProcessThatWasKilled(t *testing.T) {
	t.Parallel()
	snapshot, plan := divided()
	container := host(t, "nvidiactl", "nvidia1", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps/nvidia-cap30",
		"nvidia-caps/nvidia-cap31")
	var names []string
	killed, swept := false, false
	for range 3 { // the one that is killed, and two others
		m := devnodes.Maker{Mknod: func(name string, mode uint32, device int) error {
			if slices.Contains(names, name) {
				return syscall.EEXIST
			}
			names = append(names, name)
			err := write(name, mode, device)
			switch {
			case !killed:
				killed = true
				return errors.New("killed")
			case !swept:
				swept = true
				return os.Remove(name)
			}
			return err
		}}
		err := m.Apply(devnodes.Roots{Driver: "/", Container: container, Dev: "/"}, snapshot, plan, specs("/"))
		if (err != nil) != (len(names) == 1) {
			t.Errorf("after %d tries: %v", len(names), err)
		}
	}
	entries, err := os.ReadDir(filepath.Join(container, "dev"))
	if err != nil || len(names) != 3 {
		t.Errorf("%d tries, want 3: %v", len(names), err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			t.Errorf("%s is left", e.Name())
		}
	}
}
