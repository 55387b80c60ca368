package serve

// Inside: what the inside tests of registrations share, and times that no kubelet shows.

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const gpuName = "nvidia.com/gpu"

// oneGPU is a resource with one device.
func oneGPU() resource.Resource {
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "GPU-0",
		Health: inventory.Health{State: inventory.Healthy}}}}
	return resource.New(snapshot, resource.Options{}).Resources[0]
}

// listOf returns the list of a resource.
func listOf(r resource.Resource) listing.List {
	h := holders.New()
	s := listing.State{}.Add(r.Name, false, h, time.Time{})
	plan := resource.Plan{Resources: []resource.Resource{r}}
	return listing.Next(s, plan, listing.Options{}, h, time.Time{}).Latest().Lists[r.Name]
}

// sendOneGPU records that a list with one GPU was sent.
func sendOneGPU(l *registration) {
	l.list.publish(listOf(oneGPU()), Options{})
	l.sent.Publish(l.list.views.Value().response)
}

// TestABusyNodeIsReadSoon: ten times a second after the kubelet allocated a retiring device.
func TestABusyNodeIsReadSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second-1)
		defer cancel()
		reads := 0
		none := accountFunc(func() ([]string, error) { return nil, nil })
		set := NewServers(Collaborators{Registrar: noPeers(), Accountant: none, Clock: clock.RealClock{},
			Incarnation: feed.New(uint64(1)), Sockets: feed.New([]string(nil)),
			Checkpoint: func() (kubelet.Checkpoint, error) { reads++; return kubelet.Checkpoint{}, nil }})
		set.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
		set.Apply(resource.Plan{}, Options{}, 1)
		set.allocating(gpuName, [][]string{{"GPU-0"}})
		if err := set.runReaper(ctx); err != nil || reads != 11 { // one of them before the first plan
			t.Errorf("read %d times, want 11 (%v)", reads, err)
		}
	})
}

// TestAServerEndsWithATick: by then the kubelet has received the empty list.
func TestAServerEndsWithATick(t *testing.T) {
	t.Parallel()
	s, stops := NewServers(Collaborators{Clock: clock.RealClock{}}), 0
	entry := s.add(gpuName)
	entry.retired, entry.phase, entry.stop = true, PhaseServing, func() { stops++ }
	entry.list.last.Store(entry.list.views.Value().response)
	for i, ticked := range []bool{false, true} {
		if waits, pause := s.waits(ticked); waits || pause != listing.ReadInterval || stops != i {
			t.Errorf("with a tick: %v: stopped %d times, waits %v, pause %v", ticked, stops, waits, pause)
		}
	}
}

// TestASilentServerAsksNobody: what the kubelet counts is another server's list.
func TestASilentServerAsksNobody(t *testing.T) {
	for _, silence := range []yield.Mute{yield.MuteLaterProcess, yield.MuteOtherPlugin} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			asked := 0
			l := muted(func() ([]string, error) { asked++; return nil, nil }, noPeers())
			sendOneGPU(l)
			l.mute.Publish(silence)
			if _, err := l.checkAccount(ctx, 1); ctx.Err() == nil || asked > 0 {
				t.Errorf("silence %d: asked %d times (%v)", silence, asked, err)
			}
		})
	}
}

// TestPodResourcesIsAskedBeforeTheFirstRegistration only, if the checkpoint cannot be read: pods that
// are admitted while it does not answer would fail each time.
func TestPodResourcesIsAskedBeforeTheFirstRegistration(t *testing.T) {
	t.Parallel()
	asked := 0
	account := accountFunc(func() ([]string, error) { asked++; return []string{"GPU-9"}, nil })
	s := NewServers(Collaborators{Clock: clock.RealClock{}, Accountant: account,
		Checkpoint: func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, errors.New("damaged") }})
	entry := s.add(gpuName)
	s.listing = s.listing.Add(gpuName, false, s.holders, time.Now())
	for range 2 {
		s.adopt(t.Context(), entry)
		if devices := s.listing.Retiring(gpuName); len(devices) != 1 || devices[0].ID != "GPU-9" || asked != 1 {
			t.Errorf("asked %d times: %+v", asked, devices)
		}
	}
}
