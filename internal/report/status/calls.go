package status

import (
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// AddUnwatched adds the GPUs without driver events.
func (s *Status) AddUnwatched(gpus []inventory.LeftOut) {
	for _, g := range gpus {
		s.Unwatched = append(s.Unwatched, unwatched(fmt.Sprint("GPU ", g.Index), g.Reason))
	}
}

// AddCalls adds the pending calls into the driver. While a wait for events hangs, no GPU has events.
func (s *Status) AddCalls(calls []inventory.Call) {
	s.Hanging = len(calls)
	for _, c := range calls {
		shown := Call{Function: c.Function, Since: Moment(c.Since)}
		if c.GPU != inventory.NoGPU {
			shown.GPU = &c.GPU
		}
		s.Calls = append(s.Calls, shown)
		if strings.HasSuffix(c.Function, "EventSetWait") {
			s.Unwatched = append(s.Unwatched, unwatched("all GPUs", c.Function+" does not return"))
		}
	}
}

// unwatched returns the sentence about GPUs without driver events.
func unwatched(gpus, reason string) string {
	return fmt.Sprintf("%s: no driver events; faults are found by polling only (%s)", gpus, reason)
}
