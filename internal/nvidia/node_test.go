package nvidia

import (
	"io/fs"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

func TestControlNodesOfAllFolders(t *testing.T) {
	t.Parallel()
	root := fstest.MapFS{
		"dev/nvidiactl": {}, "dev/nvidia0": {}, "driver-root/dev/nvidia-uvm": {}, "elsewhere/dev/nvidia-modeset": {},
		"driver-root/dev/nvidia-caps-imex-channels/channel0": {},
	}
	for _, tt := range []struct {
		driverRoot string
		want       inventory.ControlNodes
	}{
		{"", inventory.NodeControl},
		{"/", inventory.NodeControl},
		{"/driver-root", inventory.NodeControl | inventory.NodeUVM | inventory.NodeIMEXChannel0},
	} {
		if got := controlNodes(root, devFolders(tt.driverRoot), inventory.NodeGDRCopy); got != tt.want {
			t.Errorf("driver root %q: nodes %b, want %b", tt.driverRoot, got, tt.want)
		}
	}
}

// TestControlNodesThatCannotBeRead: a node is gone once it is seen to be gone, and not while nobody can tell.
func TestControlNodesThatCannotBeRead(t *testing.T) {
	t.Parallel()
	const before = inventory.NodeControl | inventory.NodeUVM
	root := unreadable{fstest.MapFS{"dev/nvidiactl": {}, "driver-root/dev/nvidia-modeset": {}}, "driver-root/"}
	if got := controlNodes(root, devFolders("/driver-root"), before); got != before {
		t.Errorf("nodes %b, want %b", got, before)
	}
}

// In an unreadable file system, nothing below one folder can be looked at.
type unreadable struct {
	fstest.MapFS
	folder string
}

func (u unreadable) Stat(name string) (fs.FileInfo, error) {
	if strings.HasPrefix(name, u.folder) {
		return nil, &fs.PathError{Op: "stat", Path: name, Err: syscall.EIO}
	}
	return u.MapFS.Stat(name)
}

func TestCapabilitiesOfMIGDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed")
	snapshot := r.scan()
	if snapshot.Control != inventory.NodeControl|inventory.NodeUVM|inventory.NodeUVMTools|inventory.NodeModeset {
		t.Errorf("control nodes %b", snapshot.Control)
	}
	seen := map[int]bool{}
	for _, g := range snapshot.GPUs {
		for _, m := range g.MIGDevices {
			if m.GICap < 3 || m.CICap <= m.GICap || seen[m.CICap] {
				t.Errorf("MIG device %d:%d: capabilities %d and %d", g.Index, m.Index, m.GICap, m.CICap)
			}
			seen[m.CICap] = true
		}
	}
	if len(seen) == 0 {
		t.Fatal("no MIG devices")
	}
}

func TestCapabilitiesThatTheDriverDoesNotTell(t *testing.T) {
	t.Parallel()
	for name, root := range map[string]fs.FS{
		"no table":    fstest.MapFS{},
		"other lines": fstest.MapFS{migMinors: {Data: []byte("config 1\n\ngpu0/gi1/access x\ngpu1/gi1/access 12\n")}},
	} {
		s := &scanner{root: root}
		if gi, ci := s.capabilities(0, 1, 0); gi != 0 || ci != 0 {
			t.Errorf("%s: capabilities %d and %d", name, gi, ci)
		}
	}
	s := &scanner{root: fstest.MapFS{migMinors: {Data: []byte("gpu3/gi2/access 30\ngpu3/gi2/ci1/access 32\n")}}}
	if gi, ci := s.capabilities(3, 2, 1); gi != 30 || ci != 32 {
		t.Errorf("capabilities %d and %d, want 30 and 32", gi, ci)
	}
}
