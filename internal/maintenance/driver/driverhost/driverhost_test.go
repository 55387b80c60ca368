package driverhost_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverhost"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

const (
	oldVersion = "570.86.15"
	newVersion = "580.95.05"
)

// TestMain keeps the folders in memory, because each change is synced, and the log out of the output.
func TestMain(m *testing.M) {
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		_ = os.Setenv("TMPDIR", "/dev/shm")
	}
	klog.SetLogger(logr.Discard())
	m.Run()
}

// A node is a node with two drivers among the sources.
type node struct {
	*testing.T
	kernel             *standinkernel.Kernel
	directory, sources string
	old, new           string // digests
	host               *driverhost.Host
	step               func(string)
	files              fs.FS // of the root, as the host sees it; nil for that of the kernel
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{T: t, kernel: standinkernel.New(t), sources: t.TempDir()}
	n.directory = filepath.Join(n.kernel.Root, "var/lib/gpu-device-plugin/driver")
	n.old = standinkernel.Driver(t, n.sources, "old", oldVersion, standinkernel.Release)
	n.new = standinkernel.Driver(t, n.sources, "new", newVersion, standinkernel.Release)
	t.Cleanup(n.stop)
	return n
}

// stop ends the process of the host.
func (n *node) stop() {
	if n.host != nil {
		n.host.Close()
		n.host = nil
	}
}

// start begins a new process of the host, and lets it act until it waits.
func (n *node) start() {
	n.Helper()
	n.stop()
	host, err := n.open()
	if err != nil {
		n.Fatal(err)
	}
	n.host = host
	n.status() // before the first act
	n.drive()
}

// open returns a new host.
func (n *node) open() (*driverhost.Host, error) {
	return driverhost.New(driverhost.Options{
		Directory: n.directory, Sources: n.sources, Pause: time.Second, Step: n.step,
		Kernel: &driverkernel.Kernel{Root: n.kernel.Root, RootFS: n.files, Calls: n.kernel},
	})
}

// drive lets the host act until it waits.
func (n *node) drive() {
	for n.host.Act(n.Context()) < time.Second {
	}
}

// boot restarts the node.
func (n *node) boot() {
	n.Helper()
	n.stop()
	n.kernel.Boot()
	n.start()
}

// do makes a call, and lets the host act until it waits.
func (n *node) do(call string, a driverapi.Arguments) driverapi.Status {
	n.Helper()
	if _, err := n.host.Call(n.Context(), call, a); err != nil {
		n.Fatalf("%s: %v", call, err)
	}
	n.drive()
	return n.status()
}

func (n *node) refused(call string, a driverapi.Arguments, want string) {
	n.Helper()
	if _, err := n.host.Call(n.Context(), call, a); err == nil || !strings.Contains(err.Error(), want) {
		n.Errorf("%s: %v, want %s", call, err, want)
	}
	n.drive()
}

func (n *node) status() driverapi.Status {
	n.Helper()
	s, err := n.host.Call(n.Context(), driverapi.CallStatus, driverapi.Arguments{})
	if err != nil {
		n.Fatal(err)
	}
	c := s.Change
	rests := c == nil || c.Step == driverapi.StepNextBoot || c.Step == driverapi.StepFailed
	info, err := os.Stat(filepath.Join(n.directory, driverapi.Journal))
	isFull := err == nil && info.IsDir() // TestFullDiskAtEachWrite
	if !isFull && driverapi.IsUnderWay(n.directory, s.BootID) == rests {
		n.Errorf("the journal says otherwise than the change %+v", c)
	}
	return s
}

// withOld makes the old driver the node's driver.
func (n *node) withOld() *node {
	n.Helper()
	n.start()
	n.swap(n.old)
	n.kernel.Forget()
	return n
}

// swap changes the driver and confirms it.
func (n *node) swap(digest string) {
	n.Helper()
	if s := n.do(driverapi.CallSwap, driverapi.Arguments{Digest: digest}); s.Change == nil ||
		s.Change.Step != driverapi.StepUnproven {
		n.Fatalf("the change is %+v, refusals %v", s.Change, s.Refusals)
	}
	n.do(driverapi.CallConfirm, driverapi.Arguments{Digest: digest})
}

