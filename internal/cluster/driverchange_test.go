package cluster_test

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverswap"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/gpudriver"
)

// A driverNode is a node with a stand-in of gpu-driver outside of the bubble of the test.
type driverNode struct {
	name, socket string
	driver       *gpudriver.Driver
	swaps        *driverswap.Swaps
	process      *process

	mu       sync.Mutex // guards all following fields
	now      time.Time  // of the bubble
	released bool
	bad      bool // the new driver finds no GPU
}

// newDriverNodes starts stand-ins of gpu-driver on so many nodes, before the bubble.
func newDriverNodes(t *testing.T, count int) []*driverNode {
	t.Helper()
	var all []*driverNode
	for i := range count {
		n := &driverNode{name: fmt.Sprintf("n%02d", i), socket: filepath.Join(t.TempDir(), "driver.sock"), bad: true}
		n.driver = gpudriver.New(gpudriver.Options{Socket: n.socket, Now: func() (now time.Time) {
			n.with(func() { now = n.now })
			return now
		}})
		n.driver.Serve(t)
		all = append(all, n)
	}
	return all
}

// setReleased says whether the process has released the driver.
func (n *driverNode) setReleased(is bool) {
	n.with(func() { n.released = is })
	n.driver.SetReleased(is)
}

// with calls do with the state of the node.
func (n *driverNode) with(do func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	do()
}

// label adds labels to the Node, which is created if necessary.
func (n *driverNode) label(s *stage, labels map[string]string) {
	s.Helper()
	if err := s.server.ChangeNode(n.name, func(node *corev1.Node) {
		if node.Labels == nil {
			node.Labels = map[string]string{}
		}
		maps.Copy(node.Labels, labels)
	}); err != nil {
		s.Fatal(err)
	}
}

// start starts the agent of the node.
func (n *driverNode) start(s *stage, rules config.Rollout) {
	s.Helper()
	n.label(s, nil)
	p := s.new(config.Config{Live: config.Live{Rollout: rules, DriverChange: config.DriverChange{Version: gpudriver.NewVersion}}})
	p.Startup.NodeName = n.name
	p.configure(func(c *config.Config) { c.NodeName = n.name })
	n.process = p
	n.swaps = driverswap.New(driverswap.Options{
		Wanted: func() (driverswap.Wanted, <-chan struct{}) {
			c, changed := p.Configs.Latest()
			return driverswap.Wanted(c.DriverChange), changed
		},
		Refused: func() string { return p.cluster.DriverRefusal() },
		Socket:  n.socket,
		Admit: func(change string) (time.Time, error) {
			n.with(func() { n.now = time.Now() })
			err := p.cluster.RequestSlot(change)
			return p.cluster.SlotSince(), err
		},
		Users:    func(context.Context) ([]driverswap.User, error) { return nil, nil },
		Released: func(context.Context) (is, _ bool, _ error) { n.with(func() { is = n.released }); return is, false, nil },
		Release:  func(context.Context) error { n.setReleased(true); return nil },
		Use:      func(context.Context) error { n.setReleased(false); return nil },
		Healthy:  func() []string { return []string{"GPU-0"} },
		Problem: func(context.Context, string, []string) (problem string) {
			n.with(func() {
				if n.bad {
					problem = "the driver finds no GPU"
				}
			})
			return problem
		},
	})
	p.DriverChange = n.swaps.Status()
	p.start()
	ctx, cancel := context.WithCancel(p.logging())
	var ended sync.WaitGroup
	ended.Go(func() { _ = n.swaps.Run(ctx) })
	s.Cleanup(func() {
		cancel()
		ended.Wait()
	})
}

