package faults

import (
	"context"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// dropped is how long a device that is gone is listed as Unhealthy: ten seconds, and a look at what
// pods hold.
const dropped = 31 * time.Second

// admit is the deed of giving a pod all GPUs.
var admit = deed{"a pod gets all GPUs", func(ctx context.Context, s *stage) error {
	_, err := s.Admit(ctx, standin.Container{Pod: "work", Name: "main", Resource: "nvidia.com/gpu", Count: 8})
	return err
}}

// busFaults are GPUs that come and go.
var busFaults = []fault{
	{
		name: "lost, and the event wait says so", inject: []simulator.Fault{on(simulator.KindLost)},
		run: bad(atOnce, "3", "Lost"), start: &outcome{gone: []string{"3"}}, then: []act{restored},
	},
	{
		name: "lost, without any event", inject: []simulator.Fault{refused("GPU_IS_LOST")},
		run: bad(polled, "3", "Lost"), then: []act{restored}, // by the handle that there is
	},
	{
		name: "lost, without any event", inject: []simulator.Fault{refused("GPU_IS_LOST")},
		start: &outcome{gone: []string{"3"}}, then: []act{{restored.deed, outcome{within: leftAlone}}},
	},
	{
		name: "all lost", inject: ofAll(on(simulator.KindLost)),
		run: &outcome{all: true, says: map[string]string{"0": "Lost",
			"7": "Lost"}}, start: &outcome{none: true}, then: []act{restoredAll},
	},
	{
		name:   "one of eight does not answer its UUID",
		inject: []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetUUID", Return: "UNKNOWN"}},
		run:    &outcome{hold: suspicion}, start: &outcome{gone: []string{"3"}},
		then: []act{{restored.deed, outcome{within: leftAlone}}},
	},
	{
		name: "unplugged, and plugged in", inject: []simulator.Fault{on(simulator.KindRemove)},
		run:  &outcome{leaving: true},
		then: []act{{wait, outcome{within: dropped}}, {inject(on(simulator.KindAdd)), outcome{}}},
	},
	{
		name: "unplugged, and plugged in", inject: []simulator.Fault{on(simulator.KindRemove)},
		start: &outcome{}, then: []act{{inject(on(simulator.KindAdd)), outcome{}}},
	},
	{
		// The driver has no event for a GPU that comes.
		name: "unplugged, and plugged in, before R575", machine: machine{profile: "dgx-a100"},
		inject: []simulator.Fault{on(simulator.KindRemove)},
		run:    &outcome{leaving: true},
		then:   []act{{wait, outcome{within: dropped}}, {inject(on(simulator.KindAdd)), outcome{within: polled}}},
	},
	{
		name: "unplugged while a pod has it", do: both(admit, inject(on(simulator.KindRemove))),
		run: &outcome{leaving: true, hold: dropped},
		then: []act{{deed{"the pod ends", func(_ context.Context, s *stage) error { s.Remove("work"); return nil }},
			outcome{within: dropped}}},
	},
	{
		name: "unplugged, and back before it is dropped", inject: []simulator.Fault{on(simulator.KindRemove)},
		run:  &outcome{leaving: true},
		then: []act{{inject(on(simulator.KindAdd)), outcome{}}},
	},
}