// has fails the test unless the node has exactly one whole driver: modules, link and device nodes.
func (n *node) has(digest string) {
	n.Helper()
	version := map[string]string{n.old: oldVersion, n.new: newVersion}[digest]
	want := []string{"nvidia=" + version, "nvidia_uvm=" + version, "nvidia_modeset=" + version}
	if diff := cmp.Diff(want, n.kernel.Modules()); diff != "" {
		n.Errorf("modules (-want +got):\n%s", diff)
	}
	s := n.status()
	if s.Current != digest || s.LoadedDigest != digest || s.LoadedVersion != version {
		n.Errorf("loaded %s of %.6s, the next boot loads %.6s; want %s of %.6s", s.LoadedVersion, s.LoadedDigest,
			s.Current, version, digest)
	}
	for name, number := range map[string]string{"nvidiactl": "195:255", "nvidia0": "195:0", "nvidia-uvm": "500:0",
		"nvidia-uvm-tools": "500:1", "nvidia-modeset": "195:254"} {
		if text, err := os.ReadFile(filepath.Join(n.kernel.Root, "dev", name)); err != nil || string(text) != number {
			n.Errorf("/dev/%s is %s (%v), want %s", name, text, err, number)
		}
	}
	firmware, _ := os.ReadFile(filepath.Join(n.kernel.Root, "sys/module/firmware_class/parameters/path"))
	if want := filepath.Join(n.directory, digest, "lib/firmware"); string(firmware) != want {
		n.Errorf("firmware is in %s, want %s", firmware, want)
	}
}

// isIn fails the test unless the change is in a step.
func (n *node) isIn(step driverapi.Step, reason string) {
	n.Helper()
	c := n.status().Change
	if c == nil || c.Step != step || !strings.Contains(c.Reason, reason) || reason == "" && c.Reason != "" {
		n.Errorf("the change is %+v, want %s because of %q", c, step, reason)
	}
}

func TestFirstDriverAndBoots(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start()
	if s := n.status(); s.LoadedVersion != "" || s.Current != "" || len(s.Folders) != 2 || len(s.Refusals) > 0 ||
		s.Folders[0].Version != oldVersion || s.Folders[0].IsHere || s.Folders[0].Problem != "" {
		t.Fatalf("a bare node: %+v", s)
	}
	n.swap(n.old)
	n.has(n.old)
	want := "load nvidia 570.86.15\nload nvidia_uvm 570.86.15\nload nvidia_modeset 570.86.15\n"
	if diff := cmp.Diff(want, n.kernel.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	n.start() // a restart of the process changes nothing
	n.boot()
	n.has(n.old)
	if diff := cmp.Diff(want+want, n.kernel.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestSwap(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepUnproven, "")
	n.has(n.new)
	want := "unload nvidia_uvm\nunload nvidia_modeset\nunload nvidia\n" +
		"load nvidia 580.95.05\nload nvidia_uvm 580.95.05\nload nvidia_modeset 580.95.05\n"
	if diff := cmp.Diff(want, n.kernel.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}) // is done
	n.refused(driverapi.CallSwap, driverapi.Arguments{Digest: n.old}, "is under way, in the step unproven")
	n.refused(driverapi.CallCancel, driverapi.Arguments{}, "use `gpu-driver revert`")
	n.refused(driverapi.CallConfirm, driverapi.Arguments{Digest: n.old}, "the change is one to "+n.new[:12])
	n.do(driverapi.CallConfirm, driverapi.Arguments{Digest: n.new})
	n.do(driverapi.CallConfirm, driverapi.Arguments{Digest: n.new}) // is done
	n.boot()
	n.has(n.new)
	if s := n.status(); s.Change != nil || !s.Folders[0].IsHere || !s.Folders[1].IsHere {
		t.Errorf("after the change: %+v", s)
	}
}

func TestRevert(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.do(driverapi.CallRevert, driverapi.Arguments{Reason: "CUDA error 999"})
	n.isIn(driverapi.StepFailed, "CUDA error 999")
	n.has(n.old)
	n.boot()
	n.isIn(driverapi.StepFailed, "CUDA error 999")
	n.has(n.old)
	n.refused(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}, "has failed: CUDA error 999; `gpu-driver cancel`")
	n.do(driverapi.CallCancel, driverapi.Arguments{})
	n.swap(n.new)
	n.has(n.new)
}

// The former driver is loaded again if the kernel refuses the new one.
func TestModulesThatTheKernelRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		module string
		errno  unix.Errno
		want   string
	}{
		{"nvidia", unix.ENODEV, "refuses the module nvidia: the driver found no GPU that it supports"},
		{"nvidia", unix.EKEYREJECTED, "it demands signed modules, and knows no key"},
		{"nvidia_uvm", unix.ENOEXEC, "it was built for another kernel"},
	} {
		n := newNode(t).withOld()
		n.kernel.Refuse(tt.module+"="+newVersion, tt.errno)
		n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
		n.isIn(driverapi.StepFailed, tt.want)
		n.has(n.old)
	}
	n := newNode(t).withOld()
	n.kernel.Refuse("nvidia_modeset="+newVersion, unix.EINVAL) // CUDA does not need it
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepUnproven, "")
}

func TestTwoHosts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start()
	if _, err := n.open(); err == nil || !strings.Contains(err.Error(), "another instance has the lock") {
		t.Errorf("a second host: %v", err)
	}
}
