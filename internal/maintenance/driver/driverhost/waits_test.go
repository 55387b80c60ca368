package driverhost_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

// A change waits for users of the driver, names them, and goes on when they are gone. The driver's own
// services are stopped, and started at the end.
func TestUsersOfTheDriver(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	const service = "nvidia-persistenced.service"
	n.kernel.Hold(900, "nvidia-persistenced", service)
	n.kernel.Hold(77, "train", "user.slice")
	n.kernel.Refresh()
	s := n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepUnloading, "in use by process train (77)")
	if len(s.Change.Holders) != 1 || s.Change.Holders[0].Release != "end the process: kill 77" {
		t.Errorf("holders: %+v", s.Change.Holders)
	}
	n.has(n.old)
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}) // is under way

	n.do(driverapi.CallCancel, driverapi.Arguments{})
	n.has(n.old)
	calls := "systemctl stop " + service + "\nsystemctl start " + service + "\n"
	if diff := cmp.Diff(calls, n.kernel.Calls()); diff != "" {
		t.Errorf("calls after the end of the change (-want +got):\n%s", diff)
	}
	n.kernel.Forget()
	n.kernel.Hold(900, "nvidia-persistenced", service)
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.start() // another process goes on
	n.isIn(driverapi.StepUnloading, "in use by process train (77)")
	n.kernel.Release(77)
	n.kernel.Refresh()
	n.drive()
	n.isIn(driverapi.StepUnproven, "")
	n.has(n.new)
	if got := n.kernel.Calls(); !strings.HasPrefix(got, "systemctl stop") || !strings.HasSuffix(got, "systemctl start "+
		service+"\n") {
		t.Errorf("calls: %s", got)
	}

	// The same users may be there when the change is taken back.
	n.kernel.Hold(77, "train", "user.slice")
	n.kernel.Refresh()
	n.do(driverapi.CallRevert, driverapi.Arguments{Reason: "no CUDA"})
	n.isIn(driverapi.StepReverting, "no CUDA; the driver is in use by process train (77)")
	n.has(n.new)
	n.boot() // ends them as well
	n.isIn(driverapi.StepFailed, "no CUDA")
	n.has(n.old)
}

// A process that has libcuda mapped and no device open uses the driver as well.
func TestProcessWithMappedLibrary(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.kernel.Map(77, "train")
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepUnloading, "in use by process train (77)")
	n.has(n.old)
	n.kernel.Release(77)
	n.drive()
	n.isIn(driverapi.StepUnproven, "")
	n.has(n.new)
}

// A process whose files do not answer in time may use the driver: the change waits for it.
func TestProcessThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.kernel.Map(77, "train")
	maps := filepath.Join(n.kernel.Root, "proc/77/maps")
	if err := errors.Join(os.Remove(maps), unix.Mkfifo(maps, 0o600)); err != nil { // nobody writes: who opens it waits
		t.Fatal(err)
	}
	if _, err := n.host.Call(t.Context(), driverapi.CallSwap, driverapi.Arguments{Digest: n.new}); err != nil {
		t.Fatal(err)
	}
	for n.status().Change.Step != driverapi.StepUnloading {
		n.host.Act(t.Context())
	}
	short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	n.host.Act(short)
	if short.Err() == nil {
		t.Error("the change did not wait for the process")
	}
	n.isIn(driverapi.StepUnloading, "1 of 2 processes could not be read in time")
	n.has(n.old)
	later, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n.host.Act(later)
	if later.Err() != nil {
		t.Error("the process that hangs is read by one goroutine after the other")
	}
	n.isIn(driverapi.StepUnloading, "1 of 2 processes could not be read in time")
	if holders := n.status().Change.Holders; len(holders) != 1 || holders[0].Name != "train (77)" ||
		!strings.HasPrefix(holders[0].Release, "end the process: kill 77") {
		t.Errorf("holders: %+v", holders)
	}
	writer, err := os.OpenFile(maps, os.O_RDWR, 0) // ends all waits
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	n.kernel.Release(77)
	n.drive()
	n.isIn(driverapi.StepUnproven, "")
	n.has(n.new)
}

// A hookedFiles is the root of a node whose file with a name is opened after a call of before.
type hookedFiles struct {
	fs.ReadLinkFS
	name   string
	before func() error
}

func (f hookedFiles) Open(name string) (fs.File, error) {
	if name == f.name {
		if err := f.before(); err != nil {
			return nil, err
		}
	}
	return f.ReadLinkFS.Open(name)
}

// reopen begins a new process of the host, which opens the file with a name after a call of before.
func (n *node) reopen(name string, before func() error) {
	n.Helper()
	n.stop()
	n.files = hookedFiles{os.DirFS(n.kernel.Root).(fs.ReadLinkFS), name, before}
	host, err := n.open()
	if err != nil {
		n.Fatal(err)
	}
	n.host = host
}

