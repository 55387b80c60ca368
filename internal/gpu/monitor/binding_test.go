package monitor_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

func TestBindingOpensAnotherSession(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		binding := inventory.Event{Kind: inventory.EventBinding, GI: inventory.Unattributed, CI: inventory.Unattributed}
		n.set(func(n *node) { n.gpus = append(n.gpus, gpu(1)) })
		n.send(binding)
		pass(300 * time.Millisecond)
		wantStates(t, m, healthy, healthy)
		if got := n.count(opened); got != 2 {
			t.Errorf("%d sessions opened, want 2", got)
		}
		for range 3600 { // an hour of a driver that says so all the time
			n.send(binding)
			pass(time.Second)
		}
		if got := n.count(opened); got > 3600/15+10 {
			t.Errorf("%d sessions opened in an hour", got)
		}
	})
}

// A GPU that is unplugged, and one that is plugged in, with the paces that ship: a driver that says
// so is followed within a second, any other at the next look.
func TestHotPlugOnASimulatedNode(t *testing.T) {
	for driver, limit := range map[string]time.Duration{"580.95.05": time.Second, "570.1": 30 * time.Second} {
		t.Run(driver, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, err := simulator.Load("dgx-h100")
				if err != nil {
					t.Fatal(err)
				}
				p.Driver = driver
				node := simulator.New(p)
				m := monitor.New(monitor.Options{
					Driver: simulated.DriverOf(node), Policy: health.Default(),
				})
				ctx, cancel := context.WithCancel(withoutLog(t.Context()))
				ended := make(chan error, 1)
				go func() { ended <- m.Run(ctx) }()
				synctest.Wait()
				for _, step := range []struct {
					fault simulator.Kind
					gpus  int
				}{{simulator.KindRemove, 7}, {simulator.KindAdd, 8}} {
					_, changed := m.Snapshots().Latest()
					if err := node.Inject(simulator.Fault{Kind: step.fault, GPU: "5"}); err != nil {
						t.Fatal(err)
					}
					start := time.Now()
					for len(m.Snapshots().Value().GPUs) != step.gpus {
						<-changed
						_, changed = m.Snapshots().Latest()
					}
					if took := time.Since(start); took > limit {
						t.Errorf("%s: %d GPUs after %v", step.fault, step.gpus, took)
					}
					pass(2 * time.Minute)
				}
				cancel()
				if err := <-ended; err != nil {
					t.Errorf("Run: %v", err)
				}
				node.Close()
				if s := node.Stats(); s != (simulator.Stats{}) {
					t.Errorf("left behind: %+v", s)
				}
			})
		})
	}
}

// Only a driver that was loaded again has reset its GPUs: one whose library was away for a while has
// not.
func TestWhatProvesThatAGPUWasReset(t *testing.T) {
	for driver, want := range map[string]inventory.State{"missing": healthy, "no-library": unhealthy} {
		t.Run(driver, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := simulate(t, "dgx-h100")
				// The driver reports no recovery action after this XID.
				s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 46})
				s.until("struck", state(3, unhealthy))
				s.inject(simulator.Fault{Kind: simulator.KindDriver, Driver: driver})
				s.until("without driver", func(s inventory.Snapshot) bool { return s.Stale != "" })
				s.inject(simulator.Fault{Kind: simulator.KindRestore})
				s.until("with the driver again", func(s inventory.Snapshot) bool { return s.Stale == "" })
				pass(10 * time.Minute)
				s.until("judged", state(3, want))
			})
		})
	}
}
