package nvidia_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// registrations are how a test answers registrations for events.
type registrations struct {
	answer    func(gpu int, mask uint64) nvml.Return // SUCCESS to have the simulator register
	supported uint64                                 // the types that GPUs have; 0 for the simulator's
	masks     []uint64                               // that were asked for
}

type registeringDevice struct {
	nvml.Device
	gpu int
	*registrations
}

func (d registeringDevice) GetSupportedEventTypes() (uint64, nvml.Return) {
	if d.supported != 0 {
		return d.supported, nvml.SUCCESS
	}
	return d.Device.GetSupportedEventTypes()
}

func (d registeringDevice) RegisterEvents(mask uint64, set nvml.EventSet) nvml.Return {
	d.masks = append(d.masks, mask)
	if ret := d.answer(d.gpu, mask); ret != nvml.SUCCESS {
		return ret
	}
	return d.Device.RegisterEvents(mask, set)
}

// newRegisteringRig is newRig with answers to registrations.
func newRegisteringRig(t *testing.T, profile string, answers *registrations, faults ...simulator.Fault) *rig {
	t.Helper()
	if answers.answer == nil {
		answers.answer = func(int, uint64) nvml.Return { return nvml.SUCCESS }
	}
	return newRigWith(t, profile, hook(hookedLibrary{device: func(index int, d nvml.Device) nvml.Device {
		return registeringDevice{d, index, answers}
	}}), faults...)
}

// TestRegisterLater has a GPU join whose call hung when the session was opened: however it answers,
// the others give events.
func TestRegisterLater(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		refused uint64 // types that the GPU refuses
		ret     nvml.Return
		want    string // why it gives no events
	}{
		"it gives events": {0, nvml.SUCCESS, ""},
		"not supported":   {^uint64(0), nvml.ERROR_NOT_SUPPORTED, "nvmlDeviceRegisterEvents: not supported"},
		"no permission": {^uint64(0), nvml.ERROR_NO_PERMISSION,
			"nvmlDeviceRegisterEvents: ERROR_NO_PERMISSION"},
		"the set is spoilt":          {^uint64(0), nvml.ERROR_UNKNOWN, "nvmlDeviceRegisterEvents: ERROR_UNKNOWN"},
		"its MIG events spoil it":    {nvml.EventMigConfigChange, nvml.ERROR_UNKNOWN, ""},
		"its MIG events are refused": {nvml.EventMigConfigChange, nvml.ERROR_NOT_SUPPORTED, ""},
		"another kind than XIDs is":  {nvml.EventTypeDoubleBitEccError, nvml.ERROR_NOT_SUPPORTED, ""},
		"another is not permitted":   {nvml.EventTypeDoubleBitEccError, nvml.ERROR_NO_PERMISSION, ""},
		"another kind spoils the set": {nvml.EventTypeDoubleBitEccError, nvml.ERROR_UNKNOWN,
			"nvmlDeviceRegisterEvents: ERROR_UNKNOWN"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				answers := &registrations{answer: func(gpu int, mask uint64) nvml.Return {
					if gpu == 3 && mask&tt.refused != 0 {
						return tt.ret
					}
					return nvml.SUCCESS
				}}
				r := newRegisteringRig(t, "a100-mig-mixed", answers, hang("3", "DeviceGetHandleByIndex"))
				r.inject(restore)
				synctest.Wait() // the call has returned
				compare(t, "GPUs", 8, len(r.scan().GPUs))
				if e, err := r.Next(r.within(2 * waitStep)); err == nil {
					t.Errorf("event %+v", e)
				}
				unwatched := r.Unwatched()
				if (len(unwatched) > 0) != (tt.want != "") || len(unwatched) > 0 &&
					(unwatched[0].Index != 3 || !strings.HasPrefix(unwatched[0].Reason, tt.want)) {
					t.Errorf("unwatched: %v, want %q", unwatched, tt.want)
				}
				compare(t, "event sets", 1, r.node.Stats().EventSets)
				for _, gpu := range []int{3, 5} {
					r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: string(rune('0' + gpu)), XID: 31})
					if gpu == 3 && tt.want != "" {
						continue
					}
					if e := r.next(); e.XID != 31 || e.UUID != r.uuid(gpu) {
						t.Errorf("event %+v, want one of GPU %d", e, gpu)
					}
				}
			})
		})
	}
}

