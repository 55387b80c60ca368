package faults

import (
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// on is a fault of a kind on GPU 3.
func on(kind simulator.Kind) simulator.Fault { return simulator.Fault{Kind: kind, GPU: "3"} }

// refused is the fault that calls on GPU 3 answer an error.
func refused(ret string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindFail, GPU: "3", Return: ret}
}

// fabric is the fault that GPU 3 is in another state of the NVSwitch fabric.
func fabric(state, ret string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindFabric, GPU: "3", State: state, Return: ret}
}

// ofAll is a fault on every GPU.
func ofAll(f simulator.Fault) []simulator.Fault {
	var all []simulator.Fault
	for i := range 8 {
		f.GPU = fmt.Sprint(i)
		all = append(all, f)
	}
	return all
}

// worn is what becomes of memory that cannot be repaired.
var worn = []act{{restored.deed, still("3", `Unhealthy \(hardware\)`)}, cleared("3")}

// readingFaults are what can be read of a GPU.
var readingFaults = []fault{
	{
		name: "recovery action 1, reset", inject: []simulator.Fault{asked("reset")},
		run: bad(atOnce, "3", `Unhealthy \(reset\)`), start: bad(0, "3", `Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name: "recovery action 2, reboot", inject: []simulator.Fault{asked("reboot")},
		run: bad(atOnce, "3", `Unhealthy \(reboot\)`), start: bad(0, "3", `Unhealthy \(reboot\)`),
		then: []act{
			{restored.deed, still("3", `Unhealthy \(reboot\)`)},
			{restart("the node is restarted", simulator.Fault{Kind: simulator.KindReboot}), outcome{within: starting}},
		},
	},
	{
		name: "recovery action 3, drain P2P", inject: []simulator.Fault{asked("drain-p2p")},
		run: bad(atOnce, "3", `Unhealthy \(drain-p2p\)`), start: bad(0, "3",
			`Unhealthy \(drain-p2p\)`), then: []act{restored},
	},
	{
		name: "recovery action 4, drain and reset", inject: []simulator.Fault{asked("drain-and-reset")},
		run: bad(atOnce, "3", `Unhealthy \(drain\+reset\)`), start: bad(0, "3",
			`Unhealthy \(drain\+reset\)`), then: []act{restored},
	},
	{
		name: "recovery action 5, recover IMEX", inject: []simulator.Fault{asked("recover-imex")},
		run: unmoved(nil), start: &outcome{hold: suspicion},
	},
	{
		name: "recovery action 5, where it gates", machine: machine{config: "health: {imex: gate}\n"},
		inject: []simulator.Fault{asked("recover-imex")},
		run:    bad(atOnce, "3", `Unhealthy \(imex\)`), start: bad(0, "3", `Unhealthy \(imex\)`), then: []act{restored},
	},
	{
		name: "reboot asked for on all GPUs: one reason", inject: ofAll(asked("reboot")),
		run: &outcome{all: true, says: map[string]string{"": "restart of the node on all 8 GPUs", "0": "all 8 GPUs",
			"7": "all 8 GPUs"}},
		start: &outcome{all: true, says: map[string]string{"": "restart of the node on all 8 GPUs", "0": "all 8 GPUs",
			"7": "all 8 GPUs"}},
		then: []act{{restart("the node is restarted", simulator.Fault{Kind: simulator.KindReboot}),
			outcome{within: starting}}},
	},
	{
		name: "row remapping failed", inject: []simulator.Fault{on(simulator.KindRemapFailure)},
		run: bad(polled, "3", `Unhealthy \(hardware\)`), start: bad(0, "3", `Unhealthy \(hardware\)`), then: worn,
	},
	{
		name: "memory that cannot be repaired", machine: machine{profile: "dgx-b200"},
		inject: []simulator.Fault{on(simulator.KindUnrepairable)},
		run:    bad(polled, "3", `Unhealthy \(hardware\)`), start: bad(0, "3", `Unhealthy \(hardware\)`), then: worn,
	},
	{
		name: "uncorrected memory errors, which the driver acquits", inject: []simulator.Fault{{Kind: simulator.KindECC,
			GPU: "3", Count: 2}},
		run: unmoved(map[string]string{"3": `Healthy.*; .* × 1`}), start: unknowable,
	},
	{
		name: "fabric not started", inject: []simulator.Fault{fabric("not-started", "")},
		run: bad(polled, "3", `Unhealthy \(fabric\)`), start: bad(0, "3", `Unhealthy \(fabric\)`), then: []act{restored},
	},
	{
		name: "fabric in progress", inject: []simulator.Fault{fabric("in-progress", "")},
		run: bad(polled, "3", `Unhealthy \(fabric\)`), start: bad(0, "3", `Unhealthy \(fabric\)`), then: []act{restored},
	},
	{
		name: "fabric completed with an error", inject: []simulator.Fault{fabric("completed", "NOT_READY")},
		run: bad(polled, "3", `Unhealthy \(fabric\)`), start: bad(0, "3", `Unhealthy \(fabric\)`), then: []act{restored},
	},
	{
		name: "calls answer RESET_REQUIRED", inject: []simulator.Fault{refused("RESET_REQUIRED")},
		run: bad(polled, "3", `Unhealthy \(reset\)`), start: &outcome{gone: []string{"3"}},
		then: []act{{restored.deed, outcome{within: leftAlone}}},
	},
	{
		name: "readings answer RESET_REQUIRED",
		inject: []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetMemoryInfo",
			Return: "RESET_REQUIRED"}},
		run: bad(polled, "3", `Unhealthy \(reset\)`), start: bad(0, "3", `Unhealthy \(reset\)`), then: []act{restored},
	},
	{
		name:   "readings answer UNKNOWN",
		inject: []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetFieldValues", Return: "UNKNOWN"}},
		run:    bad(polled+suspicion, "3", `Unhealthy.*did not come`), start: bad(0, "3", `Unhealthy.*calls to the GPU fail`),
		then: []act{restored},
	},
	{
		name:   "readings of all GPUs answer UNKNOWN: one reason",
		inject: []simulator.Fault{{Kind: simulator.KindFail, Call: "DeviceGetFieldValues", Return: "UNKNOWN"}},
		run: &outcome{within: polled + suspicion, all: true,
			says: map[string]string{"": "restart its pod", "5": "restart its pod"}},
		start: &outcome{within: starting + suspicion, all: true,
			says: map[string]string{"": "restart its pod", "5": "restart its pod"}},
		then: []act{restoredAll},
	},
	{
		name:   "a model that is not plain text",
		inject: []simulator.Fault{{Kind: simulator.KindAnswer, GPU: "3", Call: "DeviceGetName", Value: `"H100\x1b\xff\n"`}},
		start:  &outcome{hold: suspicion},
	},
	{
		name: "what is only reported",
		inject: []simulator.Fault{
			on(simulator.KindRemapPending), on(simulator.KindNVLink), {Kind: simulator.KindProcesses, GPU: "3", Count: 2},
			on(simulator.KindThrottle), on(simulator.KindSRAMThreshold), {Kind: simulator.KindPCIeReplays, GPU: "3", Count: 9},
		},
		run: &outcome{hold: 5 * polled}, start: &outcome{hold: suspicion},
	},
}
