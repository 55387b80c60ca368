package view_test

import (
	"fmt"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// TestInvalidMetrics: what is not a percentage or a number of MiB is not known.
func TestInvalidMetrics(t *testing.T) {
	t.Parallel()
	for value, known := range map[string]bool{"17": true, "0": true, "NaN": false, "+Inf": false, "-1": false,
		"1e30": false} {
		rows := []view.GPU{{Node: "a", Index: "0", UUID: "GPU-0"}}
		view.AddMetrics(rows, "a", fmt.Sprintf("# TYPE DCGM_FI_DEV_GPU_UTIL gauge\nDCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-0\"} %s\n",
			value))
		if got := rows[0].Utilization; (got != nil) != known {
			t.Errorf("%s is known: %t, want %t", value, got != nil, known)
		}
	}
}
