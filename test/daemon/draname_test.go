package daemon

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// newName is a name of the driver that is not NVIDIA's.
const newName = "gpu.example.com"

// driverOfSlices returns the name of the driver of the slices at the API server; empty if there are
// none.
func (c *claimable) driverOfSlices() string {
	for _, s := range c.api.Slices() {
		return s.Spec.Driver
	}
	return ""
}

// TestDriverNameIsKept: with another name in the configuration the driver keeps its name while a
// claim is prepared under it: kubelet can give the claim back, also to the process that follows in
// a roll-out and after a kill. It has the new name when no GPU is in a slice.
func TestDriverNameIsKept(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra")
	c.published(8)
	uid := c.claim("one", "gpu-3")
	ids := c.prepared("one", uid)
	c.mode("{mode: dra, driverName: " + newName + "}")
	next := c.beside(c.Profile, append(slices.Clone(c.Args), "--state-dir", c.Path("state"), "--cdi-dir",
		c.Path("cdi"))...)
	next.start()
	c.signal(c.Running(), syscall.SIGKILL)
	<-c.Running().Ended()
	_ = c.StopDaemon() // it was killed
	if again := c.prepared("one", uid); !slices.Equal(ids, again) {
		t.Errorf("prepared as %q, then as %q", ids, again)
	}
	next.logs("dra.driverName is " + newName + ", and the driver keeps the name " + draDriver +
		", under which these claims have devices: default/one; ")
	if name := c.driverOfSlices(); name != draDriver {
		t.Errorf("the slices are of %q", name)
	}
	if shown := next.command("status"); !strings.Contains(shown, "the driver keeps the name") {
		t.Errorf("status:\n%s", shown)
	}
	second := c.claim("two", "gpu-4") // one that was given a GPU and that no pod has begun with
	c.mode("{mode: plugin, driverName: " + newName + "}")
	c.release(t.Context(), "one", uid)
	c.prepared("two", second)
	c.release(t.Context(), "two", second)
	c.allocatable(8) // no slice is left, and the process has noted that
	c.signal(next.Running(), syscall.SIGKILL)
	<-next.Running().Ended()
	_ = next.StopDaemon() // it was killed
	c.mode("{mode: dra, driverName: " + newName + "}")
	c.start()
	c.driver = newName
	c.published(8)
	if name := c.driverOfSlices(); name != newName {
		t.Errorf("the slices are of %q", name)
	}
	uid = c.claim("three", "gpu-3")
	if ids := c.prepared("three", uid); ids[0] != "k8s."+newName+"/claim="+uid+"-gpu-3" {
		t.Errorf("prepared as %q", ids)
	}
	c.release(t.Context(), "three", uid)
}

// TestLeadUnderAnotherName: a process began when nothing was in a slice, so that it has the new
// name, and waits for the lead. The one that leads publishes GPUs under the old one meanwhile, and
// stops: the next one keeps that name.
func TestLeadUnderAnotherName(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "plugin")
	c.allocatable(8)
	leader := c.Running()
	c.signal(leader, syscall.SIGSTOP)
	t.Cleanup(func() { c.signal(leader, syscall.SIGCONT) })
	next := c.beside(c.Profile, append(slices.Clone(c.Args), "--state-dir", c.Path("state"), "--cdi-dir", c.Path("cdi"),
		"--dra-driver-name", newName)...)
	next.start()
	next.logs("GPU found")
	if err := os.MkdirAll(c.Path("state"), 0o700); err != nil { // a daemon without state makes none
		t.Fatal(err)
	}
	file := c.write("published", `{"version":1,"gpus":["GPU-787a37b7-5768-8cbb-b621-369a695c93a0"]}`)
	if err := os.Rename(file, filepath.Join(c.Path("state"), "dra-published.json")); err != nil {
		t.Fatal(err)
	}
	next.logs("Restarting with the name of the driver under which claims have devices")
	next.logs("the driver keeps the name " + draDriver + ", under which GPUs are in ResourceSlices; ")
}
