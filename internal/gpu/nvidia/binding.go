package nvidia

import (
	"runtime"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// maxBindings is the maximum number of events of one wait. The next wait returns further events.
const maxBindings = 64

// bindings are the driver's events, since R575, about GPUs bound to the driver or unbound. A driver
// without these events, or that refuses them, is asked once in a session.
type bindings struct {
	api *api
	// request is nil without a set. It is allocated separately, and events is its only pointer to
	// Go memory, because cgo passes no other memory to a C function.
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
	if act(a, "nvmlSystemRegisterEvents",
		func() nvml.Return { return a.lib.SystemRegisterEvents(&register) }) != nvml.SUCCESS {
		_ = b.free(a) // an error has no consequence
	}
}

// wait waits up to timeout for GPUs to be bound or unbound, and reports a change. The next session
// finds the GPUs.
func (b *bindings) wait(timeout time.Duration) bool {
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
	case nvml.ERROR_INSUFFICIENT_SIZE: // with maxBindings events
		return true
	case nvml.ERROR_TIMEOUT:
		return false
	default:
		_ = b.free(b.api) // health checks find the changes from now on
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