// TestRegisterForXIDs: a GPU that refuses other types is asked for XIDs, once.
func TestRegisterForXIDs(t *testing.T) {
	t.Parallel()
	const xids = nvml.EventTypeXidCriticalError
	for name, tt := range map[string]struct {
		supported uint64
		ret       nvml.Return // for more than XIDs
		onlyXIDs  nvml.Return
		masks     []uint64
		watched   bool
	}{
		"others are not supported": {xids | nvml.EventTypeDoubleBitEccError, nvml.ERROR_NOT_SUPPORTED, nvml.SUCCESS,
			[]uint64{xids | nvml.EventTypeDoubleBitEccError, xids}, true},
		"others are not permitted": {xids | nvml.EventTypeDoubleBitEccError, nvml.ERROR_NO_PERMISSION, nvml.SUCCESS,
			[]uint64{xids | nvml.EventTypeDoubleBitEccError, xids}, true},
		"others fail": {xids | nvml.EventTypeDoubleBitEccError, nvml.ERROR_TIMEOUT, nvml.SUCCESS,
			[]uint64{xids | nvml.EventTypeDoubleBitEccError}, false},
		"XIDs only":                  {xids, nvml.SUCCESS, nvml.SUCCESS, []uint64{xids}, true},
		"XIDs only, not supported":   {xids, nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED, []uint64{xids}, false},
		"only what nobody wants":     {nvml.EventTypePState, nvml.SUCCESS, nvml.SUCCESS, nil, false},
		"what nobody wants and XIDs": {nvml.EventTypePState | xids, nvml.SUCCESS, nvml.SUCCESS, []uint64{xids}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			answers := &registrations{supported: tt.supported, answer: func(_ int, mask uint64) nvml.Return {
				if mask != xids {
					return tt.ret
				}
				return tt.onlyXIDs
			}}
			r := newRegisteringRig(t, "t4", answers)
			compare(t, "masks", tt.masks, answers.masks)
			compare(t, "it is watched", tt.watched, len(r.Unwatched()) == 0)
		})
	}
}

// TestRegisterAgainRarely: what is not permitted is asked for once a minute.
func TestRegisterAgainRarely(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked []time.Duration
		began := time.Now()
		answers := &registrations{answer: func(gpu int, mask uint64) nvml.Return {
			if gpu != 3 {
				return nvml.SUCCESS
			}
			if mask != nvml.EventTypeXidCriticalError {
				asked = append(asked, time.Since(began))
			}
			return nvml.ERROR_NO_PERMISSION
		}}
		r := newRegisteringRig(t, "dgx-h100", answers)
		r.ctx = t.Context()
		_, _ = r.Next(r.within(150 * time.Second))
		synctest.Wait()
		compare(t, "times", []time.Duration{0, time.Minute, 2 * time.Minute}, asked)
	})
}

// TestLossesWhileOthersRefuse: when a set is created again, a GPU that spoils it is left out, and a set
// without GPUs is none.
func TestLossesWhileOthersRefuse(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		ret  func(gpu int, mask uint64) nvml.Return
		lost []int
		sets int
	}{
		"one spoils the new set": {func(gpu int, _ uint64) nvml.Return {
			if gpu == 2 {
				return nvml.ERROR_UNKNOWN
			}
			return nvml.SUCCESS
		}, []int{2, 4}, 1},
		"one spoils the new set by MIG events": {func(gpu int, mask uint64) nvml.Return {
			if gpu == 2 && mask == nvml.EventMigConfigChange {
				return nvml.ERROR_UNKNOWN
			}
			return nvml.SUCCESS
		}, []int{4}, 1},
		"all refuse": {func(int, uint64) nvml.Return { return nvml.ERROR_NOT_SUPPORTED }, []int{0, 1, 2, 3, 4, 5, 6, 7},
			0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				answers := &registrations{}
				r := newRegisteringRig(t, "dgx-h100", answers)
				answers.answer = tt.ret
				r.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "4"})
				var want, got []string
				for _, gpu := range tt.lost {
					want = append(want, r.uuid(gpu))
					e := r.next()
					compare(t, "event", event(inventory.EventLost, e.UUID), e)
					got = append(got, e.UUID)
				}
				slices.Sort(want)
				slices.Sort(got)
				compare(t, "lost", want, got)
				compare(t, "event sets", tt.sets, r.node.Stats().EventSets)
				if tt.sets > 0 {
					r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 31})
					compare(t, "XID", 31, r.next().XID)
				}
			})
		})
	}
}

// TestNewSetWhileACallHangs: the old set may be in use; it is freed at the end.
func TestNewSetWhileACallHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindRemove, GPU: "7"})
		r.inject(hang("3", "DeviceGetMemoryInfo"))
		r.scan()
		r.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "4"})
		compare(t, "event", event(inventory.EventLost, r.uuid(4)), r.next())
		compare(t, "event sets while a call hangs", 2, r.node.Stats().EventSets)
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		synctest.Wait()
		r.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "5"})
		compare(t, "event", event(inventory.EventLost, r.uuid(5)), r.next())
		compare(t, "event sets when it has returned", 2, r.node.Stats().EventSets)
	})
}

// TestEventOfAnUnknownHandle: the driver is asked who it is, and where it does not say, nobody is.
func TestEventOfAnUnknownHandle(t *testing.T) {
	t.Parallel()
	lib := &eventLibrary{}
	var handle nvml.Device
	lib.wait = func() (nvml.EventData, nvml.Return) {
		return nvml.EventData{EventType: nvml.EventTypeFatalPoisonError, Device: handle}, nvml.SUCCESS
	}
	node := newNode(t, "dgx-h100")
	s := openNode(t, node, lib)
	handle, _ = lib.Interface.DeviceGetHandleByIndex(3) // not the one that the session has
	uuid := node.List()[3].UUID
	for range 2 {
		if e, err := s.Next(t.Context()); err != nil || e != event(inventory.EventFatalPoison, uuid) {
			t.Errorf("event %+v, error %v, want it of %q", e, err, uuid)
		}
		uuid = ""
		if err := node.Inject(simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetUUID",
			Return: "GPU_IS_LOST"}); err != nil {
			t.Fatal(err)
		}
	}
}
