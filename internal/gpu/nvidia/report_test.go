package nvidia_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestReport(t *testing.T) {
	t.Parallel()
	fault := func(kind simulator.Kind) simulator.Fault { return simulator.Fault{Kind: kind, GPU: "1"} }
	const idle, slowdown, hot = 1 << 0, 1 << 3, 1 << 6
	link := 4
	replays := fault(simulator.KindPCIeReplays)
	replays.Count = 12
	cut := fault(simulator.KindNVLink)
	cut.Link = &link
	refused := simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetPcieReplayCounter",
		Return: "UNKNOWN"}
	for name, test := range map[string]struct {
		profile string
		fault   simulator.Fault
		want    inventory.Report
	}{
		"before R535 and Ampere": {
			profile: "dgx-1", fault: fault(simulator.KindRemapPending),
			want: inventory.Report{
				RetiredPagesPending: inventory.Known(true), PCIeReplays: inventory.Known(0),
				Clocks:  inventory.Known(inventory.ClockReasons(idle)),
				NVLinks: inventory.Known(inventory.NVLinks{Active: 1<<6 - 1}),
			},
		},
		"hot": {
			profile: "l40s-x8", fault: fault(simulator.KindThrottle),
			want: inventory.Report{
				PCIeReplays: inventory.Known(0), Clocks: inventory.Known(inventory.ClockReasons(slowdown | hot)),
			},
		},
		"PCIe packets sent again": {
			profile: "l40s-x8", fault: replays,
			want: inventory.Report{PCIeReplays: inventory.Known(12),
				Clocks: inventory.Known(inventory.ClockReasons(idle))},
		},
		"a call that fails": {
			profile: "l40s-x8", fault: refused,
			want: inventory.Report{Clocks: inventory.Known(inventory.ClockReasons(idle))},
		},
		"an NVLink that is down": {
			profile: "dgx-b200", fault: cut,
			want: inventory.Report{
				RepairPending: inventory.Known(false), PCIeReplays: inventory.Known(0),
				Clocks:  inventory.Known(inventory.ClockReasons(idle)),
				NVLinks: inventory.Known(inventory.NVLinks{Active: 1<<18 - 1 - 1<<4, Inactive: 1 << 4}),
			},
		},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, test.profile, test.fault)
			r.scan()
			reading, err := r.Read(r.ctx, r.uuid(1))
			if err != nil {
				t.Fatal(err)
			}
			if reading.Contact != inventory.ContactGood {
				t.Errorf("contact is %v (%s)", reading.Contact, reading.Reason)
			}
			compare(t, "report", test.want, reading.Report)
		})
	}
}

// TestEvidenceOfResets: what tells whether counters that fell prove a reset.
func TestEvidenceOfResets(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-b200", simulator.Fault{Kind: simulator.KindPersistence, GPU: "1", State: "off"})
	r.scan()
	for i, persistence := range []bool{true, false} {
		got, err := r.Read(r.ctx, r.uuid(i))
		if err != nil || got.Persistence != inventory.Known(persistence) || !got.Energy.Known || got.Energy.Value == 0 {
			t.Errorf("GPU %d: persistence %+v, energy %+v, %v", i, got.Persistence, got.Energy, err)
		}
	}
}

// TestReportIsReadRarely has what nobody acts on stay as it was for looks that follow one another
// fast.
func TestReportIsReadRarely(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "l40s-x8")
		r.scan()
		for _, step := range []struct {
			after time.Duration
			want  int
		}{{0, 0}, {5 * time.Second, 0}, {10 * time.Second, 0}, {15 * time.Second, 3}} {
			time.Sleep(step.after) // the bubble's clock: nobody waits for it
			reading, err := r.Read(r.ctx, r.uuid(0))
			if err != nil {
				t.Fatal(err)
			}
			compare(t, "packets sent again", inventory.Known(step.want), reading.Report.PCIeReplays)
			if step.after == 0 {
				r.inject(simulator.Fault{Kind: simulator.KindPCIeReplays, GPU: "0", Count: 3})
			}
		}
	})
}

// TestReportOfASlowDriver: at first nobody waits for it, and then it is read.
func TestReportOfASlowDriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, ctx: t.Context(), node: newNode(t, "dgx-h100")}
		r.inject(simulator.Fault{Kind: simulator.KindSlow, Call: "DeviceGetName", Delay: "300ms"})
		r.driver = nvidia.New(nvidia.Options{Library: r.node.NVML(), Root: r.node.Root()})
		s, err := r.driver.Open(r.ctx)
		if err != nil {
			t.Fatal(err)
		}
		r.Session = s
		r.scan()
		for _, gpu := range []int{0, 7} {
			for again := range 2 {
				reading, err := r.Read(r.ctx, r.uuid(gpu))
				if err != nil || reading.Report.PCIeReplays.Known != (gpu == 0 || again > 0) {
					t.Errorf("GPU %d: %+v, %v", gpu, reading.Report, err)
				}
			}
		}
		if err := s.Close(r.ctx); err != nil {
			t.Fatal(err)
		}
	})
}