// TestABadDriverStops: of 30 nodes, a driver that does not work is loaded by as many as there are
// slots. They have their old driver again and keep the slots; the others say why they wait. When the
// driver works and an operator frees the slots, all nodes change, never more at a time.
func TestABadDriverStops(t *testing.T) {
	const count, most = 30, 3
	nodes := newDriverNodes(t, count)
	onStage(t, func(s *stage) {
		rules := config.Rollout{Slots: most, Namespace: leaseSpace}
		for _, n := range nodes {
			n.start(s, rules)
		}
		counts := func() (touched, loaded, changing int) {
			for _, n := range nodes {
				if n.driver.Loads() > 0 {
					touched++
				}
				now := n.driver.Status()
				if now.LoadedDigest == gpudriver.NewDigest {
					loaded++
				}
				if now.Change != nil && now.Change.Step != driverapi.StepFailed {
					changing++
				}
			}
			return touched, loaded, changing
		}
		state := func(want driverchange.State, reason string) (found int) {
			for _, n := range nodes {
				if now := n.swaps.Status().Value(); now.State == want && strings.Contains(now.Reason, reason) {
					found++
				}
			}
			return found
		}
		r := &rollout{stage: s}
		s.until("three nodes have failed", func() bool {
			return strings.Count(strings.Join(r.slots(), ","), "failed") == most
		})
		s.pass(20 * time.Minute)
		if touched, loaded, _ := counts(); touched != most || loaded != 0 {
			t.Errorf("%d nodes have tried the bad driver, want %d; %d still have it", touched, most, loaded)
		}
		failed := state(driverchange.Failed, "the driver finds no GPU")
		if waiting := state(driverchange.Waiting, "all slots of the cluster are in use; failed: n"); failed != most ||
			waiting != count-most {
			t.Errorf("%d nodes have failed and %d wait", failed, waiting)
		}
		for _, n := range nodes {
			now := n.swaps.Status().Value()
			n.with(func() {
				if now.Withholds || n.released {
					t.Errorf("node %s offers no GPU: %+v", n.name, now)
				}
				n.bad = false
			})
		}

		for _, l := range s.server.Leases(leaseSpace) { // kubectl gpu rollout retry
			if err := s.server.DeleteLease(leaseSpace, l.Name); err != nil {
				t.Fatal(err)
			}
		}
		peak := 0
		s.until("all nodes have the driver", func() bool {
			_, _, changing := counts()
			peak = max(peak, changing)
			return state(driverchange.Done, "") == count
		})
		s.until("all slots are free", func() bool { return len(r.slots()) == 0 })
		if _, loaded, _ := counts(); peak > most || peak < 2 || loaded != count {
			t.Errorf("%d nodes changed at the same time, want at most %d; %d have the driver", peak, most, loaded)
		}
	})
}

// TestDriverOfTheOperator: a node whose driver NVIDIA's operator changes takes no slot and changes
// nothing, and begins when the operator gives the driver up.
func TestDriverOfTheOperator(t *testing.T) {
	nodes := newDriverNodes(t, 1)
	onStage(t, func(s *stage) {
		n := nodes[0]
		const deploys = "nvidia.com/gpu.deploy.driver"
		n.label(s, map[string]string{deploys: "true"})
		n.bad = false
		n.start(s, config.Rollout{Slots: 1, Namespace: leaseSpace})
		s.until("the node is blocked", func() bool {
			now := n.swaps.Status().Value()
			return now.State == driverchange.Blocked && strings.Contains(now.Reason, "nvidia.com/gpu.deploy.driver is true")
		})
		s.pass(10 * time.Minute)
		if leases := s.server.Leases(leaseSpace); len(leases) > 0 || n.driver.Loads() > 0 {
			t.Errorf("%d slots, %d loads", len(leases), n.driver.Loads())
		}
		n.label(s, map[string]string{deploys: "false"})
		s.until("the driver is changed", func() bool { return n.swaps.Status().Value().State == driverchange.Done })
	})
}

// TestWavesOfDrivers: no node of a later wave changes its driver before all nodes of the earlier wave
// have it. The label of a MIG layout is not needed for that.
func TestWavesOfDrivers(t *testing.T) {
	nodes := newDriverNodes(t, 4)
	onStage(t, func(s *stage) {
		rules := config.Rollout{Slots: 1, Namespace: leaseSpace, WaveLabel: waveLabel, WaveSoak: 5 * time.Minute}
		for i, n := range nodes {
			n.bad = false
			n.label(s, map[string]string{waveLabel: fmt.Sprint(i % 2)})
			n.start(s, rules)
		}
		var order []string
		s.until("all nodes have the driver", func() bool {
			done := 0
			for i, n := range nodes {
				if n.swaps.Status().Value().State != driverchange.Done {
					continue
				}
				if done++; !slices.Contains(order, n.name) {
					order = append(order, n.name)
					if len(order) <= 2 && i%2 == 1 {
						t.Errorf("%s of the second wave is among the first: %q", n.name, order)
					}
				}
			}
			return done == len(nodes)
		})
	})
}
