package simulator

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
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
		fault Fault
		want  func(*values)
	}{
		"recovery action": {
			Fault{Kind: KindRecoveryAction, Action: "drain-p2p"}, func(v *values) { v.Recovery = nvml.GPU_RECOVERY_ACTION_DRAIN_P2P },
		},
		"remap failure":       {Fault{Kind: KindRemapFailure}, func(v *values) { v.Failure = true }},
		"remap pending":       {Fault{Kind: KindRemapPending}, func(v *values) { v.Pending = true }},
		"unrepairable memory": {Fault{Kind: KindUnrepairable}, func(v *values) { v.Unrepairable = 1 }},
		"SRAM threshold":      {Fault{Kind: KindSRAMThreshold}, func(v *values) { v.SRAM = 1 }},
		"throttled":           {Fault{Kind: KindThrottle}, func(v *values) { v.Clocks = 0x48 }},
		"PCIe replays":        {Fault{Kind: KindPCIeReplays, Count: 3}, func(v *values) { v.Replays = 3 }},
		"memory errors":       {Fault{Kind: KindECC, Count: 3}, func(v *values) { v.Uncorrected = 3 }},
		"fabric not started":  {Fault{Kind: KindFabric, State: "not-started"}, func(v *values) { v.FabricState = 1 }},
		"fabric failed": {
			Fault{Kind: KindFabric, State: "completed", Return: "UNKNOWN"}, func(v *values) { v.FabricStatus = 999 },
		},
		"one NVLink":  {Fault{Kind: KindNVLink, Link: &link}, func(v *values) { v.Lanes = 17 }},
		"all NVLinks": {Fault{Kind: KindNVLink}, func(v *values) { v.Lanes = 0 }},
		"processes":   {Fault{Kind: KindProcesses, Count: 2}, func(v *values) { v.Processes = 2 }},
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
			inject(t, n, Fault{Kind: KindRestore})
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
	inject(t, n, Fault{Kind: KindNVLink, GPU: "3", Link: &link})
	if got := active(); got != 46 {
		t.Errorf("after one NVLink was cut, %d ends are active, want 46", got)
	}
	checkLinks(t, n, lib)
	inject(t, n, Fault{Kind: KindLost, GPU: "4"})
	for link := range 6 {
		if remote, _ := handle(t, lib, 0).GetNvLinkRemotePciInfo(link); bdf(remote) != n.profile.GPUs[4].BDF {
			continue
		}
		if state, _ := handle(t, lib, 0).GetNvLinkState(link); state != nvml.FEATURE_DISABLED {
			t.Errorf("NVLink %d to a lost GPU is %v", link, state)
		}
	}
}
