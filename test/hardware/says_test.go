package hardware_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestWhatTheDriverSays: plan, status and metrics say what nvidia-smi says, and the daemon changes
// no setting.
func TestWhatTheDriverSays(t *testing.T) {
	needGPU(t)
	before := query(t)
	records := t.TempDir()
	m := measured(t, "--record", records)
	poll.Until(t, "GPUs were measured", func() bool {
		_, found := m.scrape().value("DCGM_FI_DEV_POWER_USAGE")
		return found
	})
	s, metrics := m.status(), m.scrape()
	after := query(t)
	planned := m.planned()
	if s.Driver != before.Driver || s.CUDA != before.CUDA {
		t.Errorf("driver %s, CUDA %s; nvidia-smi says %s and %s", s.Driver, s.CUDA, before.Driver, before.CUDA)
	}
	if _, found := metrics.value("gpu_device_plugin_driver_info", `version="`+before.Driver+`"`); !found {
		t.Error("no metric has the version of the driver")
	}
	for i, g := range before.GPUs {
		later := after.GPUs[i]
		if diff := cmp.Diff(g.settings(), later.settings()); diff != "" {
			t.Errorf("the daemon changed settings of %s (-before +after):\n%s", g.UUID, diff)
		}
		at := slices.IndexFunc(s.GPUs, func(d status.Device) bool { return d.UUID == g.UUID })
		if at < 0 {
			t.Errorf("status has no GPU %s", g.UUID)
			continue
		}
		identified(t, g, s.GPUs[at])
		if _, found := planned[g.UUID]; !found && g.MIG != "Enabled" {
			t.Errorf("the plan has no device %s", g.UUID)
		}
		read(t, metrics, g, later)
		if !t.Failed() {
			t.Logf("%s at %s: model, addresses, settings, memory, clocks, power, temperatures, link and errors are those of nvidia-smi",
				g.Product, g.Address)
		}
	}
	if err := m.StopDaemon(); err != nil {
		t.Error(err)
	}
	logCalls(t, records)
}

// identified compares what status says of a GPU.
func identified(t *testing.T, g smiGPU, d status.Device) {
	t.Helper()
	address := strings.ToLower(g.Address[len(g.Address)-len("0000:00:00.0"):])
	minor, _ := number(g.Minor)
	if d.Model != g.Product || d.PCI != address || d.Minor == nil || float64(*d.Minor) != minor {
		t.Errorf("status: %+v; nvidia-smi: %s, %s, minor %s", d, g.Product, g.Address, g.Minor)
	}
	if d.Signals == nil {
		t.Fatal("status has no signals of the GPU")
	}
	if p := d.Signals.PersistenceMode; p == nil || *p != (g.Persistence == "Enabled") {
		t.Errorf("status: persistence mode %v; nvidia-smi: %s", p, g.Persistence)
	}
	if a := d.Signals.RecoveryAction; a != "" && !strings.EqualFold(a, g.Recovery) {
		t.Errorf("status: recovery action %s; nvidia-smi: %s", a, g.Recovery)
	}
}

// read compares the metrics of a GPU with what nvidia-smi says before and after. What it does not
// know is left out.
func read(t *testing.T, metrics series, before, after smiGPU) {
	t.Helper()
	for _, v := range []struct {
		name          string
		before, after string
		more          float64 // than these it may be, and less
	}{
		{"FB_TOTAL", before.Total, after.Total, 0},
		{"FB_RESERVED", before.Reserved, after.Reserved, 1}, // nvidia-smi rounds up
		{"FB_FREE", before.Free, after.Free, 64},
		{"MEM_CLOCK", before.Memory, after.Memory, 0},
		{"SM_CLOCK", "0", before.MaxSM, 0},
		{"PCIE_LINK_GEN", before.Gen, after.Gen, 0},
		{"PCIE_LINK_WIDTH", before.Width, after.Width, 0},
		{"PCIE_MAX_LINK_GEN", before.MaxGen, after.MaxGen, 0},
		{"PCIE_MAX_LINK_WIDTH", before.MaxWidth, after.MaxWidth, 0},
		{"PCIE_REPLAY_COUNTER", before.Replays, after.Replays, 0},
		{"ECC_SBE_VOL_TOTAL", before.Corrected, after.Corrected, 0},
		{"ECC_DBE_VOL_TOTAL", before.Broken, after.Broken, 0},
		{"UNCORRECTABLE_REMAPPED_ROWS", before.Remapped, after.Remapped, 0},
		{"GPU_TEMP", before.Temp, after.Temp, 10},
		{"MEMORY_TEMP", before.MemTemp, after.MemTemp, 10},
		{"POWER_USAGE", "1 W", before.MaxPower, 0},
		{"POWER_USAGE", before.Power, after.Power, 60},
	} {
		one, known := number(v.before)
		other, still := number(v.after)
		if !known || !still {
			t.Logf("nvidia-smi does not know what DCGM_FI_DEV_%s is: %s", v.name, v.before)
			continue
		}
		got, found := metrics.value("DCGM_FI_DEV_"+v.name, `UUID="`+before.UUID+`"`)
		if !found || got < min(one, other)-v.more || got > max(one, other)+v.more {
			t.Errorf("DCGM_FI_DEV_%s is %v (%v), nvidia-smi says %s, then %s", v.name, got, found, v.before, v.after)
		}
	}
}

// planned returns the IDs that the command plan prints.
func (m *machine) planned() map[string]bool {
	m.Helper()
	var plan struct {
		Resources []struct{ Devices []struct{ ID string } }
	}
	out, err := exec.CommandContext(m.Context(), *daemonFlag, "plan", "-o", "json").Output()
	if err == nil {
		err = json.Unmarshal(out, &plan)
	}
	if err != nil {
		m.Fatalf("plan: %v\n%s", err, out)
	}
	ids := map[string]bool{}
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			ids[d.ID] = true
		}
	}
	return ids
}

// logCalls logs how long the recorded calls of a daemon took.
func logCalls(t *testing.T, folder string) {
	t.Helper()
	took := map[string][]time.Duration{}
	files, _ := filepath.Glob(filepath.Join(folder, "*.jsonl"))
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			var call struct {
				Call string
				Took time.Duration
			}
			if err := json.Unmarshal(line, &call); err == nil && call.Took > 0 {
				took[call.Call] = append(took[call.Call], call.Took)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(took)) {
		t.Logf("%s: %d times, %v", name, len(took[name]), spread(took[name]))
	}
}

// spread writes the shortest, the median and the longest of durations.
func spread(all []time.Duration) string {
	if len(all) == 0 {
		return "never"
	}
	slices.Sort(all)
	round := func(d time.Duration) string { return d.Round(10 * time.Microsecond).String() }
	return round(all[0]) + " to " + round(all[len(all)-1]) + ", median " + round(all[len(all)/2])
}

// median returns the median of numbers; NaN without any.
func median(all []float64) float64 {
	if len(all) == 0 {
		return math.NaN()
	}
	slices.Sort(all)
	return all[len(all)/2]
}
