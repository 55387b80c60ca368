package daemon

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/healthevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/nvsentinel"
)

// TestHealthEvents: NVSentinel gets one event for each change of a GPU, none twice after the daemon
// was killed, and the present state of all GPUs after it was itself killed.
func TestHealthEvents(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("waits twice for the half minute that a GPU must stay healthy")
	}
	receiver := nvsentinel.New(t)
	folder := t.TempDir()
	profile := filepath.Join(folder, "node.yaml")
	machine, err := os.ReadFile("../../internal/gpu/simulator/profiles/dgx-h100.yaml")
	if err != nil {
		t.Fatal(err)
	}
	writes := func(text string) {
		t.Helper()
		if err := os.WriteFile(profile, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	writes(string(machine))
	s, _ := openAgent(t, profile, "--health-events=unix://"+receiver.Socket, "--state-dir", folder)
	s.start()
	s.shows(8, 8)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 48})
	s.shows(8, 7)
	s.logs("NVSentinel does not accept health events")
	receiver.Start()
	gets := func(healthy, ill int) {
		t.Helper()
		count := func(part string) (n int) {
			for _, e := range receiver.Received() {
				if strings.Contains(e, part) {
					n++
				}
			}
			return n
		}
		s.eventually("events", func() bool { return len(receiver.Received()) >= healthy+ill })
		if all := receiver.Received(); count("store healthy GPU_UUID=GPU-") != healthy ||
			count("store action 2 XID 48 GPU_UUID=GPU-") != ill || len(all) != healthy+ill ||
			slices.ContainsFunc(all, func(e string) bool { return !strings.Contains(e, " PCI=0000:") }) {
			t.Fatalf("want %d healthy and %d ill: %s", healthy, ill, strings.Join(all, "\n"))
		}
	}
	gets(7, 1)
	s.eventually("the answers are on disk", func() bool { // else events are sent again, unchanged
		text, err := os.ReadFile(filepath.Join(folder, healthevents.File))
		return err == nil && strings.Count(strings.ReplaceAll(string(text), " ", ""), `"accepted":true`) == 8
	})

	s.kill()
	// A real driver still requests the reset after the XID. The simulated one ends with its process.
	writes(string(machine) + "faults: [{kind: recovery-action, gpu: '3', action: reset}]\n")
	s.start()
	s.shows(8, 7)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 48})
	gets(7, 2)

	receiver.Start()
	gets(6, 2)
	s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
	s.call("health.clear", map[string]string{"gpu": "3"})
	gets(7, 2)
}
