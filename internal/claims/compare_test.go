package claims_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// TestCompare: pods are counted by what their containers have: what claims of their namespace have, a device of another claim or of none, or what
// cannot be seen. GPUs of the device plugin and containers without devices are not looked at. A look that hangs does not keep the task from ending.
func TestCompare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := snapshot()
		s.GPUs[1].MIGDevices[0].GICap, s.GPUs[1].MIGDevices[0].CICap = 30, 31
		r := newRig(t)
		r.publish(s)
		c0 := r.configs.Value()
		c0.DRA.Mode = config.DRAAll
		r.configs.Publish(c0)
		owners := dra.All(s.GPUs)
		r.options.Owners = feed.New(owners)
		var mu sync.Mutex
		var seen map[string][]kubelet.SeenContainer
		var problem error
		hang := make(chan struct{})
		hangs := false
		r.options.Containers = func() (map[string][]kubelet.SeenContainer, error) {
			mu.Lock()
			defer mu.Unlock()
			if hangs {
				<-hang
			}
			return seen, problem
		}
		c, stop := r.start()
		whole, mig, elsewhere := claim("uid-1", gpuA), claim("uid-2", migB0), claim("uid-3", gpuC)
		whole.Pods, mig.Pods, elsewhere.Pods, elsewhere.Namespace = []string{"pod-1"}, []string{"pod-2"}, []string{"pod-3"}, "other"
		r.prepare(c, whole)
		r.prepare(c, mig)
		r.prepare(c, elsewhere)
		ctx, end := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = c.Compare(ctx) })
		has := func(nodes ...string) []kubelet.SeenContainer {
			return []kubelet.SeenContainer{{}, {Nodes: append(nodes, "nvidiactl", "nvidia-uvm")}}
		}
		want := func(what string, want claims.Comparison, pods map[string][]kubelet.SeenContainer) {
			t.Helper()
			mu.Lock()
			seen = pods
			mu.Unlock()
			time.Sleep(time.Minute)
			synctest.Wait()
			if got := c.Compared().Value(); got != want {
				t.Errorf("%s: %+v, want %+v", what, got, want)
			}
		}
		type all = map[string][]kubelet.SeenContainer
		parts := []string{"nvidia1", "nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap31"}
		want("as recorded", claims.Comparison{Same: 3}, all{"pod-1": has("nvidia0"), "pod-2": has(parts...), "pod-3": has("nvidia2"), "x": has()})
		want("of another namespace", claims.Comparison{Same: 1, Differ: 1}, all{"pod-1": has("nvidia0"), "pod-3": has("nvidia2", "nvidia0")})
		gone := s
		gone.GPUs = s.GPUs[:2]
		r.publish(gone)
		want("whose own GPU is gone", claims.Comparison{Differ: 1}, all{"pod-3": has("nvidia0")})
		r.publish(s)
		want("another MIG device", claims.Comparison{Differ: 1}, all{"pod-2": has("nvidia1", "nvidia-caps/nvidia-cap40")})
		want("hidden", claims.Comparison{Hidden: 1}, all{"pod-1": {{Hidden: true}}, "x": {{Hidden: true}}})
		want("a later pod of a claim", claims.Comparison{Same: 1}, all{"x": has("nvidia2")})
		r.unprepare(c, "uid-1")
		want("given back", claims.Comparison{Differ: 2}, all{"pod-1": has("nvidia0"), "x": has("nvidia0")})
		owners = dra.Owners{"GPU-a": dra.OwnedByPlugin}
		r.options.Owners.Publish(owners)
		want("of the device plugin", claims.Comparison{}, all{"x": has("nvidia0")})
		mu.Lock()
		problem = errors.New("no cgroups")
		mu.Unlock()
		want("nothing is seen", claims.Comparison{Hidden: 2}, nil)
		r.unprepare(c, "uid-2")
		r.unprepare(c, "uid-3")
		r.mode(config.DRAOff)
		want("no claims are given", claims.Comparison{}, nil)
		r.mode(config.DRAAll)
		want("and given again", claims.Comparison{}, nil)
		r.prepare(c, whole)
		mu.Lock()
		problem = nil
		mu.Unlock()
		r.options.Owners.Publish(dra.All(s.GPUs))
		want("prepared again", claims.Comparison{Same: 1}, all{"pod-1": has("nvidia0")})
		mu.Lock()
		hangs = true
		mu.Unlock()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if got := c.Compared().Value(); got != (claims.Comparison{Hidden: 1}) {
			t.Errorf("a look that hangs: %+v", got)
		}
		end()
		running.Wait()
		close(hang)
		stop()
	})
}
