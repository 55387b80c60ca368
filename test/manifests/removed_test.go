package manifests

import (
	"strings"
	"testing"
)

// TestChartRefusesRemovedValues: a value of an option that was removed is refused with the sentence that the daemon has for it, also one
// that says what holds anyway. docs/flags.md has these sentences.
func TestChartRefusesRemovedValues(t *testing.T) {
	t.Parallel()
	_, removed, found := strings.Cut(string(read(t, "../../docs/flags.md")), "## Options that were removed\n")
	if !found {
		t.Fatal("docs/flags.md has no section of removed options")
	}
	sentences := map[string]string{} // by the flag
	for line := range strings.Lines(removed) {
		if cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | "); len(cells) == 2 {
			sentences[strings.Trim(cells[0], " `")] = strings.TrimSpace(cells[1])
		}
	}
	for values, flag := range map[string]string{
		"{waitForRelease: true}": "--wait-for-release", "{preStartReset: []}": "--pre-start-reset",
		"{features: {podEvents: false}}": "--pod-events", "{features: {conditionType: GPUHealthy}}": "--node-condition-type",
		"{features: {conditionInterval: 1h}}": "--node-condition-interval", "{mig: {evict: false}}": "--mig-evict",
		"{mig: {pauseClients: true}}": "--mig-pause-clients",
	} {
		_, err := renderChart(values)
		if sentences[flag] == "" || err == nil || !strings.Contains(err.Error(), sentences[flag]) {
			t.Errorf("%s: error %v, want one with %q", values, err, sentences[flag])
		}
	}
}
