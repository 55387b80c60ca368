package claims_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestReserve: a claim is not prepared on a GPU while that is reserved, and others are; a GPU that
// a claim has cannot be reserved.
func TestReserve(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		s := snapshot()
		release, err := c.Reserve(t.Context(), s.GPUs[0].UUID, s.GPUs[0].UUID)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			time.Sleep(5 * time.Second)
			release()
		}()
		began := time.Now()
		r.prepare(c, claim("other", gpuC))
		if took := time.Since(began); took > 0 {
			t.Errorf("a claim of another GPU took %v", took)
		}
		r.prepare(c, claim("uid-1", gpuA))
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("the claim took %v", took)
		}
		if _, err := c.Reserve(t.Context(), s.GPUs[0].UUID, s.GPUs[0].UUID); err == nil ||
			!strings.Contains(err.Error(), "in use by the claim") {
			t.Errorf("a GPU that a claim has: %v", err)
		}
		r.unprepare(c, "uid-1")
		release, err = c.Reserve(t.Context(), s.GPUs[0].UUID, s.GPUs[0].UUID)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Reserve(ctx, s.GPUs[0].UUID, s.GPUs[0].UUID); err == nil {
			t.Error("reserved twice")
		}
		release()
	})
}

// TestReserveBesideClaims: a claim with adminAccess, which may last as long as the node, keeps no
// GPU from being reserved, and a claim of one MIG device none of the others.
func TestReserveBesideClaims(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		admin := claim("uid-1", gpuA)
		admin.Results[0].AdminAccess = true
		r.prepare(c, admin)
		r.prepare(c, claim("uid-2", migB0))
		for device, want := range map[[2]string]bool{{"GPU-a", "GPU-a"}: true, {"GPU-b", "MIG-b0"}: false,
			{"GPU-b", "MIG-b1"}: true} {
			release, err := c.Reserve(t.Context(), device[0], device[1])
			if got := err == nil; got != want {
				t.Errorf("%s is reserved: %v (%v), want %v", device[1], got, err, want)
			}
			if err == nil {
				release()
			}
		}
	})
}

// TestAdminAccessWaitsForNobody: a claim that only looks at GPUs is prepared while something is
// done with one of them, and holds up nobody.
func TestAdminAccessWaitsForNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		release, err := c.Reserve(t.Context(), "GPU-c", "GPU-c")
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		looks := claim("looks", gpuA, gpuC)
		for i := range looks.Results {
			looks.Results[i].AdminAccess = true
		}
		ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
		defer cancel()
		var prepared sync.WaitGroup
		began := time.Now()
		for _, claim := range []dra.Claim{looks, claim("uid-1", gpuA)} {
			prepared.Go(func() {
				if _, err := ask(ctx, c, claim); err != nil || time.Since(began) > 0 {
					t.Errorf("the claim %s: %v after %v", claim.UID, err, time.Since(began))
				}
			})
			synctest.Wait()
		}
		prepared.Wait()
	})
}
