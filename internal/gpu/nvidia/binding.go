package nvidia

import (
	"runtime"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// maxBindings is how many events one wait returns at most. The next wait returns the rest.
const maxBindings = 64

// bindings are the events of a driver since R575 that say that GPUs were bound to it, or unbound. A
// driver that does not have them, or does not permit them, is asked once in a session.
type bindings struct {
	api *api
	// request is nil without a set. It is an allocation of its own, and the one pointer to Go's memory
	// in it is events: cgo refuses to hand a function in C anything else.
	request *nvml.SystemEventSetWaitRequest
	events  *[maxBindings]nvml.SystemEventData_v1
}

// start registers for the events.
func (b *bindings) start(a *api) {
	var create nvml.SystemEventSetCreateRequest
	create.Version = nvml.STRUCT_VERSION(create, 1)
	if a.SystemEventSetCreate(&create) != nvml.SUCCESS {
		return
	}
	b.events = new([maxBindings]nvml.SystemEventData_v1)
	b.request = &nvml.SystemEventSetWaitRequest{Set: create.Set, Data: &b.events[0], DataSize: maxBindings}
	register := nvml.SystemRegisterEventRequest{
		EventTypes: nvml.SystemEventTypeGpuDriverBind | nvml.SystemEventTypeGpuDriverUnbind, Set: create.Set,
	}
	register.Version = nvml.STRUCT_VERSION(register, 1)
	if act(a, "nvmlSystemRegisterEvents", func() nvml.Return { return a.lib.SystemRegisterEvents(&register) }) != nvml.SUCCESS {
		_ = b.free(a) // it is of no use, and an error would change nothing
	}
}

// changed waits until GPUs were bound or unbound, for timeout at most, and reports whether they
// were. The next session finds out which.
func (b *bindings) changed(timeout time.Duration) bool {
	if b.request == nil {
		return false
	}
	var pin runtime.Pinner
	pin.Pin(b.events)
	defer pin.Unpin()
	b.request.Version = nvml.STRUCT_VERSION(b.request, 1)
	b.request.Timeoutms, b.request.NumEvent = uint32(timeout.Milliseconds()), 0
	switch act(b.api, "nvmlSystemEventSetWait", func() nvml.Return { return b.api.lib.SystemEventSetWait(b.request) }) {
	case nvml.SUCCESS:
		return b.request.NumEvent > 0
	case nvml.ERROR_INSUFFICIENT_SIZE: // for all there are
		return true
	case nvml.ERROR_TIMEOUT:
		return false
	default:
		_ = b.free(b.api) // the looks find out then
		return false
	}
}

// free frees the set.
func (b *bindings) free(a *api) error {
	if b.request == nil {
		return nil
	}
	free := nvml.SystemEventSetFreeRequest{Set: b.request.Set}
	free.Version = nvml.STRUCT_VERSION(free, 1)
	b.request = nil
	return failure("nvmlSystemEventSetFree", act(a, "nvmlSystemEventSetFree",
		func() nvml.Return { return a.lib.SystemEventSetFree(&free) }))
}
