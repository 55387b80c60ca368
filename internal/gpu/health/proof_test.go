package health_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestProofs: that CUDA does not work on a device is closed by another proof, or an operator's
// word, alone. It is not for the ledger.
func TestProofs(t *testing.T) {
	t.Parallel()
	p, now := health.Default(), time.Unix(1e9, 0)
	g := health.GPU{UUID: "GPU-0"}.WithScan(inventory.GPU{
		UUID: "GPU-0", MIG: inventory.MIGEnabled, MIGDevices: []inventory.MIGDevice{{UUID: "MIG-0", GI: 1},
			{UUID: "MIG-1", GI: 2}},
	}, false, now)
	read := func(g health.GPU) health.GPU {
		for range 5 {
			now = now.Add(time.Minute)
			g = p.FoldReading(g, inventory.Reading{}, health.Facts{Branch: 580, Opened: now}, now)
		}
		return g
	}
	g = read(g)
	fails := func(g health.GPU, uuid, why string) health.GPU {
		g, ok := p.FoldProof(g, uuid, why, inventory.RemedyReset, now)
		if !ok {
			t.Errorf("no device %s", uuid)
		}
		return g
	}
	bad := fails(g, "MIG-1", "it computes wrongly")
	since := bad.Instances[1].Health.Since
	bad = read(fails(bad, "MIG-1", "it computes wrongly"))
	h := bad.Instances[1].Health
	if h.State != inventory.Unhealthy || h.Remedy != inventory.RemedyReset || h.Reason != "it computes wrongly" ||
		!h.Since.Equal(since) ||
		bad.Health.State != inventory.Healthy || bad.Instances[0].Health.State != inventory.Healthy {
		t.Errorf("after a failed proof: %+v", bad)
	}
	if len(bad.Instances[1].DurableFaults()) > 0 {
		t.Error("it is in the ledger")
	}
	if good := fails(bad, "MIG-1", ""); good.Instances[1].Health.State != inventory.Healthy {
		t.Errorf("after a good one: %+v", good.Instances[1].Health)
	}
	if cleared, _ := p.Clear(bad, "MIG-1", now); cleared.Instances[1].Health.State != inventory.Healthy {
		t.Errorf("after an operator's word: %+v", cleared.Instances[1].Health)
	}
	if whole := fails(g, "GPU-0", "it hangs"); whole.Health.State != inventory.Unhealthy {
		t.Errorf("the GPU: %+v", whole.Health)
	}
	if _, ok := p.FoldProof(g, "GPU-1", "it hangs", inventory.RemedyReset, now); ok {
		t.Error("a GPU that it is not")
	}
}
