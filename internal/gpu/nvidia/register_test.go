package nvidia_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// An eventLibrary answers for a simulated one what a test wants of events.
type eventLibrary struct {
	nvml.Interface
	register func(mask uint64) nvml.Return        // SUCCESS to have the simulator register
	wait     func() (nvml.EventData, nvml.Return) // nil for the simulator's
	masks    []uint64                             // that were registered, of the latest set
}

type eventDevice struct {
	nvml.Device
	library *eventLibrary
}

type eventSet struct {
	nvml.EventSet
	library *eventLibrary
}

func (l *eventLibrary) DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return) {
	d, ret := l.Interface.DeviceGetHandleByIndex(index)
	return eventDevice{d, l}, ret
}

func (l *eventLibrary) EventSetCreate() (nvml.EventSet, nvml.Return) {
	set, ret := l.Interface.EventSetCreate()
	l.masks = nil
	return eventSet{set, l}, ret
}

func (d eventDevice) RegisterEvents(mask uint64, set nvml.EventSet) nvml.Return {
	if d.library.register != nil {
		if ret := d.library.register(mask); ret != nvml.SUCCESS {
			return ret
		}
	}
	d.library.masks = append(d.library.masks, mask)
	return d.Device.RegisterEvents(mask, set.(eventSet).EventSet)
}

func (s eventSet) Wait(milliseconds uint32) (nvml.EventData, nvml.Return) {
	if s.library.wait != nil {
		return s.library.wait()
	}
	return s.EventSet.Wait(milliseconds)
}

// openWith opens a session of a simulated node through an eventLibrary.
func openWith(t *testing.T, profile string, lib *eventLibrary) *nvidia.Session {
	t.Helper()
	return openNode(t, newNode(t, profile), lib)
}

// openNode is openWith for a node.
func openNode(t *testing.T, node *simulator.Node, lib *eventLibrary) *nvidia.Session {
	t.Helper()
	lib.Interface = node.NVML()
	s, err := nvidia.New(nvidia.Options{Library: lib, Root: node.Root()}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return s
}

// TestRegisterMIGEventsApart has drivers refuse the events of MIG devices: all others are
// registered for.
func TestRegisterMIGEventsApart(t *testing.T) {
	t.Parallel()
	const others = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError | nvml.EventTypeGpuRecoveryAction
	for name, refusal := range map[string]nvml.Return{
		"not supported": nvml.ERROR_NOT_SUPPORTED, "no permission": nvml.ERROR_NO_PERMISSION,
		"the set is spoilt": nvml.ERROR_UNKNOWN,
		"not refused":       nvml.SUCCESS,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lib := &eventLibrary{register: func(mask uint64) nvml.Return {
				if mask&nvml.EventMigConfigChange != 0 {
					return refusal
				}
				return nvml.SUCCESS
			}}
			s := openWith(t, "a100-mig-mixed", lib)
			if unwatched := s.Unwatched(); len(unwatched) > 0 {
				t.Errorf("GPUs without events: %v", unwatched)
			}
			var all uint64
			for _, mask := range lib.masks {
				all |= mask
			}
			if all&others != others {
				t.Errorf("registered for %#x, want all of %#x", all, uint64(others))
			}
			if mig := all&nvml.EventMigConfigChange != 0; mig != (refusal == nvml.SUCCESS) {
				t.Errorf("registered for events of MIG devices: %v", mig)
			}
		})
	}
}

// TestRegisterAgain permits events of a GPU some time after the session was opened.
func TestRegisterAgain(t *testing.T) {
	t.Parallel()
	for name, gpu := range map[string]string{"one GPU": "1", "all GPUs": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, "a100-mig-mixed",
					simulator.Fault{Kind: simulator.KindFail, GPU: gpu, Call: "DeviceRegisterEvents",
						Return: "NO_PERMISSION"})
				r.ctx = t.Context()
				timer := time.AfterFunc(90*time.Second, func() {
					r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: gpu})
				})
				defer timer.Stop()
				later := time.AfterFunc(90*time.Second+retryGap+2*waitStep+maxPause, func() {
					r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 31})
				})
				defer later.Stop()
				event, err := r.Next(r.within(time.Hour))
				if err != nil || event.XID != 31 {
					t.Errorf("got event %+v and error %v, want XID 31", event, err)
				}
			})
		})
	}
}

// TestWaitsAtOnce has waits end at once, whatever they return. A hundred a second, which is the
// most, take less than a thousandth of a core.
func TestWaitsAtOnce(t *testing.T) {
	t.Parallel()
	event := func(kind uint64, data uint64) func() (nvml.EventData, nvml.Return) {
		return func() (nvml.EventData, nvml.Return) {
			return nvml.EventData{EventType: kind, EventData: data, GpuInstanceId: 0xffffffff,
				ComputeInstanceId: 0xffffffff}, nvml.SUCCESS
		}
	}
	answer := func(ret nvml.Return) func() (nvml.EventData, nvml.Return) {
		return func() (nvml.EventData, nvml.Return) { return nvml.EventData{}, ret }
	}
	for name, wait := range map[string]func() (nvml.EventData, nvml.Return){
		"XIDs":                             event(nvml.EventTypeXidCriticalError, 31),
		"events that nobody asked for":     event(nvml.EventTypePState, 0),
		"events of a type that is unknown": event(1<<40, 0),
		"time-outs":                        answer(nvml.ERROR_TIMEOUT),
		"a lost GPU":                       answer(nvml.ERROR_GPU_IS_LOST),
		"errors":                           answer(nvml.ERROR_UNKNOWN),
		"refusals":                         answer(nvml.ERROR_NO_PERMISSION),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const span = 100 * time.Second
				const limit = waitBurst + int(span/waitGap) + 1
				ctx, cancel := context.WithTimeout(t.Context(), span)
				defer cancel()
				waits := 0
				lib := &eventLibrary{}
				lib.wait = func() (nvml.EventData, nvml.Return) {
					if waits++; waits > limit {
						cancel() // without a pause between waits the bubble's time stands still
					}
					data, ret := wait()
					data.Device, _ = lib.Interface.DeviceGetHandleByIndex(0)
					return data, ret
				}
				s := openWith(t, "t4", lib)
				for ctx.Err() == nil {
					_, _ = s.Next(ctx) // an event or an error, as the waits say
				}
				synctest.Wait() // the last wait has ended, too
				if waits < 2 {
					t.Errorf("%d waits: the test does not test", waits)
				}
				if waits > limit {
					t.Errorf("%d waits in %v, want at most %d", waits, span, limit)
				}
			})
		})
	}
	t.Run("events that come together", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "t4")
			r.ctx = t.Context()
			for range 100 {
				r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 31})
			}
			start := time.Now()
			for range 100 {
				compare(t, "event", inventory.EventXID, r.next().Kind)
			}
			if took := time.Since(start); took > 0 {
				t.Errorf("a hundred events took %v", took)
			}
		})
	})
}
