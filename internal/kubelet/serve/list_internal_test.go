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

// noCalls is an account that is told of no call.
type noCalls struct{}

func (noCalls) Allocating() (ended func(bool)) { return func(bool) {} }

// emptyAccount is that of a kubelet that knows no device.
type emptyAccount struct{ noCalls }

func (emptyAccount) Allocatable(context.Context) (map[string][]string, error) { return nil, nil }
func (emptyAccount) Held(context.Context) ([]kubelet.HeldDevice, error)       { return nil, nil }

// A noted account notes when it is asked, and answers the question of that number.
type notedAccount struct {
	emptyAccount
	answer func(n int) ([]string, error)
	asked  []time.Time
}

func (a *notedAccount) Allocatable(context.Context) (map[string][]string, error) {
	a.asked = append(a.asked, time.Now())
	ids, err := a.answer(len(a.asked))
	return map[string][]string{oneGPU().Name: ids}, err
}

// sentList returns a registration whose list has one GPU, which was sent.
func sentList(d Registrar, a Accountant) *registration {
	l := &registration{Collaborators: Collaborators{Registrar: d, Accountant: a, Clock: clock.RealClock{},
		Incarnation: feed.New(uint64(1)),
		Sockets:     feed.New([]string(nil)), Metrics: noMetrics{}}, list: newList(oneGPU().Name),
		previous: &previous{}, report: func(Phase) {}, reportDifference: func(string) {},
		adopt:   func(context.Context) {},
		session: session{connections: newConnections(), siblingChanged: make(chan struct{}, 1)}}
	l.list.publish(listOf(oneGPU()), Options{})
	l.sent.Publish(l.list.views.Value().response)
	return l
}

// TestABusyNodeIsReadSoon: ten times a second after the kubelet allocated a retiring device.
func TestABusyNodeIsReadSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second-1)
		defer cancel()
		reads := 0
		set := NewServers(Collaborators{Registrar: noPeers(), Accountant: emptyAccount{}, Clock: clock.RealClock{},
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
			account := &notedAccount{answer: func(int) ([]string, error) { return nil, nil }}
			l := sentList(noPeers(), account)
			l.mute.Publish(silence)
			if _, err := l.checkAccount(ctx, 1); ctx.Err() == nil || len(account.asked) > 0 {
				t.Errorf("silence %d: asked %d times (%v)", silence, len(account.asked), err)
			}
		})
	}
}

// TestPodResourcesIsAskedBeforeTheFirstRegistration only, if the checkpoint cannot be read: pods that
// are admitted while it does not answer would fail each time.
func TestPodResourcesIsAskedBeforeTheFirstRegistration(t *testing.T) {
	t.Parallel()
	account := &notedAccount{answer: func(int) ([]string, error) { return []string{"GPU-9"}, nil }}
	s := NewServers(Collaborators{Clock: clock.RealClock{}, Accountant: account,
		Checkpoint: func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, errors.New("damaged") }})
	entry := s.add(gpuName)
	s.listing = s.listing.Add(gpuName, false, s.holders, time.Now())
	for range 2 {
		s.adopt(t.Context(), entry)
		if devices := s.listing.Retiring(gpuName); len(devices) != 1 || devices[0].ID != "GPU-9" || len(account.asked) != 1 {
			t.Errorf("asked %d times: %+v", len(account.asked), devices)
		}
	}
}
