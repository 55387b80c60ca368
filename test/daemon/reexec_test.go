package daemon

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// The versions of the driver before and after it is replaced. The second one has a GPU more.
const (
	oldVersion, oldGPUs = "450.80.02", 2
	newVersion, newGPUs = "460.32.03", 3
)

// A driver is an installation of the driver below a root: a compiled library, and a file for the
// kernel module.
type driver struct {
	t    *testing.T
	root string
}

// installed returns a driver of the old version with so many GPUs, and the node of a daemon that
// uses it.
func installed(t *testing.T, gpus int) (driver, *stage) {
	t.Helper()
	d := driver{t, t.TempDir()}
	d.loadModule(oldVersion)
	d.installLibrary(oldVersion, gpus)
	n, err := node.Open(node.Setup{Daemon: binary, Args: []string{"--driver-root-ctr-path", d.root,
		"--fail-on-init-error=false"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log ends with:\n%s", n.Logged())
		}
		if err := n.Close(); err != nil {
			t.Errorf("end the node: %v", err)
		}
	})
	s := &stage{n, t}
	s.start()
	s.shows(gpus, gpus)
	return d, s
}

// loadModule puts a kernel module of a version in the place of the one before.
func (d driver) loadModule(version string) {
	d.t.Helper()
	if err := replace(d.module(), version); err != nil {
		d.t.Fatal(err)
	}
}

// hangs is a file: while it is there, no call about a GPU other than the first returns.
func (d driver) hangs() string { return filepath.Join(d.root, "hangs") }

func (d driver) module() string { return filepath.Join(d.root, "module") }

// installLibrary puts the library of a version where a distribution would, and takes away the one
// before.
func (d driver) installLibrary(version string, gpus int) {
	d.t.Helper()
	folder := filepath.Join(d.root, "usr", "lib64")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		d.t.Fatal(err)
	}
	name := "libnvidia-ml.so." + version
	output, err := exec.CommandContext(d.t.Context(), "gcc", "-shared", "-fPIC", "-o", filepath.Join(folder, name),
		fmt.Sprintf("-DVERSION=%q", version), fmt.Sprintf("-DGPUS=%d", gpus), fmt.Sprintf("-DMODULE=%q",
			d.module()), fmt.Sprintf("-DHANGS=%q", d.hangs()),
		"../../internal/gpu/nvidia/testdata/r450.c").CombinedOutput()
	if err != nil {
		d.t.Fatalf("compile a library: %v\n%s", err, output)
	}
	link := filepath.Join(folder, "libnvidia-ml.so.1")
	before, _ := os.Readlink(link) // none at first
	if err := os.Symlink(name, link+".new"); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Rename(link+".new", link); err != nil {
		d.t.Fatal(err)
	}
	if before == "" {
		return
	}
	if err := os.Remove(filepath.Join(folder, before)); err != nil {
		d.t.Fatal(err)
	}
}

// TestReexec: the driver is replaced by another version. The process, which is bound to the library
// that it loaded, makes place for one that is bound to the new one. A connection that says nothing,
// for which gRPC waits two minutes, does not hold it up.
func TestReexec(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(driver){
		"the library is replaced": func(d driver) {
			d.loadModule(newVersion)
			d.installLibrary(newVersion, newGPUs)
		},
		"the kernel module is another one before the library is": func(d driver) {
			d.loadModule(newVersion)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, s := installed(t, oldGPUs)
			s.connect()
			mark, daemon := s.Mark(), s.Running()
			replace(d)
			s.signal(daemon, syscall.SIGHUP) // or it would look half a minute later
			if name != "the library is replaced" {
				// and the process stays until another one is better off
				s.logs("the versions of the kernel module and the library differ")
				d.installLibrary(newVersion, newGPUs)
			}
			ended := s.next(mark, standin.StreamEnded)
			listed := s.next(s.next(mark, standin.Registered).Seq, standin.Listed) // the kubelet may see the end later
			s.shows(newGPUs, newGPUs)
			s.admit("work", newGPUs)
			select {
			case <-daemon.Ended():
				t.Errorf("the process ended: %v", daemon.Err())
			default: // the same one, another program in it
			}
			line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", daemon.Pid))
			if name, _, _ := strings.Cut(string(line), "\x00"); err != nil || name != s.Setup.Daemon {
				t.Errorf("the process is called %q, %v: config-manager would not find it, and it may be another program", name, err)
			}
			s.says("the driver is "+newVersion, func(now status) bool { return now.Driver == newVersion })
			if left := s.sockets(); len(left) != 1 {
				t.Errorf("sockets in kubelet's directory: %v", left)
			}
			without := listed.Time.Sub(ended.Time)
			t.Logf("kubelet was without the GPUs for %v", without)
			if without > 100*time.Second {
				t.Errorf("kubelet was without the GPUs for %v", without)
			}
		})
	}
}
