package serve

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// holderReader is the state behind Holders.
type holderReader struct {
	started atomic.Uint64 // how many readings of the accounts were begun

	mu            sync.Mutex // guards all following fields
	accounts      accounts
	latest        reading
	pacing        resendPacing
	confirmations map[deviceKey]confirmation // what showed a holder while the device was not on offer
}

// A confirmation says which kubelet showed a holder of a device, and how often the device had
// been allocated by then.
type confirmation struct {
	source      source
	allocations uint64
}

// A reading is the kubelet's information at one moment.
type reading struct {
	number  uint64
	held    evidence
	healthy map[string][]string // by resource
	err     error               // why healthy is not known
}

// read returns a reading that began after the call. Concurrent callers share a reading, because the
// kubelet refuses frequent questions.
func (u *holderReader) read(ctx context.Context) reading {
	before := u.started.Load()
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.latest.number > before {
		return u.latest
	}
	r := reading{number: u.started.Add(1), held: u.accounts.read(ctx)}
	limited, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	if r.healthy, r.err = u.accounts.Accountant.Allocatable(limited); ctx.Err() == nil {
		u.latest = r
	}
	return r
}

// Holders returns which pods hold the given GPUs or MIG devices, by UUID, under any resource and
// with all their replicas. If the error is nil, no other pod holds one of them, and no pod gets one
// while they are under a hold. The error says why the users are unknown: a device is still offered,
// the kubelet has not read the list or does not answer, or the kubelet may have allocated a device
// a short time ago.
func (s *Servers) Holders(ctx context.Context, uuids []string) ([]kubelet.HeldDevice, error) {
	asked := func(id string) bool {
		uuid, _ := resource.SplitID(id)
		return slices.Contains(uuids, uuid)
	}
	onOffer, allocations := s.onOffer(asked), s.allocations()
	told := s.holderReader.read(ctx)
	e := told.held
	s.holderReader.mu.Lock()
	defer s.holderReader.mu.Unlock()
	var held []kubelet.HeldDevice
	outdated := false
	for key, holder := range e.held {
		if !asked(key.id) {
			continue
		}
		switch {
		case onOffer != nil: // another pod may get it
			delete(s.holderReader.confirmations, key)
		case !holder.checkpointOnly:
			s.holderReader.confirmations[key] = confirmation{e.source, allocations[key]}
		}
		outdated = outdated || holder.checkpointOnly
		if ended := holder.checkpointOnly && e.source != (source{}) &&
			s.holderReader.confirmations[key] == (confirmation{e.source, allocations[key]}); !ended {
			held = append(held, kubelet.HeldDevice{Resource: key.resource, ID: key.id, Pod: holder.pod})
		}
	}
	slices.SortFunc(held, func(a, b kubelet.HeldDevice) int { return strings.Compare(a.ID+a.Pod, b.ID+b.Pod) })
	if s.holderReader.pacing.due(s.collaborators.Clock.Now(), outdated) {
		s.sendAgain()
	}
	switch {
	case onOffer != nil:
		return held, onOffer
	case e.noCheckpoint && told.err == nil && len(told.healthy) == 0:
		return held, nil // a kubelet that never had a device
	case e.unknownBecause != "":
		return held, fmt.Errorf("it is not known which devices pods hold: %s", e.unknownBecause)
	case told.err != nil:
		return held, fmt.Errorf("it is not known which devices pods may get: %w", told.err)
	}
	for _, ids := range told.healthy {
		if i := slices.IndexFunc(ids, asked); i >= 0 {
			return held, fmt.Errorf("the kubelet still offers device %s", ids[i])
		}
	}
	return held, s.justAllocated(asked, e, allocations)
}

// allocations returns how often each device was allocated. A device that is not on offer is no
// longer allocated.
func (s *Servers) allocations() map[deviceKey]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.allocationCount)
}

// onOffer returns an error if a list of Servers still offers one of the devices.
func (s *Servers) onOffer(asked func(id string) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, entry := range s.resources {
		for _, d := range entry.list.views.Value().response.Devices {
			if d.GetHealth() == pluginapi.Healthy && asked(d.GetID()) {
				return fmt.Errorf("device %s is still on offer", d.GetID())
			}
		}
	}
	return nil
}

// justAllocated returns an error if one of the devices was allocated a short time ago and the
// accounts have not shown its pod.
func (s *Servers) justAllocated(asked func(id string) bool, e evidence, allocations map[deviceKey]uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.collaborators.Clock.Now()
	for name, entry := range s.resources {
		recent := func(id string, at time.Time) bool {
			key := deviceKey{name, id}
			_, held := e.held[key]
			shown := held || e.source != (source{}) &&
				s.holderReader.confirmations[key] == (confirmation{e.source, allocations[key]})
			return asked(id) && !shown && !at.IsZero() && now.Sub(at) < freeFor
		}
		for id, at := range entry.list.lastAllocate {
			if recent(id, at) {
				return fmt.Errorf("device %s: %s", id, waitsForAllocate)
			}
		}
		for id, d := range entry.list.retiring {
			if recent(id, d.lastAllocate) {
				return fmt.Errorf("device %s: %s", id, waitsForAllocate)
			}
		}
	}
	return nil
}
