package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestAGPUThatIsGoneCanBeCleared: the faults of a GPU that was taken out for a repair can be cleared by
// its UUID, before it is back or after.
func TestAGPUThatIsGoneCanBeCleared(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 64})
	s.shows(8, 7)
	uuid := ""
	for id, state := range s.known() {
		if state == "Unhealthy" {
			uuid = id
		}
	}
	noted := func() bool {
		ledger, err := os.ReadFile(filepath.Join(s.Path("state"), "faults.json"))
		return err == nil && strings.Contains(string(ledger), uuid)
	}
	s.eventually("the ledger has the fault", noted)
	s.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "3"})
	s.eventually("the GPU is gone", func() bool { return len(s.known()) == 7 })

	unknown := map[string]string{"gpu": "GPU-0"}
	err := control.Call(t.Context(), s.ControlSocket(), "health.clear", unknown, nil)
	if err == nil || !strings.Contains(err.Error(), `"GPU-0"; status lists them by index and UUID`) {
		t.Errorf("clear a GPU that nobody knows: got error %v", err)
	}
	s.call("health.clear", map[string]string{"gpu": uuid})
	s.eventually("the ledger has the fault no more", func() bool { return !noted() })
	s.inject(simulator.Fault{Kind: simulator.KindAdd, GPU: "3"})
	s.eventually("the GPU is back", func() bool { return len(s.known()) == 8 })
	s.shows(8, 8)
}
