package simulator

import (
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// unattributed is the GI or CI of an event without an instance.
const unattributed = 0xFFFFFFFF

// maxQueue is the capacity of a set. A full set drops the oldest events.
const maxQueue = 4096

// An eventSet collects the events of GPUs for one session.
type eventSet struct {
	nvml.EventSet // nil
	session       *session

	// Guarded by the node's mu.
	masks   map[*gpu]uint64 // the registered event types
	queue   []nvml.EventData
	isFreed bool
}

var _ nvml.EventSet = (*eventSet)(nil)

// eventBranches are the first driver branches with each event type.
var eventBranches = map[uint64]int{
	nvml.EventTypeSingleBitEccError: 1, nvml.EventTypeDoubleBitEccError: 1, nvml.EventTypePState: 1,
	nvml.EventTypeXidCriticalError: 1, nvml.EventMigConfigChange: 450,
	nvml.EventTypeSingleBitEccErrorStorm: 560, nvml.EventTypeDramRetirementEvent: 560,
	nvml.EventTypeDramRetirementFailure: 560, nvml.EventTypeNonFatalPoisonError: 560,
	nvml.EventTypeFatalPoisonError:    560,
	nvml.EventTypeGpuUnavailableError: 565, nvml.EventTypeGpuRecoveryAction: 565,
}

// supportedEvents returns the event types of a driver for a GPU.
func supportedEvents(g *gpu, branch int) uint64 {
	var mask uint64
	for event, since := range eventBranches {
		if branch >= since && (event != nvml.EventMigConfigChange || len(g.spec.model.MIG) > 0) {
			mask |= event
		}
	}
	return mask
}

// EventSetCreate returns a new, empty event set.
func (l *library) EventSetCreate() (nvml.EventSet, nvml.Return) {
	return query(l, "EventSetCreate", func(s *session) (nvml.EventSet, nvml.Return) {
		set := &eventSet{session: s, masks: map[*gpu]uint64{}}
		s.node.sets[set] = struct{}{}
		return set, nvml.SUCCESS
	})
}

// GetSupportedEventTypes returns the event types of the GPU on this driver.
func (d device) GetSupportedEventTypes() (uint64, nvml.Return) {
	return ask(d, "DeviceGetSupportedEventTypes", func(g *gpu) (uint64, nvml.Return) {
		return supportedEvents(g, d.session.driver.branch), nvml.SUCCESS
	})
}

// RegisterEvents adds event types of the GPU to a set. If the GPU lacks one of them, none is added.
func (d device) RegisterEvents(mask uint64, to nvml.EventSet) nvml.Return {
	_, ret := ask(d, "DeviceRegisterEvents", func(g *gpu) (struct{}, nvml.Return) {
		set, ok := to.(*eventSet)
		switch {
		case !ok || set.isFreed || set.session != d.session || mask == 0:
			return struct{}{}, nvml.ERROR_INVALID_ARGUMENT
		case mask&^supportedEvents(g, d.session.driver.branch) != 0:
			return struct{}{}, nvml.ERROR_NOT_SUPPORTED
		}
		set.masks[g] |= mask
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}

// Free frees the set.
func (s *eventSet) Free() nvml.Return {
	n := s.session.node
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stallLocked("EventSetFree", nil, nil)
	if ret := s.answerLocked("EventSetFree"); ret != nvml.SUCCESS {
		return ret
	}
	s.isFreed = true
	delete(n.sets, s)
	n.changeLocked()
	return nvml.SUCCESS
}

// answerLocked is session.answerLocked for calls on the set.
func (s *eventSet) answerLocked(call string) nvml.Return {
	if ret := s.session.answerLocked(call, nil); ret != nvml.SUCCESS {
		return ret
	}
	if s.isFreed {
		s.session.node.stale++
		return nvml.ERROR_INVALID_ARGUMENT
	}
	return nvml.SUCCESS
}

// Wait returns the next event; TIMEOUT if there is none within the given milliseconds.
func (s *eventSet) Wait(milliseconds uint32) (nvml.EventData, nvml.Return) {
	n := s.session.node
	n.mu.Lock()
	defer n.mu.Unlock()
	passed := n.stallLocked("EventSetWait", nil, nil)
	timeout := time.NewTimer(time.Duration(milliseconds) * time.Millisecond)
	defer timeout.Stop()
	expired := milliseconds == 0
	for {
		passed = n.stallLocked("EventSetWait", nil, passed)
		if ret := s.answerLocked("EventSetWait"); ret != nvml.SUCCESS {
			return nvml.EventData{}, ret
		}
		if len(s.queue) > 0 {
			event := s.queue[0]
			s.queue = s.queue[1:]
			return event, nvml.SUCCESS
		}
		for g := range s.masks {
			if g.isLost {
				return nvml.EventData{}, nvml.ERROR_GPU_IS_LOST
			}
		}
		if expired {
			return nvml.EventData{}, nvml.ERROR_TIMEOUT
		}
		changed := n.changed
		n.mu.Unlock()
		select {
		case <-changed:
		case <-timeout.C:
			expired = true
		}
		n.mu.Lock()
	}
}

// deliverLocked adds an event of a GPU to every set registered for it.
func (n *Node) deliverLocked(g *gpu, event, data uint64, gi, ci uint32) {
	for s := range n.sets {
		if !s.session.open || s.masks[g]&event == 0 {
			continue
		}
		if len(s.queue) == maxQueue {
			s.queue = s.queue[1:]
		}
		s.queue = append(s.queue, nvml.EventData{
			Device: device{session: s.session, gpu: g}, EventType: event, EventData: data,
			GpuInstanceId: gi, ComputeInstanceId: ci,
		})
	}
}
