package nvidia_test

import (
	"io/fs"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

func TestControlNodesOfAllFolders(t *testing.T) {
	t.Parallel()
	root := fstest.MapFS{
		"dev/nvidiactl": {}, "dev/nvidia0": {}, "driver-root/dev/nvidia-uvm": {}, "elsewhere/dev/nvidia-modeset": {},
		"driver-root/dev/nvidia-caps-imex-channels/channel0": {},
	}
	for driverRoot, want := range map[string]inventory.ControlNodes{
		"": inventory.NodeControl, "/": inventory.NodeControl,
		"/driver-root": inventory.NodeControl | inventory.NodeUVM | inventory.NodeIMEXChannel0,
	} {
		compare(t, "nodes with the driver root "+driverRoot, want, scanWith(t, "t4", root, driverRoot).Control)
	}
}

// TestControlNodesThatCannotBeRead: a node is gone once it is seen to be gone, and not while nobody
// can tell.
func TestControlNodesThatCannotBeRead(t *testing.T) {
	t.Parallel()
	root := &disk{files: fstest.MapFS{"dev/nvidiactl": {}, "driver-root/dev/nvidia-uvm": {}, "dev/nvidia-modeset": {}}}
	s, err := nvidia.New(nvidia.Options{Library: newNode(t, "t4").NVML(), Root: root,
		DriverRoot: "/driver-root"}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all := inventory.NodeControl | inventory.NodeUVM | inventory.NodeModeset
	look := func(when string, want inventory.ControlNodes) {
		t.Helper()
		snapshot, err := s.Scan(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		compare(t, "nodes "+when, want, snapshot.Control)
	}
	look("at first", all)
	root.fails = "driver-root/"
	delete(root.files, "dev/nvidia-modeset")
	delete(root.files, "driver-root/dev/nvidia-uvm")
	look("while one folder cannot be read", all)
	root.fails = ""
	look("when it can be read again", inventory.NodeControl)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A disk has files, of which those in one folder may not be readable.
type disk struct {
	files fstest.MapFS
	fails string
}

func (d *disk) Open(name string) (fs.File, error) {
	if d.fails != "" && strings.HasPrefix(name, d.fails) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EIO}
	}
	return d.files.Open(name)
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
	const table = "proc/driver/nvidia-caps/mig-minors"
	// GPU instance 1
	device := func(root fs.FS) inventory.MIGDevice { return scanWith(t, divided, root, "").GPUs[0].MIGDevices[0] }
	for name, root := range map[string]fs.FS{
		"no table":    fstest.MapFS{},
		"other lines": fstest.MapFS{table: {Data: []byte("config 1\n\ngpu0/gi1/access x\ngpu1/gi1/access 12\n")}},
	} {
		if m := device(root); m.GICap != 0 || m.CICap != 0 {
			t.Errorf("%s: capabilities %d and %d", name, m.GICap, m.CICap)
		}
	}
	if m := device(fstest.MapFS{table: {Data: []byte(
		"gpu0/gi1/access 30\ngpu0/gi1/ci0/access 32\n")}}); m.GICap != 30 || m.CICap != 32 {
		t.Errorf("capabilities %d and %d, want 30 and 32", m.GICap, m.CICap)
	}
}
