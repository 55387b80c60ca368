package nvidia

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// eventKinds are the registered events, by NVML's types. Single corrected memory errors are
// missing: they are frequent, and do not make a GPU Unhealthy.
var eventKinds = map[uint64]inventory.EventKind{
	nvml.EventTypeXidCriticalError:       inventory.EventXID,
	nvml.EventMigConfigChange:            inventory.EventMIGChange,
	nvml.EventTypeDoubleBitEccError:      inventory.EventDoubleBitECC,
	nvml.EventTypeSingleBitEccErrorStorm: inventory.EventSingleBitECCStorm,
	nvml.EventTypeDramRetirementEvent:    inventory.EventDRAMRetirement,
	nvml.EventTypeDramRetirementFailure:  inventory.EventDRAMRetirementFailure,
	nvml.EventTypeNonFatalPoisonError:    inventory.EventNonFatalPoison,
	nvml.EventTypeFatalPoisonError:       inventory.EventFatalPoison,
	nvml.EventTypeGpuUnavailableError:    inventory.EventUnavailable,
	nvml.EventTypeGpuRecoveryAction:      inventory.EventRecoveryAction,
}

// retryGap is the time between two attempts to register for refused events.
const retryGap = time.Minute

// wantedEvents is the mask of eventKinds.
func wantedEvents() uint64 {
	var mask uint64
	for event := range eventKinds {
		mask |= event
	}
	return mask
}

// A watch is the event set of a session with its GPUs.
type watch struct {
	api         *api            // for waits
	pinned      func() bool     // reports whether another call hangs and may use a set
	pinnedSets  []nvml.EventSet // sets to be freed at the end, because they were pinned
	gpus        []watchedGPU    // GPUs in the set
	set         nvml.EventSet   // nil without a set
	refusedGPUs []watchedGPU    // GPUs whose events the driver refused
	lastAttempt time.Time       // time of the last attempt for refused
	bindings    bindings
	queue       []inventory.Event // events to return before any wait
}

// A watchedGPU is a GPU with events.
type watchedGPU struct {
	index  int
	uuid   string
	device device
	noMIG  bool // registering for its MIG changes makes the set unusable
}

// An outcome is the result of one wait.
type outcome struct {
	event   inventory.Event
	found   bool // there is an event
	useless bool // the next wait should be delayed
}

// A droppedGPU has no more events.
type droppedGPU struct {
	watchedGPU
	reason error
}

// arm replaces the set, registers for the events of the GPUs, and drops the GPUs that fail. A GPU
// that makes the set unusable is dropped, or registered for fewer events, and the others go into
// another set.
func (w *watch) arm(a *api) []droppedGPU {
	gpus := w.gpus
	var all []droppedGPU
	for spoilt := true; spoilt; {
		set, ret := a.EventSetCreate()
		if err := failure("nvmlEventSetCreate", ret); err != nil {
			for _, g := range gpus {
				all = append(all, droppedGPU{g, err})
			}
			w.replace(a, nil, nil)
			return all
		}
		w.gpus, spoilt = nil, false
		for i, g := range gpus {
			err := g.register(set)
			if spoilt = w.admit(g, err); err != nil && !errors.Is(err, errMIGEvents) {
				all = append(all, droppedGPU{g, err})
			}
			if spoilt {
				gpus = slices.Concat(w.gpus, gpus[i+1:])
				break
			}
		}
		if spoilt || len(w.gpus) == 0 {
			_ = freeSet(a, set) // no wait uses the set, and an error has no consequence
			set = nil
		}
		if !spoilt {
			w.replace(a, set, w.gpus)
		}
	}
	return all
}

// errMIGEvents is the error for a set made unusable by registering for MIG changes.
var errMIGEvents = errors.New("no events of MIG devices")

// register adds the GPU's events to a set. A driver that refuses one type refuses the whole call;
// then only XIDs are registered. MIG changes are registered in a separate call, because some
// drivers refuse only MIG changes. Scans also find them.
func (g watchedGPU) register(set nvml.EventSet) error {
	supported, ret := g.device.GetSupportedEventTypes()
	if err := failure("nvmlDeviceGetSupportedEventTypes", ret); err != nil {
		return err
	}
	wanted := supported & wantedEvents()
	mig := wanted & nvml.EventMigConfigChange
	wanted -= mig
	if wanted == 0 {
		return failure("nvmlDeviceGetSupportedEventTypes", nvml.ERROR_NOT_SUPPORTED)
	}
	ret = g.device.RegisterEvents(wanted, set)
	if refused := ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_NO_PERMISSION; refused &&
		wanted != nvml.EventTypeXidCriticalError {
		ret = g.device.RegisterEvents(nvml.EventTypeXidCriticalError, set)
	}
	if ret == nvml.SUCCESS && mig != 0 && !g.noMIG && g.device.RegisterEvents(mig, set) == nvml.ERROR_UNKNOWN {
		return errMIGEvents
	}
	return failure("nvmlDeviceRegisterEvents", ret)
}

// dueRefused returns the GPUs whose refused registration is due again. Permissions can change, and
// one refusal must not disable the events of a GPU for the rest of the session.
func (w *watch) dueRefused() []watchedGPU {
	if len(w.refusedGPUs) == 0 || time.Since(w.lastAttempt) < retryGap {
		return nil
	}
	again := w.refusedGPUs
	w.refusedGPUs = nil
	return again
}

