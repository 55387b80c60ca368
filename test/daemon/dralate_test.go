package daemon

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// newLateClaim returns a daemon whose GPUs go back to the device plugin while no slice can be
// written. A claim comes for a GPU that is nobody's then, and in a slice still.
func newLateClaim(t *testing.T) (c *claimable, gpu, claim string) {
	t.Helper()
	c = newClaimable(t, "dra")
	c.published(8)
	const name = "gpu-4"
	gpu = c.devices()[name]
	writes := apiserver.Fault{Status: 500, Only: func(r apiserver.Request) bool { return r.Resource == "resourceslices" && r.IsWrite() }}
	c.api.SetFault(writes)
	c.mode("{mode: plugin}")
	c.owner(gpu, "nobody")
	claim = c.claim("late", name)
	return c, gpu, claim
}

// TestClaimThatComesTooLate: the scheduler gives a GPU away by a slice of before, and the claim is
// refused. The GPU goes back into the slice then, so that the pod can have it, and to the device
// plugin when that has ended.
func TestClaimThatComesTooLate(t *testing.T) {
	t.Parallel()
	c, gpu, late := newLateClaim(t)
	if _, err := c.prepare(t.Context(), "late", late); err == nil {
		t.Fatal("a claim is prepared whose device is in no slice")
	}
	c.api.SetFault(apiserver.Fault{})
	c.allocatable(7)
	c.eventually("the claim is prepared", func() bool {
		_, err := c.prepare(t.Context(), "late", late)
		return err == nil
	})
	c.owner(gpu, "leaving-dra")
	limited, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c.release(limited, "late", late)
	if limited.Err() != nil {
		t.Error("the claim cannot be given back")
	}
	c.allocatable(8)
	c.eventually("no slice is left", func() bool { return len(c.api.Slices()) == 0 })
}

// TestRefusedClaimIsAskedForAgain: kubelet asks again for a claim that was refused, by its next
// look at the pod. The claim of a GPU that is nobody's is refused each time, and prepared when GPUs
// are given to claims again.
func TestRefusedClaimIsAskedForAgain(t *testing.T) {
	t.Parallel()
	c, uuid, late := newLateClaim(t)
	for range 2 {
		if _, err := c.prepare(t.Context(), "late", late); err == nil {
			t.Fatal("a claim is prepared whose device is in no slice")
		}
	}
	c.mode("{mode: dra}")
	c.eventually("the claim is prepared", func() bool {
		_, err := c.prepare(t.Context(), "late", late)
		return err == nil
	})
	c.owner(uuid, "dra")
	c.release(t.Context(), "late", late)
}

// TestKilledWhileAGPUIsInNoSlice: the slices are gone, the list of claims that shows whether one
// got a GPU meanwhile is not made yet, and the daemon is killed. The next one gives the device
// plugin no GPU before it has made the list, and prepares the claim that came too late.
func TestKilledWhileAGPUIsInNoSlice(t *testing.T) {
	t.Parallel()
	c, gpu, late := newLateClaim(t)
	c.api.SetFault(apiserver.Fault{Status: 500, Only: func(r apiserver.Request) bool { return r.Resource == "resourceclaims" }})
	c.eventually("no slice is left, and the daemon knows that", func() bool {
		noted, err := os.ReadFile(c.Path("state/dra-published.json"))
		return err == nil && len(c.api.Slices()) == 0 && strings.Contains(string(noted), `"gpus": null`)
	})
	c.crash()
	c.owner(gpu, "nobody")
	if n := c.Allocatable("nvidia.com/gpu"); n > 0 {
		t.Errorf("the device plugin has %d GPUs", n)
	}
	c.api.SetFault(apiserver.Fault{})
	c.allocatable(7)
	c.prepared("late", late)
	c.owner(gpu, "leaving-dra")
	c.release(t.Context(), "late", late)
	c.allocatable(8)
}
