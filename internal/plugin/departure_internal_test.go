package plugin

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// TestWhenTheAccountsAreRead: a second after kubelet or a socket came, sooner than a look that is due anyway; half a minute after a gap;
// and each second while kubelet has devices under another resource.
func TestWhenTheAccountsAreRead(t *testing.T) {
	const s = time.Second
	damaged := errors.New("damaged")
	for name, tt := range map[string]struct {
		unreadable         time.Duration // until then
		incarnation, moved time.Duration // when kubelet and a socket come
		foreign            bool
		want               []time.Duration
	}{
		"nothing happens":                 {want: []time.Duration{1 * s}},
		"kubelet comes":                   {incarnation: 4 * s, want: []time.Duration{1 * s, 5 * s}},
		"a socket comes":                  {moved: 4 * s, want: []time.Duration{1 * s, 5 * s}},
		"both come":                       {incarnation: 4 * s, moved: 4*s + s/2, want: []time.Duration{1 * s, 5 * s}},
		"a gap":                           {unreadable: 20 * s, want: []time.Duration{1 * s, 31 * s}},
		"kubelet comes after a gap":       {unreadable: 3 * s, incarnation: 4 * s, want: []time.Duration{1 * s, 5 * s}},
		"devices under another resource":  {foreign: true, want: []time.Duration{1 * s, 1 * s, 2 * s, 3 * s, 4 * s}},
		"a socket comes before the first": {moved: s / 2, want: []time.Duration{1 * s}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				began := time.Now()
				var at []time.Duration
				set := NewSet(Collaborators{Registrar: &sharedDirectory{}, Accountant: emptyAccount{}, Clock: clock.RealClock{},
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
				if err := set.dropDeparting(ctx); err != nil || !slices.Equal(at, tt.want) {
					t.Errorf("read after %v, want %v (%v)", at, tt.want, err)
				}
			})
		})
	}
}

// A countingClock counts how often somebody asks it to be woken.
type countingClock struct {
	clock.RealClock
	asked *int
}

func (c countingClock) After(d time.Duration) <-chan time.Time {
	*c.asked++
	return c.RealClock.After(d)
}

// TestNothingWakesAnIdleProcess: after the first reading, while nothing departs.
func TestNothingWakesAnIdleProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		asked := 0
		set := NewSet(Collaborators{Registrar: &sharedDirectory{}, Accountant: emptyAccount{}, Clock: countingClock{asked: &asked},
			Checkpoint:  func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, nil },
			Incarnation: feed.New(uint64(1)), Sockets: feed.New([]string(nil))})
		set.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
		if err := set.dropDeparting(ctx); err != nil || asked != 1 {
			t.Errorf("%d timers in an hour, want that of the first reading (%v)", asked, err)
		}
	})
}
