package faults

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// xid is the fault that the driver reports an XID on GPU 3.
func xid(code uint64) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: code}
}

// asked is the fault that the driver asks for a recovery action on GPU 3.
func asked(action string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "3", Action: action}
}

// event is the fault that the driver reports another event on GPU 3.
func event(name string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindEvent, GPU: "3", Event: name}
}

// Nobody can know of an event from before the daemon started, but by what can still be read.
var unknowable = &outcome{hold: suspicion}

// xidFaults are what the driver reports by events.
var xidFaults = []fault{
	{
		name: "XIDs of applications", inject: []simulator.Fault{xid(13), xid(31), xid(43), xid(94)},
		run: unmoved(map[string]string{"3": `Healthy.*XID 13 × 1.*XID 31 × 1.*XID 43 × 1.*XID 94 × 1`}), start: unknowable,
	},
	{
		name: "XIDs that inform", inject: []simulator.Fault{xid(63), xid(92)},
		run: unmoved(map[string]string{"3": `Healthy.*XID 63 × 1.*XID 92 × 1`}), start: unknowable,
	},
	{
		name: "XID 48, transient", inject: []simulator.Fault{xid(48)},
		run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 48`), start: bad(0, "3",
			`Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name: "XID 95, transient", inject: []simulator.Fault{xid(95)},
		run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 95`), start: bad(0, "3",
			`Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name: "XID 79, off the bus", inject: []simulator.Fault{xid(79)},
		run: bad(atOnce, "3", `Lost.*XID 79`), start: &outcome{gone: []string{"3"}}, then: []act{restored},
	},
	{
		name: "XID 64, of a GPU whose rows can be read", inject: []simulator.Fault{xid(64)},
		run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 64`), start: bad(0, "3",
			`Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name: "XID 64, before Ampere", machine: machine{profile: "dgx-2"}, inject: []simulator.Fault{xid(64)},
		run:  bad(atOnce, "3", `Unhealthy \(hardware\).*XID 64`),
		then: []act{{restored.deed, still("3", `Unhealthy \(hardware\)`)}, cleared("3")},
	},
	{
		name: "XID 119, which the kernel logs alone", machine: machine{config: "health: {kernelLog: true}\n"},
		inject: []simulator.Fault{{Kind: simulator.KindLoggedXID, GPU: "3", XID: 119}},
		run:    bad(atOnce, "3", `Unhealthy \(reset\).*XID 119 × 1`), then: []act{cleared("3")},
	},
	{
		name: "XID 119, which driver and kernel tell", machine: machine{config: "health: {kernelLog: true}\n"},
		inject: []simulator.Fault{xid(119)}, run: read(bad(atOnce, "3",
			`Unhealthy \(reset\).*XID 119 × 1`)), then: []act{restored},
	},
	{
		name: "ten thousand XIDs in the kernel's log", machine: machine{config: "health: {kernelLog: true}\n"},
		inject: []simulator.Fault{{Kind: simulator.KindLoggedXID, GPU: "3", XID: 31, Count: 10_000}},
		run:    unmoved(map[string]string{"3": `Healthy.*XID 31 × \d`}),
	},
	{
		name: "XID 54, hardware", inject: []simulator.Fault{xid(54)},
		run: bad(atOnce, "3", `Unhealthy \(hardware\).*XID 54`), start: unknowable, then: []act{cleared("3")},
	},
	{
		name: "XID 119, the driver asks for a reset", inject: []simulator.Fault{xid(119)},
		run: read(bad(atOnce, "3", `Unhealthy \(reset\).*XID 119`)), start: bad(0, "3",
			`Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name:    "XID 120, of which drivers before 575.51.02 say nothing",
		machine: machine{profile: "dgx-a100"}, inject: []simulator.Fault{{Kind: simulator.KindXID, GPU: "3", XID: 120,
			Action: "none"}},
		run:  bad(atOnce, "3", `Unhealthy \(reset\).*XID 120`),
		then: []act{{wait, still("3", `Unhealthy \(reset\)`)}, cleared("3")},
	},
	{
		name: "XID 46, of which the driver says nothing", inject: []simulator.Fault{xid(46)},
		run:  bad(atOnce, "3", `Unhealthy \(reset\).*XID 46`),
		then: []act{{restored.deed, still("3", `Unhealthy \(reset\)`)}, cleared("3")},
	},
	{
		name: "XID 46, of which the driver says nothing", inject: []simulator.Fault{xid(46)}, start: unknowable,
	},
	{
		name: "XID 46, the driver is loaded again", inject: []simulator.Fault{xid(46)},
		run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 46`),
		then: []act{
			{inject(unloaded), outcome{bad: []string{"3"}, says: map[string]string{"": `stale: [^;]*no NVIDIA driver`}}},
			{inject(simulator.Fault{Kind: simulator.KindRestore}), outcome{within: reopened + recoveryTime}},
		},
	},
	{
		name:   "XID 46, its memory errors are counted from zero",
		inject: []simulator.Fault{{Kind: simulator.KindECC, GPU: "3", Count: 2}, xid(46)},
		run:    read(bad(atOnce, "3", `Unhealthy \(reset\).*XID 46`)), start: unknowable, then: []act{restored},
	},
	{
		name: "XID 140, unbound and bound again", inject: []simulator.Fault{xid(140)},
		run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 140`),
		then: []act{
			{restored.deed, still("3", `Unhealthy \(reset\)`)},
			{inject(on(simulator.KindRemove)), outcome{leaving: true}},
			{inject(on(simulator.KindAdd)), good},
		},
	},
	{
		name:   "XID 119, repaired before the driver was seen to ask, unbound and bound again",
		inject: []simulator.Fault{{Kind: simulator.KindXID, GPU: "3", XID: 119, Action: "none"}},
		run:    bad(atOnce, "3", `Unhealthy \(reset\).*XID 119`),
		then: []act{
			{wait, still("3", `Unhealthy \(reset\)`)},
			{inject(on(simulator.KindRemove)), outcome{leaving: true}},
			{inject(on(simulator.KindAdd)), good},
		},
	},
	{
		name: "XID 48, and too many errors of the chip's own memories", inject: []simulator.Fault{on(simulator.KindSRAMThreshold), xid(48)},
		run:  bad(atOnce, "3", `Unhealthy \(hardware\)`),
		then: []act{{restored.deed, still("3", `Unhealthy \(hardware\)`)}, cleared("3")},
	},
	{
		name: "XID 48, before R565", machine: machine{profile: "dgx-2"},
		inject: []simulator.Fault{{Kind: simulator.KindECC, GPU: "3", Count: 2}, xid(48)},
		run:    read(bad(atOnce, "3", `Unhealthy \(reset\).*XID 48`)), start: unknowable, then: []act{restored},
	},
	{
		name: "XID 200, which nobody knows", inject: []simulator.Fault{xid(200)},
		run: unmoved(map[string]string{"3": `Healthy.*XID 200 × 1`}), start: unknowable,
	},
	{
		name: "XID 200, the driver asks for a reset", inject: []simulator.Fault{{Kind: simulator.KindXID, GPU: "3", XID: 200,
			Action: "reset"}},
		run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 200`), start: bad(0, "3",
			`Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name: "XID 200, before R565", machine: machine{profile: "dgx-2"}, inject: []simulator.Fault{xid(200)},
		run: bad(atOnce, "3", `Unhealthy \(reset\).*XID 200`), start: unknowable, then: []act{cleared("3")},
	},
	{
		name: "XID 46, to be ignored by configuration", machine: machine{config: "health: {xids: {ignore: [46]}}\n"},
		inject: []simulator.Fault{xid(46)}, run: unmoved(map[string]string{"3": `Healthy.*XID 46 × 1`}), start: unknowable,
	},
	{
		name: "XID 13, fatal by configuration", machine: machine{config: "health: {xids: {fatal: [13]}}\n"},
		inject: []simulator.Fault{xid(13)}, run: bad(atOnce, "3", `Unhealthy.*XID 13.*by configuration`), start: unknowable,
		then: []act{cleared("3")},
	},
	{
		name: "fatal poison", inject: []simulator.Fault{event("fatal-poison"), asked("reset")},
		run: bad(atOnce, "3", `Unhealthy \(reset\)`), start: bad(0, "3", `Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name:   "suspicious events, which the driver acquits",
		inject: []simulator.Fault{event("non-fatal-poison"), event("dram-retirement-failure"), event("unavailable")},
		run:    unmoved(map[string]string{"3": `Healthy.*; .*× 1.*× 1.*× 1`}), start: unknowable,
	},
	{
		name: "events that inform", inject: []simulator.Fault{event("single-bit-ecc-storm"), event("dram-retirement")},
		run: unmoved(map[string]string{"3": `Healthy.*; .*× 1.*× 1`}), start: unknowable,
	},
}
