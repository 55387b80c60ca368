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
	sentences := map[string]string{} // by the key of the file
	for line := range strings.Lines(removed) {
		if cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | "); len(cells) == 4 {
			sentences[strings.Trim(cells[2], "`")] = strings.TrimSpace(cells[3])
		}
	}
	for values, key := range map[string]string{
		"{waitForRelease: true}": "flags.plugin.waitForRelease", "{preStartReset: []}": "flags.plugin.preStartReset",
		"{features: {podEvents: false}}": "features.podEvents", "{features: {conditionType: GPUHealthy}}": "features.conditionType",
		"{features: {conditionInterval: 1h}}": "features.conditionInterval", "{mig: {evict: false}}": "mig.evict",
		"{mig: {pauseClients: true}}": "mig.pauseClients",
	} {
		_, err := renderChart(values)
		if sentences[key] == "" || err == nil || !strings.Contains(err.Error(), sentences[key]) {
			t.Errorf("%s: error %v, want one with %q", values, err, sentences[key])
		}
	}
}
