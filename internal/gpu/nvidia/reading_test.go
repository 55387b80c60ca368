package nvidia_test

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestRead(t *testing.T) {
	t.Parallel()
	fail := func(call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: call, Return: ret}
	}
	fabric := func(state inventory.FabricState, status nvml.Return) inventory.Signal[inventory.Fabric] {
		return inventory.Known(inventory.Fabric{State: state, Status: uint32(status)})
	}
	// What a healthy GPU of the newest profile says; older drivers and GPUs say less.
	b200 := inventory.Reading{
		RecoveryAction: inventory.Known(inventory.RecoveryNone), RowRemapPending: inventory.Known(false),
		RowRemapFailure: inventory.Known(false), UncorrectedECC: inventory.Known(uint64(0)),
		UnrepairableMemory: inventory.Known(false), SRAMThreshold: inventory.Known(false),
		Fabric: fabric(inventory.FabricCompleted, nvml.SUCCESS),
	}
	with := func(change func(r *inventory.Reading)) inventory.Reading {
		r := b200
		change(&r)
		return r
	}
	for name, test := range map[string]struct {
		profile string
		fault   simulator.Fault
		want    inventory.Reading
	}{
		"healthy on R590": {profile: "dgx-b200", want: b200},
		"healthy on R580": {
			profile: "dgx-h100",
			want:    with(func(r *inventory.Reading) { r.UnrepairableMemory = inventory.Signal[bool]{} }),
		},
		"healthy on R470": {
			profile: "dgx-1",
			want:    inventory.Reading{UncorrectedECC: inventory.Known(uint64(0))},
		},
		"healthy with MIG devices on R565": {
			profile: "h100-mig-1g",
			want: with(func(r *inventory.Reading) {
				var unknown inventory.Signal[bool]
				r.UnrepairableMemory, r.RowRemapPending, r.RowRemapFailure = unknown, unknown, unknown
			}),
		},
		"recovery action": {
			profile: "dgx-b200",
			fault:   simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "1", Action: "drain-and-reset"},
			want: with(func(r *inventory.Reading) {
				r.RecoveryAction = inventory.Known(inventory.RecoveryDrainAndReset)
			}),
		},
		"row remapping pending": {
			profile: "dgx-b200", fault: simulator.Fault{Kind: simulator.KindRemapPending, GPU: "1"},
			want: with(func(r *inventory.Reading) { r.RowRemapPending = inventory.Known(true) }),
		},
		"row remapping failed": {
			profile: "dgx-b200", fault: simulator.Fault{Kind: simulator.KindRemapFailure, GPU: "1"},
			want: with(func(r *inventory.Reading) { r.RowRemapFailure = inventory.Known(true) }),
		},
		"uncorrected memory errors": {
			profile: "dgx-b200", fault: simulator.Fault{Kind: simulator.KindECC, GPU: "1", Count: 7},
			want: with(func(r *inventory.Reading) { r.UncorrectedECC = inventory.Known(uint64(7)) }),
		},
		"unrepairable memory": {
			profile: "dgx-b200", fault: simulator.Fault{Kind: simulator.KindUnrepairable, GPU: "1"},
			want: with(func(r *inventory.Reading) { r.UnrepairableMemory = inventory.Known(true) }),
		},
		"too many errors of the chip's own memories": {
			profile: "dgx-b200", fault: simulator.Fault{Kind: simulator.KindSRAMThreshold, GPU: "1"},
			want: with(func(r *inventory.Reading) { r.SRAMThreshold = inventory.Known(true) }),
		},
		"fabric not up": {
			profile: "dgx-b200", fault: simulator.Fault{Kind: simulator.KindFabric, GPU: "1", State: "in-progress"},
			want: with(func(r *inventory.Reading) { r.Fabric = fabric(inventory.FabricInProgress, nvml.SUCCESS) }),
		},
		"fabric failed": {
			profile: "dgx-b200",
			fault:   simulator.Fault{Kind: simulator.KindFabric, GPU: "1", State: "completed", Return: "UNKNOWN"},
			want: with(func(r *inventory.Reading) {
				r.Fabric = fabric(inventory.FabricCompleted, nvml.ERROR_UNKNOWN)
			}),
		},
		"lost": {
			profile: "dgx-b200", fault: simulator.Fault{Kind: simulator.KindLost, GPU: "1"},
			want: inventory.Reading{Contact: inventory.ContactLost,
				Reason: "nvmlDeviceGetFieldValues: ERROR_GPU_IS_LOST"},
		},
		"reset required": {
			profile: "dgx-b200", fault: fail("DeviceGetRemappedRows", "RESET_REQUIRED"),
			want: inventory.Reading{
				Contact: inventory.ContactResetRequired, Reason: "nvmlDeviceGetRemappedRows: ERROR_RESET_REQUIRED",
				RecoveryAction: inventory.Known(inventory.RecoveryNone),
			},
		},
		"a call for a signal fails": {
			profile: "dgx-b200", fault: fail("DeviceGetRemappedRows", "UNKNOWN"),
			want: with(func(r *inventory.Reading) {
				r.Incomplete = "nvmlDeviceGetRemappedRows: ERROR_UNKNOWN"
				r.RowRemapPending, r.RowRemapFailure = inventory.Signal[bool]{}, inventory.Signal[bool]{}
			}),
		},
		"a call for another signal fails": {
			profile: "dgx-b200", fault: fail("DeviceGetTotalEccErrors", "TIMEOUT"),
			want: with(func(r *inventory.Reading) {
				r.Incomplete, r.UncorrectedECC = "nvmlDeviceGetTotalEccErrors: ERROR_TIMEOUT",
					inventory.Signal[uint64]{}
			}),
		},
		"the call for the fabric fails": {
			profile: "dgx-b200", fault: fail("DeviceGetGpuFabricInfo", "UNKNOWN"),
			want: with(func(r *inventory.Reading) {
				r.Incomplete, r.Fabric = "nvmlDeviceGetGpuFabricInfo: ERROR_UNKNOWN",
					inventory.Signal[inventory.Fabric]{}
			}),
		},
		"the call for repairs of memory fails": {
			profile: "dgx-b200", fault: fail("DeviceGetUnrepairableMemoryFlag_v1", "UNKNOWN"),
			want: with(func(r *inventory.Reading) {
				r.Incomplete = "nvmlDeviceGetUnrepairableMemoryFlag_v1: ERROR_UNKNOWN"
				r.UnrepairableMemory = inventory.Signal[bool]{}
			}),
		},
		"the call for the chip's own memories fails, which says nothing": {
			profile: "dgx-b200", fault: fail("DeviceGetSramEccErrorStatus", "UNKNOWN"),
			want: with(func(r *inventory.Reading) { r.SRAMThreshold = inventory.Signal[bool]{} }),
		},
		"the first driver with a recovery action": {
			profile: "a100-mig-mixed",
			fault:   simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "1", Action: "reset"},
			want: with(func(r *inventory.Reading) {
				r.RecoveryAction, r.UnrepairableMemory = inventory.Known(inventory.RecoveryGPUReset),
					inventory.Signal[bool]{}
				r.Fabric = inventory.Signal[inventory.Fabric]{}
			}),
		},
		"the call that every GPU answers fails": {
			profile: "dgx-b200", fault: fail("DeviceGetMemoryInfo", "UNKNOWN"),
			want: with(func(r *inventory.Reading) {
				r.Contact, r.Reason = inventory.ContactFailing, "nvmlDeviceGetMemoryInfo: ERROR_UNKNOWN"
			}),
		},
		"one call fails": {
			profile: "dgx-b200", fault: fail("DeviceGetFieldValues", "UNKNOWN"),
			want: with(func(r *inventory.Reading) {
				r.Contact, r.Reason = inventory.ContactFailing, "nvmlDeviceGetFieldValues: ERROR_UNKNOWN"
				r.RecoveryAction = inventory.Signal[inventory.RecoveryAction]{}
			}),
		},
		"R470, which might answer anything to a field it does not know": {
			profile: "dgx-1", fault: fail("DeviceGetFieldValues", "UNKNOWN"),
			want: inventory.Reading{UncorrectedECC: inventory.Known(uint64(0))},
		},
		"one call is not permitted": {
			profile: "dgx-b200", fault: fail("DeviceGetTotalEccErrors", "NO_PERMISSION"),
			want: with(func(r *inventory.Reading) { r.UncorrectedECC = inventory.Signal[uint64]{} }),
		},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, test.profile)
			r.scan()
			if test.fault.Kind != "" {
				r.inject(test.fault)
			}
			got, err := r.Read(r.ctx, r.uuid(1))
			if err != nil {
				t.Fatal(err)
			}
			// see report_test.go
			got.Report, got.Persistence, got.Energy = inventory.Report{}, test.want.Persistence, test.want.Energy
			compare(t, "reading", test.want, got)
		})
	}
	bubble(t, "unknown GPU", func(t *testing.T) {
		r := newRig(t, "t4")
		for _, uuid := range []string{"", "GPU-x"} {
			if reading, err := r.Read(r.ctx, uuid); err == nil {
				t.Errorf("GPU %q: got %+v, want an error", uuid, reading)
			}
		}
	})
}

