package daemon

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// hang has each access to the disk hang until the test ends, but for the folder where the processes
// meet: a file system takes its place whose program answers nothing.
func (d *disk) hang() {
	d.t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		d.t.Skipf("without /dev/fuse this test cannot have a disk hang: %v", err)
	}
	d.t.Cleanup(func() { _ = fuse.Close() }) // ends each access with an error
	mount := exec.Command("nsenter", "--mount=/proc/"+d.pid+"/ns/mnt",
		"mount", "--internal-only", "-t", "fuse", "-o", "fd=3,rootmode=40000,user_id=0,group_id=0", "hangs", d.at)
	mount.ExtraFiles = []*os.File{fuse}
	if output, err := mount.CombinedOutput(); err != nil {
		d.t.Fatalf("mount a file system that hangs: %v: %s", err, output)
	}
}

// TestCallsWithADiskThatHangs: GetPreferredAllocation, Allocate, and Prepare of a claim that is
// prepared are answered without the state directory and the folder of CDI specs (law 1).
func TestCallsWithADiskThatHangs(t *testing.T) {
	t.Parallel()
	c := openClaimable(t, "split, gpus: {indices: [0, 1, 2, 3]}")
	d := c.newDisk(c.Path("disk"))
	c.Args = append(c.Args, "--state-dir", filepath.Join(d.at, "state"), "--cdi-dir", filepath.Join(d.at, "cdi"))
	c.start()
	c.published(4)
	c.allocatable(4)
	uid := c.claim("known", "gpu-0")
	before := c.prepared("known", uid)
	d.hang()
	reader := exec.CommandContext(t.Context(), "nsenter", "--mount=/proc/"+d.pid+"/ns/mnt", "ls",
		filepath.Join(d.at, "state"))
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() { read <- reader.Wait() }()
	for i := range 4 {
		c.admit(fmt.Sprint("pod-", i), 1)
	}
	again, err := c.prepare(t.Context(), "known", uid)
	if err != nil || !slices.Equal(again, before) {
		t.Errorf("prepared as %q, and when the disk hangs as %q, %v", before, again, err)
	}
	for _, kind := range []standin.Kind{standin.Preferred, standin.Allocated} {
		answered := slices.DeleteFunc(c.Events(0), func(e standin.Event) bool { return e.Kind != kind })
		if len(answered) != 4 {
			t.Errorf("%d events %v", len(answered), kind)
		}
	}
	select {
	case err := <-read:
		t.Errorf("the disk does not hang: %v", err)
	default:
	}
}

// TestRequestOfARestartOnADiskThatHangs: while the file of --reboot-file is on a disk that does not
// answer, pods get GPUs, another process takes the lead and the hardware with it, and the first one
// ends in time.
func TestRequestOfARestartOnADiskThatHangs(t *testing.T) {
	t.Parallel()
	c := openClaimable(t, "plugin")
	d := c.newDisk(c.Path("disk"))
	c.Args = append(c.Args, "--reboot-file", filepath.Join(d.at, "reboot-required"))
	c.start()
	c.allocatable(8)
	d.hang()
	c.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	c.allocatable(7)
	c.admit("pod", 4)

	second := c.join("second", "")
	c.eventually("the second one leads", second.leads)
	second.eventually("nothing of the first one is waited for", func() bool {
		l := second.status().Lead
		return l.This && l.PreviousLeader == ""
	})
	first := c.Running()
	c.signal(first, syscall.SIGTERM)
	c.ends(first)
	if strings.Contains(c.Logged(), "by force") {
		t.Error("the process was ended by force")
	}
	_ = c.StopDaemon()
}
