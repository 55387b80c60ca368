package monitor_test

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
)

// TestGPULostFromTheStartIsFoundOnceItIsBack: no session that was opened before it was back can see it.
func TestGPULostFromTheStartIsFoundOnceItIsBack(t *testing.T) {
	t.Parallel()
	p, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	p.Faults = []simulator.Fault{{Kind: simulator.KindLost, GPU: "3"}}
	text, err := yaml.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "dgx-h100.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, file)
		s.until("seven GPUs, and one left out", func(s inventory.Snapshot) bool { return len(s.GPUs) == 7 && len(s.LeftOut) == 1 })
		s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		s.until("all good", allHealthy(8))
	})
}
