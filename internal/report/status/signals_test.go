package status_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func TestSignalStatus(t *testing.T) {
	for name, tt := range map[string]struct {
		reading inventory.Reading
		want    string
	}{
		"never read":      {inventory.Reading{}, "null\n"},
		"an old driver's": {inventory.Reading{UncorrectedECC: inventory.Known(uint64(0))}, "uncorrectedECC: 0\n"},
		"a new driver's": {
			inventory.Reading{
				RecoveryAction:  inventory.Known(inventory.RecoveryNone),
				RowRemapPending: inventory.Known(true), RowRemapFailure: inventory.Known(false),
				Fabric: inventory.Known(inventory.Fabric{State: inventory.FabricCompleted}),
				Report: inventory.Report{
					Clocks: inventory.Known(inventory.ClockReasons(1<<3 | 1<<6 | 1<<20)), PCIeReplays: inventory.Known(7),
					NVLinks: inventory.Known(inventory.NVLinks{Active: 0b1011, Inactive: 0b0100}),
				},
			},
			`clocks:
- hardware-slowdown
- hardware-thermal-slowdown
- bit 20
fabric: completed
nvlinksActive: 3
nvlinksInactive:
- 2
pcieReplays: 7
recoveryAction: none
rowRemapFailure: false
rowRemapPending: true
`,
		},
		"limited capacity, and a call that fails": {
			inventory.Reading{
				Incomplete: "nvmlDeviceGetRemappedRows: ERROR_UNKNOWN", Persistence: inventory.Known(false),
				Fabric: inventory.Known(inventory.Fabric{
					State: inventory.FabricCompleted, Summary: inventory.FabricSummaryLimitedCapacity,
					Faults: inventory.FabricDegradedBandwidth | inventory.FabricMisconfigured,
				}),
			},
			`fabric: completed
fabricFaults:
- degraded bandwidth
- misconfigured
fabricSummary: limited-capacity
persistenceMode: false
unread: 'nvmlDeviceGetRemappedRows: ERROR_UNKNOWN'
`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := yaml.Marshal(status.Devices(inventory.Snapshot{GPUs: make([]inventory.GPU, 1)},
				[]health.GPU{{Reading: tt.reading}})[0].Signals)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, string(got)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
