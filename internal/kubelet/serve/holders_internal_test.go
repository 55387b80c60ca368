package serve

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestWhatUsersSays in one reading after another of kubelet's accounts.
func TestWhatUsersSays(t *testing.T) {
	t.Parallel()
	const id, mine = "GPU-0", "GPU-0 p"
	away := errors.New("away")
	for name, steps := range map[string][]struct {
		offered              bool   // the device
		saved, told          string // the device that the checkpoint and PodResources name
		unread, failed, lost error  // of the checkpoint, PodResources, and what kubelet counts
		healthy              string // the device that kubelet counts
		want, says           string
		again                bool // the lists are sent again
	}{
		"on offer":                          {{offered: true, says: "device GPU-0 is still on offer"}},
		"nobody":                            {{}},
		"only the checkpoint names a pod":   {{saved: id, want: mine, again: true}},
		"both name it":                      {{saved: id, told: id, want: mine}},
		"a replica":                         {{saved: id + "::1", told: id + "::1", want: "GPU-0::1 p"}},
		"another device":                    {{saved: "GPU-1", told: "GPU-1", healthy: "GPU-1"}},
		"it has ended":                      {{saved: id, told: id, want: mine}, {saved: id, again: true}, {saved: id}},
		"a kubelet that never had a device": {{unread: fs.ErrNotExist}},
		"no checkpoint, and kubelet counts a device": {{unread: fs.ErrNotExist, healthy: "GPU-1",
			says: "which devices pods hold"}},
		"no checkpoint, and it is not known what counts": {{unread: fs.ErrNotExist, lost: away,
			says: "which devices pods hold"}},
		"a checkpoint that is damaged": {{unread: errors.New("damaged"),
			says: "which devices pods hold: damaged"}},
		"it is not known what counts":       {{lost: away, says: "which devices pods may get: away"}},
		"kubelet has not taken the list in": {{healthy: id, says: "kubelet still offers device GPU-0"}},
	} {
		clock := clocktesting.NewFakeClock(time.Now())
		account := &saidAccount{}
		var saved kubelet.Checkpoint
		var unread error
		s := NewServers(Collaborators{Clock: clock, Accountant: account, Incarnation: feed.New(uint64(1)),
			Checkpoint: func() (kubelet.Checkpoint, error) { return saved, unread }})
		offer := func(healthy bool) *list {
			r := oneGPU()
			r.Devices[0].Healthy = healthy
			s.Apply(resource.Plan{Resources: []resource.Resource{r}}, Options{}, 1)
			return s.resources[gpuName].list
		}
		for i, step := range steps {
			clock.Step(time.Millisecond)
			l := offer(step.offered)
			before := l.resend.Value()
			held := func(id string) (all []kubelet.HeldDevice) {
				if id != "" {
					all = append(all, kubelet.HeldDevice{Resource: gpuName, ID: id, Pod: "p"})
				}
				return all
			}
			saved, unread = kubelet.Checkpoint{Held: held(step.saved)}, step.unread
			account.held, account.failed, account.lost, account.healthy = held(step.told), step.failed, step.lost, nil
			if step.healthy != "" {
				account.healthy = map[string][]string{gpuName: {step.healthy}}
			}
			got, err := s.Holders(t.Context(), []string{id})
			var users []string
			for _, h := range got {
				users = append(users, h.ID+" "+h.Pod)
			}
			said := ""
			if err != nil {
				said = err.Error()
			}
			if strings.Join(users, ",") != step.want || (said == "") != (step.says == "") || !strings.Contains(said, step.says) {
				t.Errorf("%s, reading %d: %q, %q, want %q, %q", name, i, users, said, step.want, step.says)
			}
			if again := l.resend.Value() != before; again != step.again {
				t.Errorf("%s, reading %d: the lists are sent again: %v, want %v", name, i, again, step.again)
			}
		}
	}
}

// A saidAccount is kubelet's account as a test wants it.
type saidAccount struct {
	noCalls
	held         []kubelet.HeldDevice
	healthy      map[string][]string
	failed, lost error
}

func (a *saidAccount) Allocatable(context.Context) (map[string][]string, error) {
	return a.healthy, a.lost
}

func (a *saidAccount) Held(context.Context) ([]kubelet.HeldDevice, error) { return a.held, a.failed }
