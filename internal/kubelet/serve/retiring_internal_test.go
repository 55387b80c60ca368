package serve

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestWhenTheAccountsAreRead: for the first plan; a second after kubelet or a socket came, sooner
// than a look that is due anyway; half a minute after a gap; and each second while kubelet has
// devices under another resource.
func TestWhenTheAccountsAreRead(t *testing.T) {
	const s = time.Second
	damaged := errors.New("damaged")
	for name, tt := range map[string]struct {
		unreadable         time.Duration // until then
		incarnation, moved time.Duration // when kubelet and a socket come
		foreign            bool
		want               []time.Duration
	}{
		"nothing happens":                 {want: []time.Duration{0, 1 * s}},
		"kubelet comes":                   {incarnation: 4 * s, want: []time.Duration{0, 1 * s, 5 * s}},
		"a socket comes":                  {moved: 4 * s, want: []time.Duration{0, 1 * s, 5 * s}},
		"both come":                       {incarnation: 4 * s, moved: 4*s + s/2, want: []time.Duration{0, 1 * s, 5 * s}},
		"a gap":                           {unreadable: 20 * s, want: []time.Duration{0, 1 * s, 31 * s}},
		"kubelet comes after a gap":       {unreadable: 3 * s, incarnation: 4 * s, want: []time.Duration{0, 1 * s, 5 * s}},
		"devices under another resource":  {foreign: true, want: []time.Duration{0, 0, 1 * s, 1 * s, 2 * s}},
		"a socket comes before the first": {moved: s / 2, want: []time.Duration{0, 1 * s}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				began := time.Now()
				var at []time.Duration
				set := NewServers(Collaborators{Registrar: &sharedDirectory{listening: true}, Accountant: emptyAccount{},
					Clock:       clock.RealClock{},
					Incarnation: feed.New(uint64(1)), Sockets: feed.New([]string(nil)),
					Checkpoint: func() (kubelet.Checkpoint, error) {
						at = append(at, time.Since(began))
						if tt.foreign && len(at) >= len(tt.want) {
							cancel()
						}
						switch {
						case time.Since(began) < tt.unreadable:
							return kubelet.Checkpoint{}, damaged
						case tt.foreign:
							return kubelet.Checkpoint{Held: []kubelet.HeldDevice{{Resource: "nvidia.com/other", ID: "GPU-0", Pod: "p"}}}, nil
						}
						return kubelet.Checkpoint{}, nil
					}})
				set.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
				if tt.incarnation > 0 {
					time.AfterFunc(tt.incarnation, func() { set.collaborators.Incarnation.Publish(2) })
				}
				if tt.moved > 0 {
					time.AfterFunc(tt.moved, func() { set.collaborators.Sockets.Publish(nil) })
				}
				if err := set.runReaper(ctx); err != nil || !slices.Equal(at, tt.want) {
					t.Errorf("read after %v, want %v (%v)", at, tt.want, err)
				}
				if again := set.resources[oneGPU().Name].list.resend.Value(); (again > 0) != tt.foreign {
					t.Errorf("the list was sent again %d times", again)
				}
			})
		})
	}
}

// TestABusyNodeIsReadSoon: after kubelet gave a retiring device away, ten times a second for ten
// seconds; and then each second.
func TestABusyNodeIsReadSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 12*time.Second+readSoon/2)
		defer cancel()
		began := time.Now()
		var at, want []time.Duration
		held := []kubelet.HeldDevice{{Resource: gpuName, ID: "GPU-0", Pod: "p"}}
		account := &notedAccount{answer: func(int) ([]string, error) { return nil, nil }}
		set := NewServers(Collaborators{Registrar: &sharedDirectory{}, Accountant: account, Clock: clock.RealClock{},
			Incarnation: feed.New(uint64(1)), Sockets: feed.New([]string(nil)),
			Checkpoint: func() (kubelet.Checkpoint, error) {
				if took := time.Since(began); len(at) == 0 || at[len(at)-1] != took { // two reasons may come at once
					at = append(at, took)
				}
				return kubelet.Checkpoint{Held: held}, nil
			}})
		set.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
		set.Apply(resource.Plan{}, Options{}, 1)
		set.allocating(gpuName, [][]string{{"GPU-0"}})
		for d := time.Duration(0); d <= holders.FreeFor; d += readSoon {
			want = append(want, d)
		}
		want = append(want, 11*time.Second, 12*time.Second)
		if err := set.runReaper(ctx); err != nil || !slices.Equal(at, want) {
			t.Errorf("read after %v, want %v (%v)", at, want, err)
		}
		if len(account.asked) > 0 {
			t.Errorf("what others serve was asked %d times, though no resource is another's", len(account.asked))
		}
		if again := set.resources[gpuName].list.resend.Value(); again != 4 { // after 0, 1, 3 and 7 s
			t.Errorf("the list was sent again %d times, want that kubelet writes its checkpoint", again)
		}
	})
}

