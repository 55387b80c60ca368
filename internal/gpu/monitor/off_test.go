package monitor_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestAllChecksOff: whatever happens to GPUs and MIG devices, they are given to work, and status
// still says what it was. An operator who quiesces the node has its GPUs taken from scheduling all
// the same.
func TestAllChecksOff(t *testing.T) {
	t.Parallel()
	for profile, faults := range map[string][]simulator.Fault{
		"dgx-h100": {
			{Kind: simulator.KindXID, GPU: "0", XID: 79}, {Kind: simulator.KindLost, GPU: "1"},
			{Kind: simulator.KindXID, GPU: "2", XID: 119},
			{Kind: simulator.KindRecoveryAction, GPU: "3", Action: "reboot"}, {Kind: simulator.KindUnrepairable,
				GPU: "4"},
			{Kind: simulator.KindFail, GPU: "5", Return: "UNKNOWN"}, {Kind: simulator.KindFabric, GPU: "6",
				State: "in-progress"},
		},
		"h100-mig-1g": {{Kind: simulator.KindXID, GPU: "0:1", XID: 119}},
	} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := simulate(t, profile)
				policy := health.Default()
				policy.Overrides, _ = health.ParseOverrides("all", "")
				if err := s.Apply(t.Context(), policy); err != nil {
					t.Fatal(err)
				}
				for _, f := range faults {
					s.inject(f)
				}
				devices := func(ok func(inventory.Health) bool) func(inventory.Snapshot) bool {
					return func(s inventory.Snapshot) bool {
						for _, g := range s.GPUs {
							all := []inventory.Health{g.Health}
							for _, m := range g.MIGDevices {
								all = append(all, m.Health)
							}
							for _, h := range all {
								if !ok(h) {
									return false
								}
							}
						}
						return len(s.GPUs) > 0
					}
				}
				good := devices(func(h inventory.Health) bool { return h.State == healthy && h.Reason == "" })
				pass(time.Minute)
				s.until("all good", good)
				status, err := s.Status(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				found := 0
				for _, g := range status.GPUs {
					found += len(g.DurableFaults())
					for _, i := range g.Instances {
						found += len(i.DurableFaults())
					}
				}
				if found < len(faults) {
					t.Errorf("%d faults are known of %d", found, len(faults))
				}
				if profile != "h100-mig-1g" {
					return // a session with a GPU that fails cannot be opened again
				}
				if err := s.Quiesce(t.Context(), false); err != nil {
					t.Fatal(err)
				}
				gone := func(s inventory.Snapshot) bool {
					return !s.GPUs[0].Health.Allocatable() && strings.Contains(s.Stale, "resume")
				}
				s.until("withheld", gone)
				if err := s.Resume(t.Context()); err != nil {
					t.Fatal(err)
				}
				s.until("all good again", good)
			})
		})
	}
}
