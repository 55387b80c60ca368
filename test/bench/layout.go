package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

var layoutFigures = []figure{
	{"MIG layout of 8 GPUs, random layouts, H100", "any within 5 ms", layoutOf(0x233010de,
		"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")},
	{"MIG layout of 8 GPUs, random layouts, RTX PRO 6000", "any within 5 ms", layoutOf(0x2bb510de,
		"1g.24gb", "1g.24gb+me", "1g.24gb+gfx", "1g.24gb-me", "2g.48gb", "2g.48gb+gfx", "2g.48gb-me", "4g.96gb")},
}

// layoutOf measures planning, for 8 GPUs of a model which have what an earlier layout made of them,
// most of whose layouts are not possible.
func layoutOf(model uint32, profiles ...string) func(context.Context, string) (string, error) {
	return func(context.Context, string) (string, error) {
		r := rand.New(rand.NewPCG(1, uint64(model)))
		var gpus []layout.GPU
		for i := range 8 {
			gpus = append(gpus, layout.GPU{Index: i, UUID: fmt.Sprint("GPU-", i), Partitions: inventory.Partitions{
				PCIDevice: model, Mode: inventory.MIGEnabled, Pending: inventory.MIGEnabled,
			}})
		}
		times := make([]time.Duration, 0, 5000)
		possible := 0
		for range cap(times) {
			devices := map[string]int{}
			for range 1 + r.IntN(8) {
				devices[profiles[r.IntN(len(profiles))]]++
			}
			l := layout.Layout{Items: []layout.Item{{All: true, Enabled: true, Devices: devices}}}
			var changes layout.Changes
			quickest := time.Duration(math.MaxInt64)
			for range 3 { // what else the machine does is not to count
				began := time.Now()
				changes = layout.Plan(l, gpus)
				quickest = min(quickest, time.Since(began))
			}
			times = append(times, quickest)
			if !changes.Possible() {
				continue
			}
			possible++
			for i, c := range changes.GPUs {
				gpus[i].Instances, gpus[i].InUse = nil, map[int]bool{}
				for id, part := range c.After.Instances {
					part.ID = id
					gpus[i].Instances = append(gpus[i].Instances, part.GPUInstance)
					gpus[i].InUse[id] = r.IntN(2) == 0
				}
			}
		}
		return fmt.Sprintf("%s; %d of %d possible", spread(times), possible, len(times)), nil
	}
}
