package monitor_test

import (
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// counts counts what a Monitor tells.
type counts struct {
	mu         sync.Mutex // guards all following fields
	xids       map[string]map[uint64]int
	recoveries map[string]map[inventory.Remedy]int
}

func newCounts() *counts {
	return &counts{xids: map[string]map[uint64]int{}, recoveries: map[string]map[inventory.Remedy]int{}}
}

func (c *counts) XID(gpu string, xid uint64, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.xids[gpu] == nil {
		c.xids[gpu] = map[uint64]int{}
	}
	if !at.IsZero() {
		c.xids[gpu][xid]++
	}
}

func (c *counts) Recovered(gpu string, remedy inventory.Remedy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.recoveries[gpu] == nil {
		c.recoveries[gpu] = map[inventory.Remedy]int{}
	}
	c.recoveries[gpu][remedy]++
}

// of returns how often XIDs of a GPU came, and how often it recovered.
func (c *counts) of(gpu string) (xids map[uint64]int, recoveries map[inventory.Remedy]int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.xids[gpu]), maps.Clone(c.recoveries[gpu])
}

// TestMetrics: each XID is counted once for its GPU, also where it comes as an event and as a line
// of the log, and each recovery by the remedy of the fault.
func TestMetrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := logged(t, "h100-mig-1g")
		gpu := s.Snapshots().Value().GPUs[0]
		gi := gpu.MIGDevices[0].GI
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 31})
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 31})
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 94, GI: &gi})
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 48, Action: "reset"})
		s.until("struck", state(0, unhealthy))
		s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
		s.until("recovered", state(0, healthy))
		pass(time.Minute)
		xids, recoveries := s.counts.of(gpu.UUID)
		if want := map[uint64]int{31: 2, 94: 1, 48: 1}; !maps.Equal(xids, want) {
			t.Errorf("XIDs %v, want %v", xids, want)
		}
		if recoveries[inventory.RemedyReset] == 0 {
			t.Errorf("recoveries %v, want one by reset", recoveries)
		}
		if others, _ := s.counts.of(s.Snapshots().Value().GPUs[1].UUID); len(others) > 0 {
			t.Errorf("another GPU was counted %v", others)
		}
	})
}
