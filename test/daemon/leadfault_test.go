package daemon

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// A disk is a small file system that only the processes of its mount namespace have. It ends with
// the test.
type disk struct {
	t   *testing.T
	pid string // of the process that has the namespace
	at  string
}

// newDisk mounts a disk at a folder, and its folder lead where the processes of the node meet.
func (c *claimable) newDisk(at string) *disk {
	c.t.Helper()
	if os.Geteuid() != 0 {
		c.t.Skip("only root may mount a file system: as root, this test has the disk of two processes fail")
	}
	mounts := `mkdir -p "$0" "$1" && mount -t tmpfs -o size=8m none "$0" && mkdir "$0/lead" && mount --bind "$0/lead" "$1" && echo mounted && read -r _`
	holder := exec.CommandContext(c.t.Context(), "unshare", "--mount", "sh", "-c", mounts, at,
		filepath.Join(filepath.Dir(c.Socket()), "gpu-device-plugin"))
	in, err := holder.StdinPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	out, err := holder.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = in.Close(); _ = holder.Wait() })
	if said, err := bufio.NewReader(out).ReadString('\n'); err != nil || said != "mounted\n" {
		c.t.Fatalf("mount a disk: %q, %v", said, err)
	}
	d := &disk{c.t, fmt.Sprint(holder.Process.Pid), at}
	c.Daemon = filepath.Join(c.t.TempDir(), "within-"+d.pid)
	if err := os.Symlink(within, c.Daemon); err != nil {
		c.t.Fatal(err)
	}
	return d
}

// fill writes until the disk is full, and returns what makes room again.
func (d *disk) fill() (heal func()) {
	d.t.Helper()
	path := filepath.Join("/proc", d.pid, "root", d.at, "full")
	f, err := os.Create(path)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.Copy(f, io.LimitReader(zeros{}, 1<<30)); !errors.Is(err, syscall.ENOSPC) {
		d.t.Fatalf("the disk is not full: %v", err)
	}
	return func() { _ = os.Remove(path) }
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// readOnly has nobody make or open a file of the disk to write it, where the processes meet
// excepted, and returns what ends that.
func (d *disk) readOnly() (heal func()) {
	d.t.Helper()
	do := func(commands string) {
		output, err := exec.Command("nsenter", "--mount=/proc/"+d.pid+"/ns/mnt", "sh", "-c", commands, d.at).CombinedOutput()
		if err != nil {
			d.t.Errorf("%s: %v: %s", commands, err, output)
		}
	}
	do(`mkdir "$0.ro" && mount --bind "$0" "$0.ro" && mount -o remount,bind,ro "$0.ro" && mount --move "$0.ro" "$0"`)
	return func() { do(`umount --lazy "$0"`) }
}

// writes has a GPU fail in these processes, and waits until the one with that name has told the API
// server. Alone fails if others have written since, but for one write that may have been under way.
func (c *claimable) writes(name string, gpu int, processes ...*stage) (alone func()) {
	c.t.Helper()
	mark := len(c.api.Writers())
	for _, p := range processes {
		p.inject(simulator.Fault{Kind: simulator.KindXID, GPU: fmt.Sprint(gpu), XID: 64})
	}
	c.eventually("a fault is written", func() bool { return slices.Contains(c.api.Writers()[mark:], name) })
	return func() {
		c.t.Helper()
		others := slices.DeleteFunc(slices.Clone(c.api.Writers()[mark:]), func(by string) bool { return by == name })
		if len(others) > 1 {
			c.t.Errorf("%q write while %q leads", others, name)
		}
	}
}

// TestOneDecidesWithoutAStateDirectory: the state directory of two processes is full, read-only,
// removed while they run, or never was there. When the one that leads is silent, the other one
// leads, and only that one writes at the API server. No GPU is given to two pods, and pods get GPUs
// again when the directory is as it should be.
func TestOneDecidesWithoutAStateDirectory(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		mode  string
		begin func(*disk)
		fail  func(*claimable, *disk) (heal func())
	}{
		"full":      {mode: "dra", fail: func(_ *claimable, d *disk) func() { return d.fill() }},
		"read-only": {mode: "dra", fail: func(_ *claimable, d *disk) func() { return d.readOnly() }},
		"removed": {mode: "dra", fail: func(c *claimable, d *disk) func() {
			root := filepath.Join("/proc", d.pid, "root", d.at)
			for err := os.RemoveAll(root + "/state"); err != nil; err = os.RemoveAll(root + "/state") {
				pause(c.t.Context(), time.Millisecond) // a file was made there meanwhile
			}
			return func() {}
		}},
		"never there": {mode: "plugin", begin: func(d *disk) { d.readOnly() },
			fail: func(*claimable, *disk) func() { return func() {} }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			metrics := metricsAddress(t)
			c := openClaimable(t, test.mode, "--node-events", "--node-condition")
			d := c.newDisk(c.Path("disk"))
			if test.begin != nil {
				test.begin(d)
			}
			c.Args = append(c.Args, "--state-dir", filepath.Join(d.at, "state"))
			shared := c.Args
			c.Args = append(slices.Clone(c.Args), "--metrics-address", metrics)
			c.start()
			way, serving := "claim", func() { c.published(8) }
			if test.mode == "plugin" {
				way, serving = "plugin", func() { c.allocatable(8) }
			}
			serving()
			c.Args = shared
			second := c.join("second", "")
			c.eventually("the second one leads", func() bool { return second.leads() && !c.leads() })
			end := c.loaded()
			given := func() {
				before := c.counted(way)
				c.eventually("pods get GPUs", func() bool { return c.counted(way) >= before+10 })
			}
			given()
			alone := c.writes("second", 0, c.stage, second)
			alone()
			heal := test.fail(c, d)

			sig := syscall.SIGKILL
			if *stopped > time.Minute {
				sig = syscall.SIGSTOP
			}
			began := time.Now()
			lead := second.Running()
			c.signal(lead, sig)
			defer func() { _ = lead.Signal(syscall.SIGCONT) }()
			c.eventually("the first one leads", c.leads)
			if took := time.Since(began); took > mostSilence {
				t.Errorf("nobody leads for %v", took)
			}
			alone = c.writes("", 1, c.stage)
			if code, body := fetch(t, metrics, "/metrics"); code != 200 ||
				!strings.Contains(body, "\ngpu_device_plugin_leads 1\n") {
				t.Errorf("the metrics do not say that the process leads: %d", code)
			}
			heal()
			if sig == syscall.SIGKILL || test.mode == "dra" { // kubelet waits for the device plugin of a process that is stopped
				given()
			}
			alone()
			if sig == syscall.SIGSTOP {
				c.signal(lead, syscall.SIGCONT)
				given()
			}
			end()
			t.Logf("written in turn by %q; %d pods, %d refused", c.terms(), c.counted(way), len(c.refused))
			if sig == syscall.SIGKILL {
				<-lead.Ended()
				_ = second.StopDaemon() // it was killed
			}
		})
	}
}
