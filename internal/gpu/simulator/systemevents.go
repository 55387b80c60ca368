package simulator

import (
	"time"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A systemSet collects the events of the whole node for a session. A session has at most one. Its
// fields are guarded by the node's mu. Users refer to it by their session: the handle in their
// requests stays nil, because its type is go-nvml's own.
type systemSet struct {
	mask  uint64 // the registered event types
	queue []nvml.SystemEventData_v1
}

// system makes a call about the system set of the session, with a request of version 1.
func system[T any](l *library, call string, request T, version uint32, answer func(*session) nvml.Return) nvml.Return {
	_, ret := query(l, call, func(s *session) (struct{}, nvml.Return) {
		if version != nvml.STRUCT_VERSION(request, 1) {
			return struct{}{}, nvml.ERROR_ARGUMENT_VERSION_MISMATCH
		}
		return struct{}{}, answer(s)
	})
	return ret
}

// SystemEventSetCreate creates the set of the session.
func (l *library) SystemEventSetCreate(r *nvml.SystemEventSetCreateRequest) nvml.Return {
	return system(l, "SystemEventSetCreate", r, r.Version, func(s *session) nvml.Return {
		if s.system != nil {
			return nvml.ERROR_INSUFFICIENT_RESOURCES
		}
		s.system = &systemSet{}
		s.node.systemSets++
		return nvml.SUCCESS
	})
}

// SystemRegisterEvents adds event types to the set.
func (l *library) SystemRegisterEvents(r *nvml.SystemRegisterEventRequest) nvml.Return {
	return system(l, "SystemRegisterEvents", r, r.Version, func(s *session) nvml.Return {
		const known = nvml.SystemEventTypeGpuDriverBind | nvml.SystemEventTypeGpuDriverUnbind
		switch {
		case s.system == nil || r.EventTypes == 0:
			return nvml.ERROR_INVALID_ARGUMENT
		case r.EventTypes&^known != 0:
			return nvml.ERROR_NOT_SUPPORTED
		}
		s.system.mask |= r.EventTypes
		return nvml.SUCCESS
	})
}

// SystemEventSetFree frees the set.
func (l *library) SystemEventSetFree(r *nvml.SystemEventSetFreeRequest) nvml.Return {
	return system(l, "SystemEventSetFree", r, r.Version, func(s *session) nvml.Return {
		if s.system == nil {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		s.system = nil
		s.node.systemSets--
		return nvml.SUCCESS
	})
}

// SystemEventSetWait returns the next events; TIMEOUT if there are none within the request's
// timeout.
func (l *library) SystemEventSetWait(r *nvml.SystemEventSetWaitRequest) nvml.Return {
	changed, ret := l.takeSystemEvents(r)
	if ret != nvml.ERROR_TIMEOUT || r.Timeoutms == 0 {
		return ret
	}
	timeout := time.NewTimer(time.Duration(r.Timeoutms) * time.Millisecond)
	defer timeout.Stop()
	for ret == nvml.ERROR_TIMEOUT {
		select {
		case <-changed:
		case <-timeout.C:
			return nvml.ERROR_TIMEOUT
		}
		changed, ret = l.takeSystemEvents(r)
	}
	return ret
}

// takeSystemEvents fills the request with events. Without events it returns TIMEOUT and the channel
// to wait for.
func (l *library) takeSystemEvents(r *nvml.SystemEventSetWaitRequest) (changed <-chan struct{}, ret nvml.Return) {
	ret = system(l, "SystemEventSetWait", r, r.Version, func(s *session) nvml.Return {
		changed = s.node.changed
		switch {
		case s.system == nil || r.Data == nil || r.DataSize == 0:
			return nvml.ERROR_INVALID_ARGUMENT
		case len(s.system.queue) == 0:
			return nvml.ERROR_TIMEOUT
		}
		n := copy(unsafe.Slice(r.Data, r.DataSize), s.system.queue)
		s.system.queue = s.system.queue[n:]
		r.NumEvent = uint32(n)
		return nvml.SUCCESS
	})
	return changed, ret
}

// deliverSystemLocked adds an event of a GPU to every system set registered for it.
func (n *Node) deliverSystemLocked(g *gpu, event uint64) {
	for s := range n.sessions {
		if s.system == nil || s.system.mask&event == 0 || len(s.system.queue) == maxQueue {
			continue
		}
		pci := g.spec.pci
		s.system.queue = append(s.system.queue, nvml.SystemEventData_v1{
			EventType: event, GpuId: pci.Domain<<16 | pci.Bus<<8 | pci.Device,
		})
	}
}
