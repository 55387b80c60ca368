package faults

import (
	"context"
	"errors"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// patient is a daemon that waits for the driver.
var patient = machine{args: []string{"--fail-on-init-error=false"}}

const (
	// nextLook is how long a look may take before the driver counts as hung, waiting how long the wait
	// for events.
	nextLook = 5 * time.Second
	waiting  = 11 * time.Second
)

const (
	// silent is how long it takes until a GPU whose calls begin to hang is Unhealthy, askedAgain how
	// long until a GPU that was silent is asked again, leftAlone the same for one that is lost.
	silent     = 15 * time.Second
	askedAgain = 3 * time.Minute
	leftAlone  = time.Minute + recoveryTime
)

// grace is how long devices are Healthy for while nobody can say whether they are.
const grace = 11 * time.Second

var (
	unloaded    = simulator.Fault{Kind: simulator.KindDriver, Driver: "missing"}
	uninstalled = simulator.Fault{Kind: simulator.KindDriver, Driver: "no-library"}
)

// hung is the fault that a call, on GPU 3 or on all, does not return.
func hung(call, gpu string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindHang, Call: call, GPU: gpu}
}

// failing is the fault that a call answers an error on all GPUs.
func failing(call, ret string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindFail, Call: call, Return: ret}
}

// arrived is the driver's late arrival.
var arrived = []act{{restoredAll.deed, outcome{within: reopened}}}

// nothing is what there is without a driver.
var nothing = &outcome{none: true, hold: suspicion, says: map[string]string{"": `stale: .*`}}

// unanswered is what comes of a driver that does not answer.
func unanswered(within time.Duration) *outcome {
	return &outcome{within: within, all: true, says: map[string]string{"": "does not answer", "0": "Unknown"}}
}

