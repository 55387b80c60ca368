package simulator_test

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestReadings(t *testing.T) {
	type values struct {
		Recovery            nvml.DeviceGpuRecoveryAction
		Pending, Failure    bool
		Uncorrected         uint64
		Unrepairable        uint32
		FabricState         uint8
		FabricStatus, Lanes uint32
		Processes           int
		SRAM                uint32
		Clocks              uint64
		Replays             int
	}
	read := func(t *testing.T, d nvml.Device) values {
		t.Helper()
		var v values
		v.Recovery, _ = recovery(t, d)
		_, _, v.Pending, v.Failure, _ = d.GetRemappedRows()
		v.Uncorrected, _ = d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
		flag, _ := d.GetUnrepairableMemoryFlag_v1()
		v.Unrepairable = flag.BUnrepairableMemory
		fabric, _ := d.GetGpuFabricInfo()
		v.FabricState, v.FabricStatus = fabric.State, fabric.Status
		for link := range 18 {
			if state, _ := d.GetNvLinkState(link); state == nvml.FEATURE_ENABLED {
				v.Lanes++
			}
		}
		processes, _ := d.GetComputeRunningProcesses()
		v.Processes = len(processes)
		sram, _ := d.GetSramEccErrorStatus()
		v.SRAM = sram.BThresholdExceeded
		v.Clocks, _ = d.GetCurrentClocksEventReasons()
		v.Replays, _ = d.GetPcieReplayCounter()
		return v
	}
	healthy := values{FabricState: nvml.GPU_FABRIC_STATE_COMPLETED, Lanes: 18, Clocks: 1}
	link := 4
	for name, c := range map[string]struct {
		fault simulator.Fault
		want  func(*values)
	}{
		"recovery action": {
			simulator.Fault{Kind: simulator.KindRecoveryAction, Action: "drain-p2p"},
			func(v *values) { v.Recovery = nvml.GPU_RECOVERY_ACTION_DRAIN_P2P },
		},
		"remap failure": {simulator.Fault{Kind: simulator.KindRemapFailure},
			func(v *values) { v.Failure = true }},
		"remap pending": {simulator.Fault{Kind: simulator.KindRemapPending},
			func(v *values) { v.Pending = true }},
		"unrepairable memory": {simulator.Fault{Kind: simulator.KindUnrepairable},
			func(v *values) { v.Unrepairable = 1 }},
		"SRAM threshold": {simulator.Fault{Kind: simulator.KindSRAMThreshold}, func(v *values) { v.SRAM = 1 }},
		"throttled":      {simulator.Fault{Kind: simulator.KindThrottle}, func(v *values) { v.Clocks = 0x48 }},
		"PCIe replays": {simulator.Fault{Kind: simulator.KindPCIeReplays, Count: 3},
			func(v *values) { v.Replays = 3 }},
		"memory errors": {simulator.Fault{Kind: simulator.KindECC, Count: 3}, func(v *values) { v.Uncorrected = 3 }},
		"fabric not started": {simulator.Fault{Kind: simulator.KindFabric, State: "not-started"},
			func(v *values) { v.FabricState = 1 }},
		"fabric failed": {
			simulator.Fault{Kind: simulator.KindFabric, State: "completed",
				Return: "UNKNOWN"}, func(v *values) { v.FabricStatus = 999 },
		},
		"one NVLink":  {simulator.Fault{Kind: simulator.KindNVLink, Link: &link}, func(v *values) { v.Lanes = 17 }},
		"all NVLinks": {simulator.Fault{Kind: simulator.KindNVLink}, func(v *values) { v.Lanes = 0 }},
		"processes":   {simulator.Fault{Kind: simulator.KindProcesses, Count: 2}, func(v *values) { v.Processes = 2 }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, lib := start(t, "dgx-b200")
			d, other := handle(t, lib, 1), handle(t, lib, 0)
			if diff := cmp.Diff(healthy, read(t, d)); diff != "" {
				t.Fatalf("a healthy GPU (-want +got):\n%s", diff)
			}
			c.fault.GPU = "1"
			inject(t, n, c.fault)
			want := healthy
			c.want(&want)
			if diff := cmp.Diff(want, read(t, d)); diff != "" {
				t.Errorf("after the fault (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(healthy, read(t, other)); diff != "" {
				t.Errorf("another GPU (-want +got):\n%s", diff)
			}
			if n.List()[1].Faults == nil {
				t.Error("List says nothing of the fault")
			}
			inject(t, n, simulator.Fault{Kind: simulator.KindRestore})
			if diff := cmp.Diff(healthy, read(t, d)); diff != "" {
				t.Errorf("after restore (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCutNVLinkIsCutAtBothEnds(t *testing.T) {
	n, lib := start(t, "dgx-1")
	active := func() int {
		count := 0
		for _, d := range handles(t, lib) {
			for link := range 6 {
				if state, _ := d.GetNvLinkState(link); state == nvml.FEATURE_ENABLED {
					count++
				}
			}
		}
		return count
	}
	if got := active(); got != 48 {
		t.Fatalf("%d ends of NVLinks are active, want 48", got)
	}
	link := 5
	inject(t, n, simulator.Fault{Kind: simulator.KindNVLink, GPU: "3", Link: &link})
	if got := active(); got != 46 {
		t.Errorf("after one NVLink was cut, %d ends are active, want 46", got)
	}
	checkLinks(t, lib)
	inject(t, n, simulator.Fault{Kind: simulator.KindLost, GPU: "4"})
	for link := range 6 {
		if remote, _ := handle(t, lib, 0).GetNvLinkRemotePciInfo(link); bdf(remote) != n.List()[4].BDF {
			continue
		}
		if state, _ := handle(t, lib, 0).GetNvLinkState(link); state != nvml.FEATURE_DISABLED {
			t.Errorf("NVLink %d to a lost GPU is %v", link, state)
		}
	}
}
