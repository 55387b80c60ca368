package status_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestCallsThatHang: every call is shown, and only the wait for events affects the events of all
// GPUs.
func TestCallsThatHang(t *testing.T) {
	t.Parallel()
	var s status.Status
	s.AddUnwatched([]inventory.LeftOut{{Index: 3, Reason: "not supported"}})
	s.AddCalls([]inventory.Call{{Function: "nvmlInit", GPU: inventory.NoGPU},
		{Function: "nvmlEventSetWait", GPU: inventory.NoGPU}, {Function: "nvmlDeviceGetName", GPU: 0}})
	if s.Hanging != 3 || len(s.Calls) != 3 || s.Calls[0].GPU != nil || s.Calls[2].GPU == nil || *s.Calls[2].GPU != 0 {
		t.Errorf("%d calls: %+v", s.Hanging, s.Calls)
	}
	want := []string{
		"GPU 3: no driver events; faults are found by polling only (not supported)",
		"all GPUs: no driver events; faults are found by polling only (nvmlEventSetWait does not return)",
	}
	if diff := cmp.Diff(want, s.Unwatched); diff != "" {
		t.Errorf("without events (-want +got):\n%s", diff)
	}
}
