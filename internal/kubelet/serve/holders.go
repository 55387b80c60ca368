package serve

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// holderReader is the state behind Holders.
type holderReader struct {
	started atomic.Uint64 // how many readings of the accounts were begun

	mu       sync.Mutex // guards all following fields
	accounts accounts
	latest   reading
}

// A reading is the kubelet's information at one moment.
type reading struct {
	number  uint64
	account holders.Account
	healthy map[string][]string // by resource
	err     error               // why healthy is not known
}

// read returns a reading that began after the call. Concurrent callers share a
// reading, because the kubelet refuses frequent questions.
func (u *holderReader) read(ctx context.Context) reading {
	before := u.started.Load()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.latest.number > before {
		return u.latest
	}
	r := reading{number: u.started.Add(1), account: u.accounts.read(ctx).Account}
	limited, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	if r.healthy, r.err = u.accounts.Accountant.Allocatable(limited); ctx.Err() == nil {
		u.latest = r
	}
	return r
}

// Holders returns which pods hold the given GPUs or MIG devices, by UUID, under any
// resource and with all their replicas. If the error is nil, no other pod holds one
// of them, and no pod gets one while they are under a hold. The error says why the
// users are unknown: a device is still offered, the kubelet has not read the list
// or does not answer, or the kubelet may have allocated a device a short time ago.
func (s *Servers) Holders(ctx context.Context, uuids []string) ([]kubelet.HeldDevice, error) {
	isWanted := func(id string) bool {
		uuid, _ := resource.SplitID(id)
		return slices.Contains(uuids, uuid)
	}
	offered := s.stillOffered(isWanted)
	accounts := s.holderReader.read(ctx)
	a := accounts.account
	users, outdated, recent := s.users(a, isWanted, offered != nil)
	held := make([]kubelet.HeldDevice, 0, len(users))
	for key, holder := range users {
		held = append(held, kubelet.HeldDevice{Resource: key.Resource, ID: key.ID, Pod: holder.Pod})
	}
	order.Sort(held, func(a, b kubelet.HeldDevice) int { return strings.Compare(a.ID+a.Pod, b.ID+b.Pod) })
	if outdated {
		s.sendAgain()
	}
	switch {
	case offered != nil:
		return held, offered
	case a.NoCheckpoint && accounts.err == nil && len(accounts.healthy) == 0:
		return held, nil // a kubelet that never had a device
	case a.UnknownBecause != "":
		return held, fmt.Errorf("it is not known which devices pods hold: %s", a.UnknownBecause)
	case accounts.err != nil:
		return held, fmt.Errorf("it is not known which devices pods may get: %w", accounts.err)
	}
	for _, ids := range accounts.healthy {
		if i := slices.IndexFunc(ids, isWanted); i >= 0 {
			return held, fmt.Errorf("the kubelet still offers device %s", ids[i])
		}
	}
	return held, recent
}

// users returns the known holders of the devices, whether the lists are to be sent again because
// the checkpoint may be outdated, and an error if a pod has just been given one of the devices.
func (s *Servers) users(a holders.Account, isWanted func(id string) bool, offered bool) (
	users map[holders.Key]holders.Holder, outdated bool, recent error,
) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.collaborators.Clock.Now()
	users, outdated, recent = s.holders.Of(a, isWanted, offered, s.listing.HoldingStates(), now)
	return users, s.usersPacing.Due(now, outdated), recent
}

// stillOffered returns an error if a list of Servers still offers one of the devices.
func (s *Servers) stillOffered(isWanted func(id string) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, entry := range s.resources {
		for _, d := range entry.list.views.Value().response.Devices {
			if d.GetHealth() == pluginapi.Healthy && isWanted(d.GetID()) {
				return fmt.Errorf("device %s is still offered", d.GetID())
			}
		}
	}
	return nil
}
