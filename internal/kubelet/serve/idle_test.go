package serve_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Sets that serve no kubelet: all time is virtual.

// alone is a node on which nobody else is, and an account with no device in it.
type alone struct {
	serve.Registrar
	serve.Accountant
}

func (alone) Allocatable(context.Context) (map[string][]string, error) { return nil, nil }
func (alone) Held(context.Context) ([]kubelet.HeldDevice, error)       { return nil, nil }
func (alone) Listening(context.Context) []string                       { return nil }
func (alone) read() (saved kubelet.Checkpoint, err error)              { return saved, nil }

// A countingClock counts how often somebody asks it to be woken.
type countingClock struct {
	clock.RealClock
	asked *atomic.Int64
}

func (c countingClock) After(d time.Duration) <-chan time.Time {
	c.asked.Add(1)
	return c.RealClock.After(d)
}

// runAlone runs Servers, beside the kubelet of an incarnation if that is not 0, until the test or
// its bubble ends. It also returns how often the Servers has asked for a timer.
func runAlone(t *testing.T, incarnation uint64) (set *serve.Servers, asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	set = serve.NewServers(serve.Collaborators{Registrar: alone{}, Accountant: alone{}, Clock: countingClock{asked: asked},
		Checkpoint: alone{}.read, Incarnation: feed.New(incarnation), Sockets: feed.New([]string(nil))})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- set.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		check(t, <-ended)
	})
	return set, asked
}

// TestASetIsAliveWhileItRuns: the liveness probe asks.
func TestASetIsAliveWhileItRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stopped := serve.NewServers(serve.Collaborators{})
		if err := stopped.Alive(ctx); err == nil {
			t.Error("a Set that does not run is alive")
		}
		set, _ := runAlone(t, 0)
		if err := set.Alive(t.Context()); err != nil {
			t.Errorf("a Set that runs is not alive: %v", err)
		}
	})
}

// TestNothingWakesAnIdleProcess: after the first reading, while nothing departs.
func TestNothingWakesAnIdleProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, asked := runAlone(t, 1)
		time.Sleep(time.Hour)
		if got := asked.Load(); got != 1 {
			t.Errorf("%d timers in an hour, want that of the first reading", got)
		}
	})
}

// TestAServerWithNothingLeftEnds a second after the plan has dropped its resource.
func TestAServerWithNothingLeftEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set, _ := runAlone(t, 0)
		set.Apply(resource.Plan{Resources: []resource.Resource{{Name: gpu}}}, serve.Options{}, 1)
		synctest.Wait()
		set.Apply(resource.Plan{}, serve.Options{}, 2)
		for _, there := range []bool{true, false} {
			if got := len(set.Status()) > 0; got != there {
				t.Errorf("the resource is served: %v, want %v", got, there)
			}
			time.Sleep(1100 * time.Millisecond)
			synctest.Wait()
		}
	})
}