// add registers for the events of more GPUs in the existing set, because events may wait in the
// set. It returns the GPUs that failed.
func (w *watch) add(gpus []watchedGPU) []droppedGPU {
	known := slices.Concat(w.gpus, w.refusedGPUs)
	gpus = slices.DeleteFunc(gpus, func(g watchedGPU) bool {
		return slices.ContainsFunc(known, func(k watchedGPU) bool { return k.uuid == g.uuid })
	})
	if w.set == nil {
		w.gpus = append(w.gpus, gpus...)
		return w.arm(w.api)
	}
	spoilt := false
	var all []droppedGPU
	for _, g := range gpus {
		err := g.register(w.set)
		if spoilt = w.admit(g, err) || spoilt; err != nil && !errors.Is(err, errMIGEvents) {
			all = append(all, droppedGPU{g, err})
		}
	}
	if spoilt {
		all = append(all, w.arm(w.api)...)
	}
	return all
}

// admit records the result of registering a GPU, and reports whether the set is now unusable.
func (w *watch) admit(g watchedGPU, err error) (spoilt bool) {
	switch {
	case err == nil:
		w.gpus = append(w.gpus, g)
	case errors.Is(err, errMIGEvents):
		g.noMIG = true
		w.gpus = append(w.gpus, g)
		return true
	case errors.Is(err, nvml.ERROR_NO_PERMISSION):
		w.refusedGPUs, w.lastAttempt = append(w.refusedGPUs, g), time.Now()
	}
	return errors.Is(err, nvml.ERROR_UNKNOWN)
}

// replace frees the old set, ignoring errors.
func (w *watch) replace(a *api, set nvml.EventSet, gpus []watchedGPU) {
	if w.set != nil && w.pinned() {
		w.pinnedSets = append(w.pinnedSets, w.set)
	} else if w.set != nil {
		_ = freeSet(a, w.set)
	}
	w.set, w.gpus = set, gpus
}

// end frees all sets.
func (w *watch) end(a *api) error {
	var errs []error
	for _, set := range append(w.pinnedSets, w.set) {
		if set != nil {
			errs = append(errs, freeSet(a, set))
		}
	}
	return errors.Join(append(errs, w.bindings.free(a))...)
}

func freeSet(a *api, set nvml.EventSet) error {
	return failure("nvmlEventSetFree", act(a, "nvmlEventSetFree", set.Free))
}

// wait waits for one event, up to waitStep.
func (w *watch) wait() (outcome, error) {
	if len(w.queue) > 0 {
		event := w.queue[0]
		w.queue = w.queue[1:]
		return outcome{event: event, found: true}, nil
	}
	step := time.Duration(0) // two simultaneous waits would need two threads, and this event is not urgent
	if w.set == nil {
		step = waitStep
	}
	if w.bindings.wait(step) {
		event := inventory.Event{Kind: inventory.EventBinding, GI: inventory.Unattributed, CI: inventory.Unattributed}
		return outcome{event: event, found: true, useless: true}, nil // allows the session to close soon
	}
	if w.set == nil {
		return outcome{useless: w.bindings.request == nil}, nil
	}
	data, ret := invoke(w.api, "nvmlEventSetWait", func() (nvml.EventData, nvml.Return) {
		return w.set.Wait(uint32(waitStep.Milliseconds()))
	})
	switch ret {
	case nvml.SUCCESS:
		event, ok := w.translate(data)
		return outcome{event: event, found: ok}, nil
	case nvml.ERROR_TIMEOUT:
		return outcome{}, nil
	case nvml.ERROR_GPU_IS_LOST:
		return w.dropLost(), nil
	default:
		return outcome{}, failure("nvmlEventSetWait", ret)
	}
}

// dropLost continues with the GPUs that are not lost, after NVML reported a lost GPU.
func (w *watch) dropLost() outcome {
	for _, d := range w.arm(w.api) {
		w.queue = append(w.queue, inventory.Event{
			Kind: inventory.EventLost, UUID: d.uuid, GI: inventory.Unattributed, CI: inventory.Unattributed,
		})
	}
	if len(w.queue) == 0 {
		event := inventory.Event{Kind: inventory.EventLost, GI: inventory.Unattributed, CI: inventory.Unattributed}
		return outcome{event: event, found: true, useless: true}
	}
	event := w.queue[0]
	w.queue = w.queue[1:]
	return outcome{event: event, found: true}
}

// translate returns the event; false for an unregistered type.
func (w *watch) translate(data nvml.EventData) (inventory.Event, bool) {
	kind, ok := eventKinds[data.EventType]
	event := inventory.Event{
		Kind: kind, UUID: w.uuid(data.Device), GI: inventory.Unattributed, CI: inventory.Unattributed,
	}
	if kind == inventory.EventXID {
		event.XID = data.EventData
		event.GI, event.CI = instance(data.GpuInstanceId), instance(data.ComputeInstanceId)
	}
	return event, ok
}

// uuid returns the UUID of the GPU of an event. A lost GPU may not answer; the handle then
// identifies the GPU.
func (w *watch) uuid(handle nvml.Device) string {
	for _, g := range w.gpus {
		if g.device.handle == handle {
			return g.uuid
		}
	}
	uuid, ret := device{w.api, handle}.GetUUID()
	if ret != nvml.SUCCESS {
		return ""
	}
	return uuid
}

// instance returns the ID of the GPU or compute instance of an event.
func instance(id uint32) int {
	if id == math.MaxUint32 {
		return inventory.Unattributed
	}
	return int(id)
}
