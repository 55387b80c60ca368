package cli_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestMachinesOfKubectl: the plugin of kubectl embeds the ResourceSlices of each simulated machine,
// as plan prints them, because the simulator needs C. `go test ./internal/app/cli -run
// TestMachinesOfKubectl -update` rewrites them.
func TestMachinesOfKubectl(t *testing.T) {
	t.Parallel()
	folder := filepath.Join("..", "..", "..", "cmd", "kubectl-gpu", "internal", "machines")
	for _, name := range simulator.Names() {
		text, err := run(t, "plan", "--dra", "--simulate", name, "--node-name=NODE", "-o", "json")
		if err != nil {
			t.Fatal(err)
		}
		var want bytes.Buffer
		if err := json.Compact(&want, []byte(text)); err != nil {
			t.Fatal(err)
		}
		want.WriteByte('\n')
		path := filepath.Join(folder, name+".json")
		if *update {
			if err := os.WriteFile(path, want.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want.Bytes()) {
			t.Errorf("%s is not what plan --dra prints, %v; run the test with -update", path, err)
		}
	}
	if files, err := filepath.Glob(filepath.Join(folder, "*.json")); err != nil || len(files) != len(simulator.Names()) {
		t.Errorf("%d files for %d machines, %v", len(files), len(simulator.Names()), err)
	}
}