// Without the rights to see all processes of the node, the driver stays loaded.
func TestProcessesThatAreNotVisible(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.kernel.Map(77, "train")
	n.reopen("proc/77/maps", func() error { return fs.ErrPermission })
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepUnloading, "the open files of 1 of 2 processes could not be read")
	n.has(n.old)
	namespace := filepath.Join(n.kernel.Root, "proc/1/ns")
	err := errors.Join(os.Mkdir(namespace, 0o700), os.Symlink("pid:[4026532345]", filepath.Join(namespace, "pid")))
	if err != nil {
		t.Fatal(err)
	}
	n.kernel.Release(77)
	n.drive()
	n.isIn(driverapi.StepUnloading, "does not see the processes of the node")
	n.do(driverapi.CallCancel, driverapi.Arguments{})
	n.refused(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}, "does not see the processes of the node")
	n.has(n.old)
}

// A status is answered in time while a file system hangs, and a call that ends before the facts are read
// does not affect other calls.
func TestFilesThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	free := make(chan struct{})
	var opens atomic.Int64
	n.reopen("etc/os-release", func() error { opens.Add(1); <-free; return nil })
	call := func(name, digest string, limit time.Duration) (driverapi.Status, error) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		s, err := n.host.Call(ctx, name, driverapi.Arguments{Digest: digest})
		if ctx.Err() != nil && name == driverapi.CallStatus {
			t.Errorf("%s did not return in time", name)
		}
		return s, err
	}
	const still = "still reading the files of the node"
	if _, err := call(driverapi.CallStatus, "", 1500*time.Millisecond); err == nil || !strings.Contains(err.Error(), still) {
		t.Errorf("the first status: %v, want %q", err, still)
	}
	if _, err := call(driverapi.CallSwap, n.new, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), still) {
		t.Errorf("a change: %v, want %q", err, still)
	}
	close(free)
	poll.Until(t, "the facts", func() bool { _, err := call(driverapi.CallStatus, "", time.Minute); return err == nil })
	before := opens.Load()
	s, err := call(driverapi.CallSwap, n.new, time.Minute)
	if err != nil || s.Change == nil || opens.Load() != before {
		t.Errorf("the change: %+v, %v; the files were read again: %v", s.Change, err, opens.Load() != before)
	}
}

// A user that comes while modules are unloaded finds a whole driver.
func TestUserAtTheLastMoment(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.step = func(name string) {
		if name == "before unload nvidia" && n.kernel.Calls() == "unload nvidia_uvm\nunload nvidia_modeset\n" {
			n.kernel.Hold(77, "train", "user.slice") // the counts of /proc/modules are old
		}
	}
	n.start()
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepUnloading, "")
	n.has(n.old)
}

func TestNextBoot(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.kernel.Hold(77, "train", "user.slice")
	n.kernel.Refresh()
	n.do(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepNextBoot, "")
	n.has(n.old)
	n.start()
	n.has(n.old)
	n.kernel.Release(77)
	n.boot()
	n.isIn(driverapi.StepUnproven, "")
	n.has(n.new)
	n.do(driverapi.CallConfirm, driverapi.Arguments{})
	n.do(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.old})
	n.do(driverapi.CallCancel, driverapi.Arguments{})
	n.boot()
	n.has(n.new)
}

// A change that waits for users can be left to the next boot, and one that waits for a boot can be made
// now. The services run meanwhile.
func TestChangeThatIsLeftToTheNextBoot(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	const service = "nvidia-persistenced.service"
	n.kernel.Hold(900, "nvidia-persistenced", service)
	n.kernel.Hold(77, "train", "user.slice")
	n.kernel.Refresh()
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new, Note: "GPU-0"})
	n.isIn(driverapi.StepUnloading, "train (77)")
	n.refused(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.old}, "is under way, in the step unloading")
	n.do(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepNextBoot, "")
	n.has(n.old)
	if diff := cmp.Diff("systemctl stop "+service+"\nsystemctl start "+service+"\n", n.kernel.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if c := n.status().Change; c.Note != "GPU-0" || len(c.Holders) > 0 {
		t.Errorf("the change is %+v", c)
	}
	n.do(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.new}) // waits already
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.isIn(driverapi.StepUnloading, "train (77)")
	n.do(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.new})
	n.kernel.Release(77)
	n.boot()
	n.isIn(driverapi.StepUnproven, "")
	n.has(n.new)
}

// A node that restarts again and again before the new driver is confirmed comes back with the old one.
func TestNodeThatRestartsAgainAndAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
	n.boot()
	n.isIn(driverapi.StepUnproven, "")
	n.has(n.new)
	n.boot()
	n.isIn(driverapi.StepFailed, "the node has loaded the driver 2 times")
	n.has(n.old)
	n.boot()
	n.has(n.old)
}

