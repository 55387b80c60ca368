package monitor_test

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/kernellog"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// logged runs a monitor that hears of the XIDs in the kernel's log.
func logged(t *testing.T, profile string) simulation {
	t.Helper()
	s := simulate(t, profile)
	r := kernellog.Reader{
		Open:    func() (io.ReadCloser, error) { return s.node.KernelLog(), nil },
		Deliver: s.Deliver, Clock: clock.RealClock{},
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("read the kernel's log: %v", err)
		}
	})
	s.until("all good at first", func(s inventory.Snapshot) bool {
		return len(s.GPUs) > 0 && allHealthy(len(s.GPUs))(s)
	})
	synctest.Wait() // the reader waits for a line
	return s
}

// counted returns how often an XID was counted on the GPU at an index, and on its MIG devices.
func (s simulation) counted(index int, xid uint64) (n int) {
	s.t.Helper()
	status, err := s.Status(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	g := status.GPUs[index]
	for _, c := range g.Counts {
		if c.XID == xid {
			n += c.N
		}
	}
	for _, i := range g.Instances {
		for _, c := range i.Counts {
			if c.XID == xid {
				n += c.N
			}
		}
	}
	return n
}

// TestXIDsOfTheKernelLog: those that the driver reports nowhere else strike within the same second,
// and those that it does report count once.
func TestXIDsOfTheKernelLog(t *testing.T) {
	for xid, want := range map[uint64]inventory.State{79: lost, 119: unhealthy, 120: unhealthy, 62: unhealthy,
		31: healthy} {
		for _, kind := range []simulator.Kind{simulator.KindLoggedXID, simulator.KindXID} {
			t.Run(string(kind), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					s := logged(t, "dgx-h100")
					began := time.Now()
					s.inject(simulator.Fault{Kind: kind, GPU: "5", XID: xid})
					s.until("struck", state(5, want))
					synctest.Wait()
					if took := time.Since(began); took > time.Second {
						t.Errorf("XID %d took %v", xid, took)
					}
					if n := s.counted(5, xid); n != 1 {
						t.Errorf("XID %d was counted %d times", xid, n)
					}
					for _, g := range s.Snapshots().Value().GPUs {
						if g.Index != 5 && g.Health.State != healthy {
							t.Errorf("GPU %d is %+v", g.Index, g.Health)
						}
					}
				})
			})
		}
	}
}

// TestBurstOfTheKernelLog: a storm of lines is counted, as far as the kernel keeps them, and holds
// nothing up.
func TestBurstOfTheKernelLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := logged(t, "dgx-h100")
		const lines = 10_000
		s.inject(simulator.Fault{Kind: simulator.KindLoggedXID, GPU: "2", XID: 31, Count: lines})
		s.inject(simulator.Fault{Kind: simulator.KindLoggedXID, GPU: "3", XID: 119})
		s.until("struck", state(3, unhealthy))
		if n := s.counted(2, 31); n == 0 || n > lines {
			t.Errorf("%d counted of %d", n, lines)
		}
	})
}

// TestKernelLogAndMIG: the log tells the instance, and a GPU that is not there is nobody's.
func TestKernelLogAndMIG(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := logged(t, "h100-mig-1g")
		gi := 0
		for _, m := range s.node.List()[0].MIG {
			gi = max(gi, m.GI)
		}
		s.inject(simulator.Fault{Kind: simulator.KindLoggedXID, GPU: "0", XID: 119, GI: &gi})
		s.until("the MIG device is struck", func(snapshot inventory.Snapshot) bool {
			struck := 0
			for _, m := range snapshot.GPUs[0].MIGDevices {
				if m.Health.State == unhealthy && m.GI == gi {
					struck++
				}
			}
			return struck == 1 && snapshot.GPUs[0].Health.State == healthy
		})
		stranger := inventory.Event{
			Kind: inventory.EventXID, XID: 79, BDF: "0000:ff:1f.0", GI: inventory.Unattributed,
			CI: inventory.Unattributed, Logged: true,
		}
		if err := s.Deliver(t.Context(), stranger); err != nil {
			t.Error(err)
		}
		pass(time.Minute)
		for i := range s.Snapshots().Value().GPUs {
			if n := s.counted(i, 79); n != 0 {
				t.Errorf("GPU %d was counted the XID of another", i)
			}
		}
	})
}

// TestHearEndsWithItsContext also if the monitor does not run.
func TestHearEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := monitor.New(monitor.Options{}).Deliver(ctx, inventory.Event{}); err == nil {
		t.Error("an event was taken by a monitor that does not run")
	}
}
