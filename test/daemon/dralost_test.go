package daemon

import (
	"encoding/json"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// again ends the daemon, does something, and starts a program with arguments.
func (c *claimable) again(program string, args []string, between func() error) {
	c.t.Helper()
	c.stop()
	if err := between(); err != nil {
		c.t.Fatal(err)
	}
	c.Daemon, c.Args = program, args
	c.start()
}

// TestStateIsLost: the state directory is lost while the mode goes to the device plugin. A GPU
// whose claim has a container is given to nobody else, and comes back with the end of the claim.
// gpu-device-plugin does the same for as long as it is there.
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

// TestReinstallAfterClaims: gpu-node-agent is killed while a claim is prepared, and
// gpu-device-plugin takes its place. All GPUs but that of the claim come back; that one does as
// soon as the kubelet does not have the claim any more.
func TestReinstallAfterClaims(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra")
	c.published(8)
	uuid := c.devices()["gpu-3"]
	uid := c.claim("one", "gpu-3")
	c.prepared("one", uid)
	checkpoint := func(claims string) error {
		data := `{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[` + claims +
			`]}`
		text, err := json.Marshal(map[string]any{"Data": data, "Checksum": crc32.ChecksumIEEE([]byte(data))})
		return errors.Join(err, os.WriteFile(c.Path("dra_manager_state"), text, 0o600))
	}
	if err := checkpoint(`{"ClaimUID":"` + uid + `","ClaimName":"one","Namespace":"default","PodUIDs":{"p":{}},` +
		`"DriverState":{"gpu.nvidia.com":{"Devices":[{"PoolName":"node-1","DeviceName":"gpu-3"}]}}}`); err != nil {
		t.Fatal(err)
	}
	c.kill()
	agent := c.Args
	c.Daemon, c.Args = binary, []string{"--kubelet-root", c.Path("")}
	c.start()
	c.allocatable(7)
	c.owner(uuid, "leaving-dra")
	for _, command := range [][]string{{"ready", "--wait=20s"}, {"status"}} {
		if text := c.command(command...); !strings.Contains(text, "claim default/one has it; to release it, run the driver") {
			t.Errorf("%v does not say what GPU 3 waits for:\n%s", command, text)
		}
	}
	if err := checkpoint(""); err != nil {
		t.Fatal(err)
	}
	c.allocatable(8)
	c.again(nodeAgent, agent, func() error { return nil })
	c.owner(uuid, "dra")
}

// TestStateThatCannotBeRead: gpu-device-plugin does not know which GPUs are in slices, and cannot
// ask. The kubelet has no claim, so all come back.
func TestStateThatCannotBeRead(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	file := filepath.Join(s.Path("state"), "dra-published.json")
	if err := errors.Join(os.MkdirAll(s.Path("state"), 0o700), os.WriteFile(file, make([]byte, 100), 0o600)); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.allocatable(8)
	s.logs("dra-published.json.damaged")
}

// TestStateDirectoryThatIsAFile: no GPU was published there, and none is given to claims, so the
// device plugin has all of them.
func TestStateDirectoryThatIsAFile(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	if err := os.WriteFile(s.Path("state"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.allocatable(8)
}