// driverFaults are what can happen to NVML and the driver.
var driverFaults = []fault{
	{name: "no driver", machine: patient, inject: []simulator.Fault{unloaded}, start: nothing, then: arrived},
	{name: "no library", machine: patient, inject: []simulator.Fault{uninstalled}, start: nothing, then: arrived},
	{
		name: "NVML cannot be initialised", machine: patient, inject: []simulator.Fault{failing("Init", "UNKNOWN")},
		start: nothing, then: arrived,
	},
	{
		name: "the initialisation hangs", machine: patient, inject: []simulator.Fault{hung("Init", "")},
		start: nothing, then: arrived,
	},
	{
		name: "the driver is unloaded", inject: []simulator.Fault{unloaded},
		run:  &outcome{within: grace, all: true, says: map[string]string{"": "stale: [^;]*no NVIDIA driver", "0": "Unknown"}},
		then: arrived,
	},
	{
		name: "the driver is unloaded for a moment", inject: []simulator.Fault{unloaded},
		run: &outcome{says: map[string]string{"": "stale: [^;]*no NVIDIA driver"}}, then: []act{{restoredAll.deed,
			outcome{hold: grace}}},
	},
	{
		name: "the library is removed", inject: []simulator.Fault{uninstalled},
		run: &outcome{within: grace, all: true, says: map[string]string{"": "stale: [^;]+;", "0": "Unknown"}}, then: arrived,
	},
	{
		name: "the driver is replaced", inject: []simulator.Fault{{Kind: simulator.KindDriver, Driver: "580.105.08"}},
		do: deed{"", startedAnew}, run: &outcome{within: grace + starting},
	},
	{
		// Silence of one is silence of one.
		name: "a call on one GPU hangs", inject: []simulator.Fault{hung("DeviceGetFieldValues", "3")},
		run: bad(silent, "3", "DeviceGetFieldValues"), start: &outcome{within: silent, gone: []string{"3"}},
		then: []act{{restoredAll.deed, outcome{within: askedAgain}}},
	},
	{
		// Such drivers do not say that a GPU whose GSP hangs needs a reset.
		name:    "two calls on one GPU take 35 s, before 575.51.02",
		machine: machine{profile: "dgx-a100"},
		inject:  []simulator.Fault{{Kind: simulator.KindSlow, Call: "DeviceGetMemoryInfo", GPU: "3", Delay: "35s", Count: 2}},
		run:     &outcome{within: silent, bad: []string{"3"}, hold: 90 * time.Second},
		then: []act{{wait, *bad(atOnce, "3", `Unhealthy \(reset\).*twice within`)},
			{cleared("3").deed, outcome{within: recoveryTime}}},
	},
	{
		// What a pod has stays in the list of the next process, too, which cannot identify that GPU.
		name:   "a call on one GPU hangs while a pod has it, and the daemon is started again",
		inject: []simulator.Fault{hung("DeviceGetFieldValues", "3")}, do: admit,
		run: bad(silent, "3", "DeviceGetFieldValues"),
		then: []act{
			{restart("the daemon is started again", hung("DeviceGetFieldValues", "3")),
				outcome{within: silent, bad: []string{"3"}, hold: dropped}},
			{restoredAll.deed, outcome{within: askedAgain}},
		},
	},
	{
		name: "calls on two GPUs hang, and a third GPU asks for a reset",
		inject: []simulator.Fault{
			hung("", "3"), hung("DeviceGetMemoryInfo", "5"), {Kind: simulator.KindRecoveryAction, GPU: "6", Action: "reset"},
		},
		run: &outcome{
			within: silent, bad: []string{"3", "5", "6"}, hold: silent,
			says: map[string]string{"3": "nvmlDeviceGetHandleByIndex", "5": "nvmlDeviceGetMemoryInfo",
				"6": `Unhealthy \(reset\)`},
		},
		start: &outcome{within: silent, gone: []string{"3", "5"}, bad: []string{"6"}, hold: silent},
		then:  []act{{restoredAll.deed, outcome{within: askedAgain}}},
	},
	{
		name: "calls on six GPUs hang, and another one asks for a reset",
		inject: []simulator.Fault{
			hung("", "0"), hung("", "1"), hung("", "2"), hung("", "3"), hung("", "4"), hung("DeviceGetMemoryInfo", "5"),
			{Kind: simulator.KindRecoveryAction, GPU: "6", Action: "reset"},
		},
		run: &outcome{
			within: 20 * time.Second, bad: []string{"0", "1", "2", "3", "4", "5", "6"}, hold: silent,
			says: map[string]string{"0": "nvmlDeviceGetHandleByIndex", "5": "nvmlDeviceGetMemoryInfo",
				"6": `Unhealthy \(reset\)`},
		},
		start: &outcome{within: 20 * time.Second, gone: []string{"0", "1", "2", "3", "4", "5"}, bad: []string{"6"},
			hold: silent},
		then: []act{{restoredAll.deed, outcome{within: askedAgain}}},
	},
	{
		name: "every call takes 20 ms", inject: []simulator.Fault{{Kind: simulator.KindSlow, Delay: "20ms"}},
		run: &outcome{hold: 5 * polled}, start: &outcome{within: 10 * time.Second,
			hold: 5 * polled}, then: []act{restoredAll},
	},
	{
		name: "every call hangs", inject: []simulator.Fault{hung("", "")},
		run: unanswered(30 * time.Second), then: []act{restoredAll},
	},
	{
		name: "the event wait hangs", inject: []simulator.Fault{hung("EventSetWait", "")},
		run: &outcome{hold: waiting + nextLook + grace}, start: &outcome{hold: waiting + nextLook +
			grace}, then: []act{restoredAll},
	},
	{
		name: "the event wait fails for ever", inject: []simulator.Fault{failing("EventSetWait", "UNKNOWN")},
		run: &outcome{hold: 20 * time.Second}, start: &outcome{hold: 20 * time.Second},
		then: []act{
			{inject(asked("reset")), *bad(polled, "3", `Unhealthy \(reset\)`)},
			restoredAll,
			{wait, outcome{hold: reopened}},
			{inject(xid(48)), *bad(atOnce, "3", `XID 48`)},
		},
	},
	{
		name: "the event wait says for ever that some GPU is lost", inject: []simulator.Fault{failing("EventSetWait",
			"GPU_IS_LOST")},
		run: &outcome{hold: 20 * time.Second}, start: &outcome{hold: 20 * time.Second},
		then: []act{{inject(asked("reset")), *bad(polled, "3", `Unhealthy \(reset\)`)}, restoredAll},
	},
	{
		name: "no event set can be had", inject: []simulator.Fault{failing("EventSetCreate", "UNKNOWN")},
		start: &outcome{hold: suspicion}, then: []act{{inject(asked("reset")), *bad(polled, "3", `Unhealthy \(reset\)`)},
			restoredAll},
	},
	{
		name:   "one GPU spoils the event set",
		inject: []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Call: "DeviceRegisterEvents", Return: "UNKNOWN"}},
		start:  &outcome{hold: suspicion},
		then: []act{
			{inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 48}),
				*bad(atOnce, "5", `Unhealthy \(reset\).*XID 48`)},
			restoredAll,
		},
	},
}

// startedAnew waits until another program in the daemon's process serves kubelet.
func startedAnew(ctx context.Context, s *stage) error {
	ctx, cancel := context.WithTimeout(ctx, grace+starting)
	defer cancel()
	first, err := s.Next(ctx, 0, standin.Is(standin.Listed, "nvidia.com/gpu"))
	if err != nil {
		return err
	}
	if _, err := s.Next(ctx, first.Seq, standin.Is(standin.Registered, "nvidia.com/gpu")); err != nil {
		return err
	}
	select {
	case <-s.Running().Ended():
		return errors.New("the process has ended")
	default:
		return nil
	}
}
