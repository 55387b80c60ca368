package faults

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// operatorFaults are those in which an operator has a say, and those that outlive the daemon.
var operatorFaults = []fault{
	{
		name: "flapping", machine: machine{config: "health: {flapLimit: 1}\n"}, inject: []simulator.Fault{asked("reset")},
		run: bad(atOnce, "3", `Unhealthy \(reset\)`),
		then: []act{
			restored,
			{inject(asked("reset")), *bad(atOnce, "3", `Unhealthy \(reset\)`)},
			{restored.deed, outcome{within: recoveryTime, bad: []string{"3"}, hold: recoveryTime,
				says: map[string]string{"3": `Unhealthy \(human\).*2 times`}}},
			cleared("3"),
		},
	},
	{
		name: "recovery left to an operator", machine: machine{config: "health: {recovery: manual}\n"}, inject: []simulator.Fault{xid(48)},
		run: bad(atOnce, "3", `Unhealthy \(reset\)`), then: []act{{restored.deed, still("3", `Unhealthy \(reset\)`)},
			cleared("3")},
	},
	{
		name: "cleared while it is still wrong", inject: []simulator.Fault{asked("reset")},
		run: bad(atOnce, "3", `Unhealthy \(reset\)`), start: bad(0, "3", `Unhealthy \(reset\)`),
		then: []act{
			{command("health", "clear", "--gpu", "3"), *bad(atOnce, "3", `Unhealthy \(reset\)`)},
			restored,
		},
	},
	{
		name: "XID 46, and the daemon is started again", inject: []simulator.Fault{xid(46)},
		run: bad(atOnce, "3", `Unhealthy \(reset\)`),
		then: []act{
			{restart("the daemon is started again"), *bad(starting, "3", `Unhealthy \(reset\)`)},
			{restart("the node is restarted", simulator.Fault{Kind: simulator.KindReboot}), outcome{within: starting}},
		},
	},
	{
		name: "XID 119, reset while the daemon is started again", inject: []simulator.Fault{xid(119)},
		run: read(bad(atOnce, "3", `Unhealthy \(reset\)`)),
		// and the driver asks no more
		then: []act{{restart("the daemon is started again"), outcome{within: starting + recoveryTime}}},
	},
	{
		name: "XID 54, and the node is restarted", inject: []simulator.Fault{xid(54)},
		run: bad(atOnce, "3", `Unhealthy \(hardware\)`),
		then: []act{
			{restart("the node is restarted", simulator.Fault{Kind: simulator.KindReboot}),
				*bad(starting, "3", `Unhealthy \(hardware\)`)},
			cleared("3"),
		},
	},
	{
		name: "quiesce", do: command("quiesce"),
		run:  &outcome{all: true, says: map[string]string{"": "quiet: true"}},
		then: []act{{command("resume"), outcome{says: map[string]string{"": "quiet: false"}}}},
	},
	{
		name: "quiesce, and the daemon is started again", do: command("quiesce"),
		run: &outcome{all: true, says: map[string]string{"": "quiet: true"}},
		then: []act{
			{restart("the daemon is started again"), outcome{within: starting, hold: suspicion, all: true,
				says: map[string]string{"": "quiet: true"}}},
			{command("resume"), outcome{within: starting, says: map[string]string{"": "quiet: false"}}},
		},
	},
	{
		name: "quiesce, and go on allocating", do: command("quiesce", "--allocate"),
		run: &outcome{hold: suspicion, says: map[string]string{"": "quiet: true"}},
		then: []act{
			{inject(on(simulator.KindLost)), outcome{hold: suspicion}},
			{command("resume"), *bad(atOnce, "3", "Lost")},
			restored,
		},
	},
}
