package serve_test

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// An unreachable kubelet has no directory: no server can listen there, so that nothing waits for
// a socket. Another plugin listens.
type unreachable struct {
	serve.Registrar
	dir string
}

func (n unreachable) NewEndpoint(string) string        { return filepath.Join(n.dir, "no", "e.sock") }
func (unreachable) Peers(string) kubelet.Peers         { return kubelet.Peers{} }
func (unreachable) Listening(context.Context) []string { return []string{"another.sock"} }

// A saidAccount is kubelet's account as a test wants it.
type saidAccount struct {
	held         []kubelet.HeldDevice
	healthy      map[string][]string
	failed, lost error // of Held and Allocatable
}

func (a *saidAccount) Allocatable(context.Context) (map[string][]string, error) {
	return a.healthy, a.lost
}
func (a *saidAccount) Held(context.Context) ([]kubelet.HeldDevice, error) { return a.held, a.failed }
func (*saidAccount) Allocating() (ended func(bool))                       { return func(bool) {} }

// unheard returns Servers that read a checkpoint and serve nobody.
func unheard(t *testing.T, checkpoint func() (kubelet.Checkpoint, error)) (*serve.Servers, serve.Collaborators) {
	t.Helper()
	c := serve.Collaborators{Registrar: unreachable{dir: t.TempDir()}, Accountant: &saidAccount{}, Clock: clock.RealClock{},
		Incarnation: feed.New(uint64(1)), Sockets: feed.New([]string(nil)), Checkpoint: checkpoint}
	return serve.NewServers(c), c
}

// TestWhenTheAccountsAreRead: for the first plan; a second after kubelet or a socket came, sooner
// than a reading that is due anyway; half a minute after a gap; and each second while kubelet has
// devices under another resource.
func TestWhenTheAccountsAreRead(t *testing.T) {
	const s = time.Second
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
				ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), logr.Discard()), time.Minute)
				defer cancel()
				began := time.Now()
				var at []time.Duration
				set, c := unheard(t, func() (kubelet.Checkpoint, error) {
					at = append(at, time.Since(began))
					if tt.foreign && len(at) >= len(tt.want) {
						cancel()
					}
					switch {
					case time.Since(began) < tt.unreadable:
						return kubelet.Checkpoint{}, errors.New("damaged")
					case tt.foreign:
						return kubelet.Checkpoint{Held: []kubelet.HeldDevice{{Resource: "nvidia.com/other", ID: id(0), Pod: "p"}}}, nil
					}
					return kubelet.Checkpoint{}, nil
				})
				set.Apply(oneGPU(), asEnvironment, 1)
				if tt.incarnation > 0 {
					time.AfterFunc(tt.incarnation, func() { c.Incarnation.Publish(2) })
				}
				if tt.moved > 0 {
					time.AfterFunc(tt.moved, func() { c.Sockets.Publish(nil) })
				}
				if err := set.Run(ctx); err != nil || !slices.Equal(at, tt.want) {
					t.Errorf("read after %v, want %v (%v)", at, tt.want, err)
				}
			})
		})
	}
}

// TestTheWarningOfAnUnreadableCheckpoint stands as long as a device that left the plan waits for it.
func TestTheWarningOfAnUnreadableCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
		defer cancel()
		set, _ := unheard(t, func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, errors.New("damaged") })
		set.Apply(oneGPU(), asEnvironment, 1)
		go func() { _ = set.Run(ctx) }()
		for i, step := range []struct {
			plan  resource.Plan
			after time.Duration
			want  bool
		}{{plan: resource.Plan{}, after: 9 * time.Second}, {plan: resource.Plan{}, after: 3 * time.Second, want: true},
			{plan: oneGPU(), after: 2 * time.Second}, {plan: resource.Plan{}, after: 9 * time.Second}} {
			set.Apply(step.plan, asEnvironment, 1)
			time.Sleep(step.after)
			synctest.Wait()
			warnings := strings.Join(set.Offered().Value().Warnings, "; ")
			if strings.Contains(warnings, "not known which devices pods hold") != step.want {
				t.Errorf("step %d: the plan warns of %q", i, warnings)
			}
		}
		cancel()
	})
}

// TestWhatHoldersSays in one reading after another of kubelet's accounts.
func TestWhatHoldersSays(t *testing.T) {
	t.Parallel()
	away := errors.New("away")
	for name, steps := range map[string][]struct {
		offered      bool   // the device
		saved, named string // the device that the checkpoint and PodResources name
		unread, lost error  // of the checkpoint, and what kubelet counts
		healthy      string // the device that kubelet counts
		want, says   string
	}{
		"offered":                           {{offered: true, says: "device " + id(0) + " is still offered"}},
		"nobody":                            {{}},
		"only the checkpoint names a pod":   {{saved: id(0), want: id(0) + " p"}},
		"both name it":                      {{saved: id(0), named: id(0), want: id(0) + " p"}},
		"a replica":                         {{saved: id(0) + "::1", named: id(0) + "::1", want: id(0) + "::1 p"}},
		"another device":                    {{saved: id(1), named: id(1), healthy: id(1)}},
		"it has ended":                      {{saved: id(0), named: id(0), want: id(0) + " p"}, {saved: id(0)}},
		"a kubelet that never had a device": {{unread: fs.ErrNotExist}},
		"no checkpoint, and kubelet counts a device": {{unread: fs.ErrNotExist, healthy: id(1),
			says: "which devices pods hold"}},
		"no checkpoint, and it is not known what counts": {{unread: fs.ErrNotExist, lost: away,
			says: "which devices pods hold"}},
		"a checkpoint that is damaged":      {{unread: errors.New("damaged"), says: "which devices pods hold: damaged"}},
		"it is not known what counts":       {{lost: away, says: "which devices pods may get: away"}},
		"kubelet has not taken the list in": {{healthy: id(0), says: "kubelet still offers device " + id(0)}},
	} {
		var saved kubelet.Checkpoint
		var unread error
		set, c := unheard(t, func() (kubelet.Checkpoint, error) { return saved, unread })
		account := c.Accountant.(*saidAccount)
		held := func(id string) (all []kubelet.HeldDevice) {
			if id != "" {
				all = append(all, kubelet.HeldDevice{Resource: gpu, ID: id, Pod: "p"})
			}
			return all
		}
		d := &daemon{Servers: set}
		for i, step := range steps {
			if step.offered {
				d.offer(1)
			} else {
				d.offer(1, 0)
			}
			saved, unread = kubelet.Checkpoint{Held: held(step.saved)}, step.unread
			*account = saidAccount{held: held(step.named), lost: step.lost}
			if step.healthy != "" {
				account.healthy = map[string][]string{gpu: {step.healthy}}
			}
			users, err := set.Holders(t.Context(), []string{id(0)})
			got, said := "", ""
			for _, h := range users {
				got += h.ID + " " + h.Pod
			}
			if err != nil {
				said = err.Error()
			}
			if got != step.want || (said == "") != (step.says == "") || !strings.Contains(said, step.says) {
				t.Errorf("%s, reading %d: %q, %q, want %q, %q", name, i, got, said, step.want, step.says)
			}
		}
	}
}
