package claims_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestChangesWhileACallWaits: a call waits until another one has done with the GPU. What was so
// before, and is not any more, does not count.
func TestChangesWhileACallWaits(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*rig){
		"is not offered to claims by this node now": func(r *rig) { r.pools.Publish(dra.Pool{Name: r.pools.Value().Name}) },
		"is Lost": func(r *rig) {
			s := snapshot()
			s.Generation++
			s.GPUs[0].Health = inventory.Health{State: inventory.Lost}
			r.publish(s)
		},
		"is in use by the pod ns/pod": func(r *rig) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.held = []kubelet.HeldDevice{{ID: "GPU-a", Resource: "nvidia.com/gpu", Pod: "ns/pod"}}
		},
		"": func(*rig) {},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				c, stop := r.start()
				defer stop()
				release, err := c.Reserve(t.Context(), "GPU-a", "GPU-a")
				if err != nil {
					t.Fatal(err)
				}
				answer := make(chan error, 1)
				go func() {
					_, err := ask(t.Context(), c, claim("uid-1", gpuA))
					answer <- err
				}()
				synctest.Wait()
				change(r)
				synctest.Wait()
				release()
				if err := <-answer; (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("Prepare() = %v, want %q", err, want)
				}
			})
		})
	}
}

// A lateLook is a divider whose looks return what the one before has found.
type lateLook struct{ *divider }

func (l lateLook) Look(ctx context.Context) (inventory.Snapshot, error) {
	before := l.rig.snapshots.Value()
	_, err := l.divider.Look(ctx)
	return before, err
}

// TestLookThatCameBefore: a device that was made is in a Snapshot that is published before the call
// waits for one. The call needs no other.
func TestLookThatCameBefore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.options.Driver = lateLook{r.divide()}
		c, stop := r.start()
		defer stop()
		began := time.Now()
		if _, err := ask(t.Context(), c, claim("uid-1", small0)); err != nil || time.Since(began) > time.Second {
			t.Errorf("Prepare() = %v after %v", err, time.Since(began))
		}
	})
}

// TestTheLoopWaitsForNoCall: a call has a GPU whose time slice is to be set back. The specs of
// other claims are kept right meanwhile.
func TestTheLoopWaitsForNoCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		mark := filepath.Join(r.options.StateDir, "claims", "GPU-a.timeslice")
		if err := errors.Join(os.MkdirAll(filepath.Dir(mark), 0o700), os.WriteFile(mark, []byte("one"), 0o600)); err != nil {
			t.Fatal(err)
		}
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", gpuC))
		release, err := c.Reserve(t.Context(), "GPU-a", "GPU-a")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * claims.RefreshInterval)
		if err := os.Remove(r.specs().File("uid-1")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * claims.RefreshInterval)
		synctest.Wait()
		if r.spec("uid-1") == nil {
			t.Error("a claim has no spec while a call has a GPU of no claim")
		}
		release()
		time.Sleep(2 * claims.RefreshInterval)
		synctest.Wait()
		if _, err := os.Stat(mark); err == nil {
			t.Error("the time slice is not set back")
		}
	})
}
