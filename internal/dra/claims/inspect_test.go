package claims_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestChecksBeforeStart: what is checked before a container starts on a GPU of the device plugin is
// checked before a claim is prepared for the first time. What uses a GPU still is waited for; a
// shared GPU may have processes, and one that is ill and tolerated, or that another claim has
// beside, is not checked.
func TestChecksBeforeStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.options.Patience = 30 * time.Second
		s := snapshot()
		s.GPUs[2].Health = inventory.Health{State: inventory.Unhealthy}
		r.publish(s)
		var asked []string
		var found error
		r.options.Inspect = func(_ context.Context, devices []resource.Device) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, d := range devices {
				asked = append(asked, fmt.Sprintf("%s shared=%v", d.UUID, d.Sharing != resource.Unshared))
			}
			return found
		}
		set := func(err error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			found = err
		}
		c, stop := r.start()
		defer stop()
		set(errors.New("GPU 0 is Suspect"))
		began := time.Now()
		if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err == nil || time.Since(began) > 0 ||
			r.record("uid-1") != "" {
			t.Errorf("bad health: Prepare() = %v after %v, record %q", err, time.Since(began), r.record("uid-1"))
		}
		set(fmt.Errorf("GPU 0 is still %w", inventory.ErrInUse))
		go func() {
			time.Sleep(3 * time.Second)
			set(nil)
		}()
		if r.prepare(c, claim("uid-1", gpuA)); time.Since(began) > 4*time.Second {
			t.Errorf("prepared after %v", time.Since(began))
		}
		set(errors.New("its own container runs"))
		r.prepare(c, claim("uid-1", gpuA))
		set(nil)
		r.unprepare(c, "uid-1")

		ill := claim("ill", gpuC)
		ill.Results[0].Tolerations = []dra.Toleration{{Operator: "Exists"}}
		admin := claim("admin", gpuA)
		admin.Results[0].AdminAccess = true
		r.pools.Publish(r.pools.Value().Shared(4))
		asked = nil
		for _, wanted := range []dra.Claim{ill, admin, part("part", 20, gpuA), claim("mig", migB0)} {
			r.prepare(c, wanted)
		}
		if want := []string{"GPU-a shared=true", "MIG-b0 shared=false"}; !slices.Equal(asked, want) {
			t.Errorf("checked %v, want %v", asked, want)
		}
	})
}