// TestRecoveryActionOfASickGPU reads it although the GPU refuses every other call.
func TestRecoveryActionOfASickGPU(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-b200")
	r.scan()
	r.inject(simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "1", Action: "reset"})
	r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetMemoryInfo", Return: "RESET_REQUIRED"})
	got, err := r.Read(r.ctx, r.uuid(1))
	if err != nil {
		t.Fatal(err)
	}
	if got.Contact != inventory.ContactResetRequired ||
		got.RecoveryAction != inventory.Known(inventory.RecoveryGPUReset) {
		t.Errorf("got %+v, want the recovery action of a GPU that wants a reset", got)
	}
}

// BenchmarkRead measures one reading.
func BenchmarkRead(b *testing.B) {
	r := newRig(b, "dgx-h100")
	r.scan()
	uuid := r.uuid(0)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Read(r.ctx, uuid); err != nil {
			b.Fatal(err)
		}
	}
}

// A sickDevice answers some questions for health.
type sickDevice struct {
	nvml.Device
	repair nvml.RepairStatus
}

func (d sickDevice) GetGpuFabricInfo() (nvml.GpuFabricInfo, nvml.Return) {
	return nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_NOT_SUPPORTED}, nvml.SUCCESS
}

func (d sickDevice) GetFieldValues(values []nvml.FieldValue) nvml.Return {
	for i := range values {
		values[i].ValueType, values[i].Value[0] = uint32(nvml.VALUE_TYPE_DOUBLE), 1
	}
	return nvml.SUCCESS
}

