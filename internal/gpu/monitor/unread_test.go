package monitor_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// TestMIGDeviceThatCannotBeReadForAWhileKeepsItsFaults: one that was destroyed takes them along.
func TestMIGDeviceThatCannotBeReadForAWhileKeepsItsFaults(t *testing.T) {
	for name, test := range map[string]struct {
		leftOut []inventory.LeftOut
		want    inventory.State
	}{
		"cannot be read": {[]inventory.LeftOut{{Index: 0, Reason: "MIG device 0:1 cannot be read"}},
			unhealthy},
		"destroyed": {nil, healthy},
		"destroyed, another GPU is lost": {[]inventory.LeftOut{{Index: 1, Reason: "the GPU cannot be identified"}},
			healthy},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(1)
			n.gpus[0].MIG = inventory.MIGEnabled
			both := []inventory.MIGDevice{{UUID: "MIG-1", Index: 0, GI: 1}, {UUID: "MIG-2", Index: 1, GI: 2}}
			n.gpus[0].MIGDevices = both
			watch(t, n, func(t *testing.T, m *monitor.Monitor) {
				states := func(want ...inventory.State) {
					t.Helper()
					var got []inventory.State
					for _, d := range m.Snapshots().Value().GPUs[0].MIGDevices {
						got = append(got, d.Health.State)
					}
					if !slices.Equal(got, want) {
						t.Fatalf("MIG devices are %v, want %v", got, want)
					}
				}
				n.send(inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 119, GI: 2,
					CI: inventory.Unattributed})
				pass(time.Second)
				states(healthy, unhealthy)
				n.set(func(n *node) { n.gpus[0].MIGDevices, n.leftOut = both[:1], test.leftOut })
				pass(time.Minute)
				states(healthy)
				n.set(func(n *node) { n.gpus[0].MIGDevices, n.leftOut = both, nil })
				pass(time.Minute)
				states(healthy, test.want)
				pass(time.Minute)
				states(healthy, test.want)
			})
		})
	}
}
