package field_test

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// pairs are metrics that posted rules and dashboards divide by each other, or add before they
// divide. Prometheus divides series with the same labels alone, so each one must have its partner.
var pairs = [][]string{
	{"DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_TOTAL"},
	{"DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"},
	{"DCGM_FI_DEV_FB_RESERVED", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_TOTAL"},
	{"DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_POWER_MGMT_LIMIT"},
	{"DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_ENFORCED_POWER_LIMIT"},
	{"DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_MAX_SM_CLOCK"},
	{"DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_MAX_MEM_CLOCK"},
	{"DCGM_FI_DEV_PCIE_LINK_GEN", "DCGM_FI_DEV_PCIE_MAX_LINK_GEN"},
	{"DCGM_FI_DEV_PCIE_LINK_WIDTH", "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH"},
	{"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE"},
	{"DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE"},
	{"DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"},
	{"DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_ACTIVE"},
}

// TestPairsOfMetrics: what rules divide has partners with the same labels, on whole GPUs and on MIG
// instances (dcgm-exporter#83, C3).
func TestPairsOfMetrics(t *testing.T) {
	t.Parallel()
	for profile, want := range map[string]struct{ memory, power int }{
		"h100-mig-1g": {56, 8}, "dgx-h100": {8, 8}, "a100-mig-mixed": {21, 8},
	} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			at, err := loopback.Free(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			newHost(t, "--simulate", profile, "--metrics-address", at, "--gpu-metrics-interval", "1s")
			var series map[string][]string
			poll.Until(t, "all GPUs are measured", func() bool {
				series = scrape(t, at)
				return len(series["DCGM_FI_DEV_POWER_USAGE"]) == want.power &&
					len(series["DCGM_FI_PROF_SM_ACTIVE"]) >= hopper(profile)*want.memory
			})
			if got := len(series["DCGM_FI_DEV_FB_USED"]); got != want.memory {
				t.Errorf("%d series of memory in use, want %d", got, want.memory)
			}
			for _, pair := range pairs {
				for _, other := range pair[1:] {
					if !slices.Equal(series[pair[0]], series[other]) {
						t.Errorf("%s has %d series, and %s has %d: the rules that divide them are silent", pair[0], len(series[pair[0]]),
							other, len(series[other]))
					}
				}
			}
		})
	}
}

// hopper returns 1 for a machine whose driver has the metrics of performance monitoring.
func hopper(profile string) int {
	if strings.Contains(profile, "h100") {
		return 1
	}
	return 0
}

// scrape returns the labels of the series of each metric in order.
func scrape(t *testing.T, at string) map[string][]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at+"/metrics", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil // it does not listen yet
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	series := map[string][]string{}
	for line := range strings.Lines(string(body)) {
		if name, rest, is := strings.Cut(line, "{"); is {
			labels, _, _ := strings.Cut(rest, "} ")
			series[name] = append(series[name], labels)
		}
	}
	for _, labels := range series {
		slices.Sort(labels)
	}
	return series
}
