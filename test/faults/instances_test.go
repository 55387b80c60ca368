package faults

import (
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// divided is a machine with MIG devices, each profile of which is a resource.
var divided = machine{profile: "a100-mig-mixed", args: []string{"--mig-strategy", "mixed"}}

// layout is the fault that GPU 3, of two 3g.40gb, is divided again.
func layout(profiles ...string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindMIG, GPU: "3", Profiles: profiles}
}

// instanceFaults strike MIG devices and shared devices.
var instanceFaults = []fault{
	{
		name: "another MIG layout", machine: divided, inject: []simulator.Fault{layout("1g.10gb", "2g.20gb")},
		run: &outcome{leaving: true},
		then: []act{
			{wait, outcome{within: dropped}},
			{inject(layout()), outcome{leaving: true}},
			{wait, outcome{within: dropped}},
		},
	},
	{
		name: "XID 46 in one compute instance", machine: divided,
		inject: []simulator.Fault{{Kind: simulator.KindXID, GPU: "6:1", XID: 46}},
		run:    bad(atOnce, "6:1", `Unhealthy \(reset\).*XID 46`), start: unknowable, then: []act{cleared("6:1")},
	},
	{
		name: "XID 46 in one GPU instance", machine: divided,
		inject: []simulator.Fault{{Kind: simulator.KindXID, GPU: "6", GI: ptr.To(1), XID: 46}},
		run: &outcome{
			bad:  []string{"6:0", "6:1", "6:2"},
			says: map[string]string{"6:2": `Unhealthy \(reset\).*XID 46`, "6:3": "Healthy", "6": "Healthy"},
		},
		start: unknowable, then: []act{cleared("6")},
	},
	{
		name: "XID 48 in one GPU instance, which the driver acquits", machine: divided,
		inject: []simulator.Fault{{Kind: simulator.KindXID, GPU: "3:0", XID: 48, Action: "none"}},
		run:    bad(atOnce, "3:0", `Unhealthy \(reset\).*XID 48`), start: unknowable, then: []act{{wait, good}},
	},
	{
		name: "XID 48 of the GPU below MIG devices", machine: divided,
		inject: []simulator.Fault{xid(48)},
		run:    &outcome{bad: []string{"3:0", "3:1"}, says: map[string]string{"3:0": `Unhealthy \(reset\)`, "3": "XID 48"}},
		start:  &outcome{bad: []string{"3:0", "3:1"}, says: map[string]string{"3:0": `Unhealthy \(reset\)`}}, then: []act{restored},
	},
	{
		name: "a GPU below MIG devices is lost", machine: divided, inject: []simulator.Fault{on(simulator.KindLost)},
		run: &outcome{bad: []string{"3:0", "3:1"}, says: map[string]string{"3:0": "Lost"}}, start: &outcome{gone: []string{"3:0", "3:1"}},
		then: []act{restored},
	},
	{
		name:    "XID 48 of a GPU that four share",
		machine: machine{config: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n", replicas: 4},
		inject:  []simulator.Fault{xid(48)}, run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 48`), start: bad(0, "3",
			`Unhealthy \(reset\)`),
		then: []act{restored},
	},
}
