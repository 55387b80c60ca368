package nvidia

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// eventKinds are the events that are registered for, by NVML's types. Single corrected memory
// errors are left out: there are many, and they do not make a GPU Unhealthy.
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

// retryGap is the time between two attempts to register for events that were not permitted.
const retryGap = time.Minute

// wantedEvents is the mask of eventKinds.
func wantedEvents() uint64 {
	var mask uint64
	for event := range eventKinds {
		mask |= event
	}
	return mask
}

// A watch is the event set of a session, with the GPUs in it.
type watch struct {
	api      *api            // for waits
	pinned   func() bool     // some other call hangs: it may use a set
	old      []nvml.EventSet // to be freed at the end, for that reason
	gpus     []watched       // those in the set
	set      nvml.EventSet   // nil without any
	refused  []watched       // the driver did not permit to register for their events
	asked    time.Time       // when it was asked for these
	bindings bindings
	queue    []inventory.Event // to be given before any is waited for
}

// A watched GPU gives events.
type watched struct {
	index  int
	uuid   string
	device device
	noMIG  bool // to register for changes of its MIG devices spoils the set
}

// An outcome is how one wait ended.
type outcome struct {
	event   inventory.Event
	found   bool // there is an event
	useless bool // the next wait should not begin at once
}

// A dropped GPU gives no more events.
type dropped struct {
	watched
	reason error
}

// arm puts a new set in place of the set, registers for the events of the GPUs and drops those for
// which it cannot. A GPU that spoils the set is dropped, or asked for fewer events, and the others
// go into another set.
func (w *watch) arm(a *api) []dropped {
	gpus := w.gpus
	var all []dropped
	for spoilt := true; spoilt; {
		set, ret := a.EventSetCreate()
		if err := failure("nvmlEventSetCreate", ret); err != nil {
			for _, g := range gpus {
				all = append(all, dropped{g, err})
			}
			w.replace(a, nil, nil)
			return all
		}
		w.gpus, spoilt = nil, false
		for i, g := range gpus {
			err := g.register(set)
			if spoilt = w.admit(g, err); err != nil && !errors.Is(err, errMIGEvents) {
				all = append(all, dropped{g, err})
			}
			if spoilt {
				gpus = slices.Concat(w.gpus, gpus[i+1:])
				break
			}
		}
		if spoilt || len(w.gpus) == 0 {
			_ = freeSet(a, set) // no call waits on it, and an error would change nothing
			set = nil
		}
		if !spoilt {
			w.replace(a, set, w.gpus)
		}
	}
	return all
}

// errMIGEvents says that to register for changes of MIG devices has spoilt the set.
var errMIGEvents = errors.New("no events of MIG devices")

// register adds the GPU's events to a set. A driver that refuses one type refuses the whole call;
// then only XIDs are registered. Changes of MIG devices are registered in a call of their own,
// because some drivers refuse only these. Looks find them as well.
func (g watched) register(set nvml.EventSet) error {
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

// again returns the GPUs for whose events it is time to register again, as that was not permitted.
// Permissions can change, and one refusal must not mean that the GPU gives no events for the rest
// of the session.
func (w *watch) again() []watched {
	if len(w.refused) == 0 || time.Since(w.asked) < retryGap {
		return nil
	}
	again := w.refused
	w.refused = nil
	return again
}

// add registers for the events of more GPUs that are not known yet, into the set that there is:
// events may wait in it. It returns those for which it could not.
func (w *watch) add(gpus []watched) []dropped {
	known := slices.Concat(w.gpus, w.refused)
	gpus = slices.DeleteFunc(gpus, func(g watched) bool {
		return slices.ContainsFunc(known, func(k watched) bool { return k.uuid == g.uuid })
	})
	if w.set == nil {
		w.gpus = append(w.gpus, gpus...)
		return w.arm(w.api)
	}
	spoilt := false
	var all []dropped
	for _, g := range gpus {
		err := g.register(w.set)
		if spoilt = w.admit(g, err) || spoilt; err != nil && !errors.Is(err, errMIGEvents) {
			all = append(all, dropped{g, err})
		}
	}
	if spoilt {
		all = append(all, w.arm(w.api)...)
	}
	return all
}

// admit takes note of how the registration of a GPU ended, and reports whether it has spoilt the
// set.
func (w *watch) admit(g watched, err error) (spoilt bool) {
	switch {
	case err == nil:
		w.gpus = append(w.gpus, g)
	case errors.Is(err, errMIGEvents):
		g.noMIG = true
		w.gpus = append(w.gpus, g)
		return true
	case errors.Is(err, nvml.ERROR_NO_PERMISSION):
		w.refused, w.asked = append(w.refused, g), time.Now()
	}
	return errors.Is(err, nvml.ERROR_UNKNOWN)
}

// replace frees the old set. An error of that would change nothing.
func (w *watch) replace(a *api, set nvml.EventSet, gpus []watched) {
	if w.set != nil && w.pinned() {
		w.old = append(w.old, w.set)
	} else if w.set != nil {
		_ = freeSet(a, w.set)
	}
	w.set, w.gpus = set, gpus
}

// end ends all that is waited on.
func (w *watch) end(a *api) error {
	var errs []error
	for _, set := range append(w.old, w.set) {
		if set != nil {
			errs = append(errs, freeSet(a, set))
		}
	}
	return errors.Join(append(errs, w.bindings.free(a))...)
}

func freeSet(a *api, set nvml.EventSet) error {
	return failure("nvmlEventSetFree", act(a, "nvmlEventSetFree", set.Free))
}

// wait waits for one event, for waitStep at most.
func (w *watch) wait() (outcome, error) {
	if len(w.queue) > 0 {
		event := w.queue[0]
		w.queue = w.queue[1:]
		return outcome{event: event, found: true}, nil
	}
	step := time.Duration(0) // two waits at a time would need two threads, and this event is not urgent
	if w.set == nil {
		step = waitStep
	}
	if w.bindings.changed(step) {
		event := inventory.Event{Kind: inventory.EventBinding, GI: inventory.Unattributed, CI: inventory.Unattributed}
		return outcome{event: event, found: true, useless: true}, nil // so that the session can be closed soon
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
		return w.lost(), nil
	default:
		return outcome{}, failure("nvmlEventSetWait", ret)
	}
}

// lost goes on with the GPUs that are not lost, after NVML answered that one is.
func (w *watch) lost() outcome {
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

// translate returns the event; false for a type that was not registered for.
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

// uuid returns the UUID of the GPU that an event names. A lost GPU may not answer; then its handle
// identifies it.
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

// instance returns the ID of a GPU or compute instance that an event names.
func instance(id uint32) int {
	if id == math.MaxUint32 {
		return inventory.Unattributed
	}
	return int(id)
}