func (d sickDevice) GetRepairStatus() (nvml.RepairStatus, nvml.Return) { return d.repair, nvml.SUCCESS }

// TestReadOddAnswers: a GPU without fabric has none, a number of another type says nothing, and
// either repair is one.
func TestReadOddAnswers(t *testing.T) {
	t.Parallel()
	for repair, want := range map[nvml.RepairStatus]bool{{}: false, {BChannelRepairPending: 1}: true,
		{BTpcRepairPending: 1}: true} {
		r := newRigWith(t, "dgx-b200", hook(hookedLibrary{device: func(_ int,
			d nvml.Device) nvml.Device {
			return sickDevice{d, repair}
		}}))
		got, err := r.Read(r.ctx, r.uuid(0))
		if err != nil || got.Fabric.Known || got.RecoveryAction.Known || got.Contact != inventory.ContactGood {
			t.Errorf("got %+v and error %v", got, err)
		}
		compare(t, "a repair is pending", inventory.Known(want), got.Report.RepairPending)
	}
}

// TestReadWhatWasSupported: a GPU that once answered is asked again, though it says that it does
// not support the question.
func TestReadWhatWasSupported(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-b200")
	for _, known := range []bool{true, false, true} {
		r.inject(restore)
		if !known {
			r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetRemappedRows",
				Return: "NOT_SUPPORTED"})
		}
		reading, err := r.Read(r.ctx, r.uuid(1))
		if err != nil {
			t.Fatal(err)
		}
		compare(t, "rows are known", known, reading.RowRemapPending.Known)
	}
}