// TestAServerWithoutDevicesEnds with the first tick at which kubelet has its empty list.
func TestAServerWithoutDevicesEnds(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		early, stays, departs, unsent, unstarted bool
		phase                                    Phase
		want                                     bool
	}{
		"kubelet has it":                  {phase: PhaseServing, want: true},
		"before the tick":                 {early: true, phase: PhaseServing},
		"the plan may have it again":      {stays: true, phase: PhaseServing},
		"a device departs":                {departs: true, phase: PhaseServing},
		"the empty list was not sent":     {unsent: true, phase: PhaseServing},
		"it does not serve":               {unsent: true, phase: PhaseNoKubelet, want: true},
		"a later process serves":          {phase: PhaseYielding},
		"another program serves":          {phase: PhaseOtherPlugin},
		"its lives have not begun":        {unstarted: true},
		"a later process, and not sent":   {unsent: true, phase: PhaseYielding},
		"another program, and not sent":   {unsent: true, phase: PhaseOtherPlugin},
		"kubelet left before it was sent": {unsent: true, phase: PhaseRegistering, want: true},
	} {
		s := NewServers(Collaborators{Clock: clock.RealClock{}})
		stopped := false
		if tt.departs {
			s.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
			s.Apply(resource.Plan{}, Options{}, 1)
		} else {
			s.add(gpuName)
		}
		entry := s.resources[gpuName]
		entry.retired, entry.phase = !tt.stays, tt.phase
		if !tt.unstarted {
			entry.stop = func() { stopped = true }
		}
		if !tt.unsent {
			entry.list.last.Store(entry.list.views.Value().response)
		}
		other := s.add("nvidia.com/other")
		other.phase = PhaseServing
		waits, ending := s.waits(!tt.early)
		if stopped != tt.want || waits != tt.departs || ending != (!tt.stays && !tt.departs) {
			t.Errorf("%s: stopped %v, want %v; somebody waits: %v, servers are to end: %v", name, stopped, tt.want, waits,
				ending)
		}
	}
}

// TestWhatKubeletKnewIsAdopted before each registration: by the checkpoint, or by PodResources
// before the first one only, for a second at most.
func TestWhatKubeletKnewIsAdopted(t *testing.T) {
	for name, tt := range map[string]struct {
		unreadable error
		hangs      bool
		want       []string // that depart after the first and the second registration
		asked      int
		takes      time.Duration
	}{
		"the checkpoint": {want: []string{"saved", "saved,saved2"}},
		"PodResources":   {unreadable: errors.New("damaged"), want: []string{"told1", "told1"}, asked: 1},
		"PodResources does not come": {unreadable: errors.New("damaged"), hangs: true, want: []string{"", ""}, asked: 1,
			takes: adoptTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				saved := []string{"saved"}
				account := &adoptedAccount{hangs: tt.hangs}
				s := NewServers(Collaborators{Clock: clock.RealClock{}, Accountant: account,
					Checkpoint: func() (kubelet.Checkpoint, error) {
						return kubelet.Checkpoint{Healthy: map[string][]string{gpuName: saved}}, tt.unreadable
					}})
				entry := s.add(gpuName)
				s.listing = s.listing.Add(gpuName, false, s.holders, time.Now())
				began := time.Now()
				for i, want := range tt.want {
					s.adopt(t.Context(), entry)
					var retiring []string
					for _, device := range s.listing.Retiring(gpuName) {
						retiring = append(retiring, device.ID)
					}
					if got := strings.Join(retiring, ","); got != want {
						t.Errorf("registration %d: %q depart, want %q", i+1, got, want)
					}
					if got := len(entry.list.views.Value().response.Devices); got != len(retiring) {
						t.Errorf("registration %d: %d devices are listed", i+1, got)
					}
					if looks, changed := len(s.reaperWoken) > 0, i == 0 &&
						want != ""; looks != (changed || i == 1 && want != tt.want[0]) {
						t.Errorf("registration %d: the accounts are read: %v", i+1, looks)
					}
					for len(s.reaperWoken) > 0 {
						<-s.reaperWoken
					}
					saved = append(saved, "saved2")
				}
				if took := time.Since(began); account.asked != tt.asked || took != tt.takes {
					t.Errorf("PodResources was asked %d times, and it took %v, want %d, %v", account.asked, took, tt.asked, tt.takes)
				}
			})
		})
	}
}

// An adoptedAccount tells of another device each time, or hangs.
type adoptedAccount struct {
	emptyAccount
	hangs bool
	asked int
}

func (a *adoptedAccount) Allocatable(ctx context.Context) (map[string][]string, error) {
	a.asked++
	if a.hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return map[string][]string{gpuName: {fmt.Sprint("told", a.asked)}}, nil
}

// TestTheWarningOfAnUnreadableCheckpoint stands as long as somebody waits for it.
func TestTheWarningOfAnUnreadableCheckpoint(t *testing.T) {
	t.Parallel()
	clock := clocktesting.NewFakeClock(time.Now())
	s := NewServers(Collaborators{Clock: clock})
	warns := func(step string, want bool) {
		t.Helper()
		_, ending := s.waits(false)
		if got := strings.Join(s.Offered().Value().Warnings, "; "); strings.Contains(got,
			"not known which devices pods hold") != want || ending {
			t.Errorf("%s: the plan warns of %q", step, got)
		}
	}
	plan := func(gpus int) {
		s.Apply(resource.Plan{Resources: []resource.Resource{whole(gpus).Resource}}, Options{}, 1)
	}
	plan(2)
	plan(1)
	reads := func() {
		damaged := holders.Account{Kubelet: 1, UnknownBecause: "damaged", Unreadable: true}
		s.drop(listing.Reading{Account: damaged}, clock.Now())
	}
	for range 12 {
		warns("a moment ago", false)
		clock.Step(10 * time.Second / 12)
		reads()
	}
	clock.Step(10 * time.Second)
	reads()
	warns("ten seconds ago", true)
	plan(2)
	warns("nothing departs any more", false)
	if s.holders.EndSilence() || s.holders.Silence() != "" {
		t.Error("the ten seconds do not begin anew")
	}
}
