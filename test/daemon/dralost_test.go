package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
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

// TestStateThatCannotBeRead: gpu-device-plugin does not know which GPUs are in slices, and cannot ask. It offers none, says so, and is not
// ready, so that a roll-out stops; with the file that names the problem removed it goes on, without a restart.
func TestStateThatCannotBeRead(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	file := filepath.Join(s.Path("state"), "dra-published.json")
	if err := errors.Join(os.MkdirAll(s.Path("state"), 0o700), os.WriteFile(file, make([]byte, 100), 0o600)); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.staysUnready("not known yet which GPUs are given by Dynamic Resource Allocation")
	if shown := s.command("status"); !strings.Contains(shown, "dra-published.json.damaged") {
		t.Errorf("status:\n%s", shown)
	}
	if err := os.Remove(file + ".damaged"); err != nil {
		t.Fatal(err)
	}
	s.allocatable(8)
}

// TestStateDirectoryThatIsAFile: no GPU was published there, and none is given to claims, so the device plugin has all of them.
func TestStateDirectoryThatIsAFile(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	if err := os.WriteFile(s.Path("state"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.allocatable(8)
}