// A driver that cannot be loaded at a boot does not keep the node from getting another one.
func TestKernelWithoutModules(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	other := standinkernel.Driver(t, n.sources, "other", "575.1.1", "5.15.0-1")
	n.withOld()
	n.refused(driverapi.CallSwap, driverapi.Arguments{Digest: other}, "driver 575.1.1 has no modules for the kernel "+
		standinkernel.Release+"; it has those for: 5.15.0-1")
	if problem := n.status().Folders[1].Problem; !strings.Contains(problem, "has no modules for the kernel") {
		t.Errorf("the folder's problem is %q", problem)
	}
	// The next boot may start another kernel.
	grub := filepath.Join(n.kernel.Root, "boot/vmlinuz")
	if err := os.Symlink("vmlinuz-5.15.0-1", grub); err != nil {
		t.Fatal(err)
	}
	n.refused(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.new}, "has no modules for the kernel 5.15.0-1")
	n.do(driverapi.CallNextBoot, driverapi.Arguments{Digest: other})
	n.isIn(driverapi.StepNextBoot, "")
	n.boot() // it does not
	n.isIn(driverapi.StepFailed, "has no modules for the kernel "+standinkernel.Release)
	n.has(n.old)
	n.do(driverapi.CallCancel, driverapi.Arguments{})

	n.kernel.Refuse("nvidia="+oldVersion, unix.ENOEXEC)
	n.boot()
	s := n.status()
	if s.LoadedVersion != "" || !strings.Contains(s.Folders[0].Problem, "it was built for another kernel") {
		t.Errorf("a kernel that refuses the driver: %+v", s)
	}
	n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.old}) // once more
	n.isIn(driverapi.StepFailed, "it was built for another kernel")
	if s := n.status(); s.Current != n.old {
		t.Errorf("the next boot loads %q, want the same driver", s.Current)
	}
	n.do(driverapi.CallCancel, driverapi.Arguments{})
	n.swap(n.new)
	n.has(n.new)
}

func TestOwnersOfTheDriver(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		file, content, want string
	}{
		"packages": {"var/lib/dpkg/status", "Package: nvidia-driver-570\nStatus: install ok installed\nVersion: 570.86.15-1\n\n",
			"the driver of this node belongs to dpkg packages (/var/lib/dpkg/status: nvidia-driver-570)"},
		"operator": {"run/nvidia/driver/usr/bin/nvidia-smi", "", "belongs to the GPU operator's driver container"},
		"a module that the next boot loads": {"lib/modules/" + standinkernel.Release + "/updates/nvidia.ko", "",
			"the node has a driver of its own"},
		"another driver": {"proc/modules", "nvidia 1000 0 - Live 0x0\n", "gpu-driver has not loaded it"},
		"nouveau":        {"proc/modules", "nouveau 1000 0 - Live 0x0\n", "nouveau is loaded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			file := filepath.Join(n.kernel.Root, tt.file)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(tt.content), 0o600); err != nil {
				t.Fatal(err)
			}
			n.start()
			n.refused(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}, tt.want)
			if s := n.status(); len(s.Refusals) == 0 || !strings.Contains(s.Refusals[0], tt.want) || s.Change != nil {
				t.Errorf("status: %+v", s)
			}
			if got := n.kernel.Calls(); got != "" {
				t.Errorf("it has changed the node: %s", got)
			}
		})
	}
}

// Without its journal, the program does not know what it has loaded, until the node restarts.
func TestDamagedJournal(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.stop()
	journal := filepath.Join(n.directory, "change.json")
	if err := os.WriteFile(journal, []byte(`{"version": 1, "change": {"step": `), 0o600); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.refused(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}, "gpu-driver has not loaded it")
	if got := n.kernel.Calls(); got != "" {
		t.Errorf("it has changed the node: %s", got)
	}
	if _, err := os.Stat(journal + ".damaged"); err != nil {
		t.Errorf("the damaged journal is not set aside: %v", err)
	}
	n.boot()
	n.has(n.old)
	n.swap(n.new)
	n.has(n.new)
	n.stop()
	if err := os.RemoveAll(filepath.Join(n.directory, n.new)); err != nil {
		t.Fatal(err)
	}
	n.boot()
	if s := n.status(); s.LoadedVersion != "" || s.Current != n.new {
		t.Errorf("without the folder of the link: %+v", s)
	}
	n.swap(n.new) // the sources have it
	n.has(n.new)
}

func TestPlaceWithoutAChange(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	n.refused(driverapi.CallPlace, driverapi.Arguments{Digest: strings.Repeat("0", 64)}, "no driver folder has the digest")
	n.refused(driverapi.CallPlace, driverapi.Arguments{Digest: "../../etc"}, "is not a SHA-256 digest")
	library := filepath.Join(n.sources, "new/usr/lib/libcuda.so."+newVersion)
	content, err := os.ReadFile(library)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(library, []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := n.do(driverapi.CallPlace, driverapi.Arguments{Digest: n.new})
	if f := s.Folders[1]; f.IsHere || !strings.Contains(f.Problem, "is not the file that was packed") {
		t.Errorf("a folder that differs from its manifest: %+v", f)
	}
	if err := os.WriteFile(library, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if f := n.do(driverapi.CallPlace, driverapi.Arguments{Digest: n.new}).Folders[1]; !f.IsHere || f.Problem != "" {
		t.Errorf("after the repair: %+v", f)
	}
	n.has(n.old)
}
