package daemon

import (
	"os"
	"testing"
)

// again ends the daemon, does something, and starts a program with arguments.
func (c *claimable) again(program string, args []string, between func() error) {
	c.t.Helper()
	if err := c.StopDaemon(); err != nil {
		c.t.Fatal(err)
	}
	if err := between(); err != nil {
		c.t.Fatal(err)
	}
	c.Daemon, c.Args = program, args
	c.start()
}

// TestStateIsLost: the state directory is lost while the mode goes to the device plugin. A GPU whose claim has a container is given to nobody
// else, and comes back with the end of the claim. gpu-device-plugin does the same for as long as it is there.
func TestStateIsLost(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra")
	c.published(8)
	uuid := c.devices()["gpu-3"]
	uid := c.claim("one", "gpu-3")
	c.prepared("one", uid)
	forget := func() error { return os.RemoveAll(c.Path("state")) }
	agent := c.Args
	c.mode("{mode: plugin}")
	c.again(binary, nil, forget)
	c.allocatable(7)
	c.owner(uuid, "leaving-dra")
	if c.Devices(gpu)[uuid] {
		t.Errorf("the device plugin gives out %s, which claim one has", uuid)
	}
	c.again(nodeAgent, agent, forget)
	c.allocatable(7)
	c.owner(uuid, "leaving-dra")
	c.release(t.Context(), "one", uid)
	c.allocatable(8)
}
