package mig_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// evict is a mig.Evictor.
type evict func(mig.Pod) error

func (e evict) Evict(_ context.Context, pod mig.Pod) error {
	return e(pod)
}

// Each pod is evicted, once however many devices it holds; processes are not evicted. The reason of a refusal is reported until the next attempt.
func TestEvictionOfUsers(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "0:0", Count: 1})
		for i, pod := range []string{"team/a", "team/b", "team/a"} {
			r.hold(r.Snapshots().Value().GPUs[0].MIGDevices[i].UUID, pod)
		}
		evicted := map[string]int{}
		r.start(func(o *mig.Options) {
			o.Evictor = evict(func(p mig.Pod) error {
				if evicted[p.Name]++; p.Name == "b" {
					return errors.New("the disruption budget web allows none")
				}
				return nil
			})
		})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-disabled", Evict: true})
		r.until("says why not", func(s mig.Status) bool {
			return len(s.GPUs) == 3 && strings.HasSuffix(s.GPUs[0].Reason, "pod team/a: the disruption budget web allows none")
		})
		r.passes(5 * time.Second)
		if g := r.controller.Status().Value().GPUs[0]; !strings.HasSuffix(g.Reason, ": the disruption budget web allows none") {
			t.Errorf("between two tries it says %s", g.Reason)
		}
		if diff := cmp.Diff(map[string]int{"a": 1, "b": 1}, evicted); diff != "" {
			t.Errorf("evictions (-want +got):\n%s", diff)
		}
	})
}

// The timeout of evictions restarts for each change, and after it has expired.
func TestEvictionTimeoutRestarts(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start(func(o *mig.Options) { o.Evictor = evict(func(mig.Pod) error { return nil }) })
		gpu := r.Snapshots().Value().GPUs[0].UUID
		r.hold(gpu, "team/first")
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0"}, Evict: true,
			EvictTimeout: time.Minute})
		r.passes(50 * time.Second)
		r.hold(gpu, "")
		r.reaches(mig.StateSuccess)
		r.inject(simulator.Fault{Kind: simulator.KindReset, GPU: "0"}) // something else takes the layout back
		r.until("sees it", func(s mig.Status) bool { return s.State != mig.StateSuccess })
		r.hold(gpu, "team/second")
		r.passes(30 * time.Second)
		if s := r.controller.Status().Value(); s.State != mig.StatePending || !strings.Contains(s.Reason, "team/second") {
			t.Errorf("%q after half of the time: %s", s.State, s.Reason)
		}
		for _, most := range []time.Duration{5 * time.Second, 10 * time.Second} {
			s := r.reaches(mig.StateFailed)
			if pause := time.Until(s.GPUs[0].Retry); pause <= most/2 || pause > most ||
				!slices.Equal(r.devices()[0], []string{"GPU"}) {
				t.Errorf("%s: tried again in %v; offered: %v", s.Reason, pause, r.devices()[0])
			}
			r.until("waits again", func(s mig.Status) bool { return s.State == mig.StatePending })
			r.passes(30 * time.Second)
			if s := r.controller.Status().Value(); s.State != mig.StatePending {
				t.Errorf("%q in the next try: %s", s.State, s.Reason)
			}
		}
	})
}

// The pause is requested again every ten seconds. Errors about unknown clients are reported with
// the known clients. If the clients are gone and the GPU is still in use, the user is unknown.
func TestRepeatedPause(t *testing.T) {
	onCluster(t, func(t *testing.T, c *cluster) {
		c.stays = true
		c.clients(dcgm)
		c.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "1", Call: "DeviceSetMigMode", Value: "IN_USE"})
		c.runWith(errors.New("process 1 cannot be read"))
		c.request(true)
		c.until("says both", func(s mig.Status) bool {
			return s.Reason == "GPU 1: in use by process 300100 (nv-hostengine): process 1 cannot be read"
		})
		c.passes(100 * time.Second)
		if n := c.times(); n < 10 || n > 11 {
			t.Errorf("paused %d times in 100 s", n)
		}
		c.clients()
		s := c.reaches(mig.StateFailed)
		if s.Reason != "GPU 1: in use by an unknown process, though DaemonSets were paused for 5m0s" {
			t.Errorf("the reason: %s", s.Reason)
		}
	})
}
